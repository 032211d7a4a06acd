"""What must hold for every callback of the package, those to come included."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import pickle
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import lightning_memtools
from lightning_memtools import VirtualDevice
from tests.lightning_models import Adversaries, Regression, assert_same_bits, loader, trainer

CALLBACKS: list[type[L.Callback]] = [
    value
    for name in lightning_memtools.__all__
    if isinstance(value := getattr(lightning_memtools, name), type) and issubclass(value, L.Callback)
]
every_callback = pytest.mark.parametrize("callback", CALLBACKS, ids=lambda c: c.__name__)

# Arguments whose accepted texts their type cannot tell.
TEXTS = {
    "checks": "devices",
    "directory": "reports",
    "ignore": "devices",
    "memory_budget": "8GiB",
    "margin": "1GiB",
    "max_bytes": "1GiB",
}

# Arguments that refuse the numbers that others take.
NUMBERS = {"window": 200, "warm_up": 20, "sensitivity": 3.5, "least_ratio": 2.5}


def values_to_set(name: str, annotation: Any, default: Any) -> list[Any]:
    """For an argument, one value of each kind that its annotation admits, other than the default where possible."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in {types.UnionType, typing.Union}:
        return list(itertools.chain.from_iterable(values_to_set(name, kind, default) for kind in arguments))
    if origin is typing.Literal:
        return list(arguments)
    if origin in {Sequence, list, tuple} or (origin is not None and issubclass(origin, Sequence)):
        if default and isinstance(default, tuple):
            return [[default[0]]]
        return [[value] for value in values_to_set(name, arguments[0], None)]
    if origin is Callable:
        return ["operator.mod"]
    plain: dict[Any, list[Any]] = {
        bool: [not default],
        int: [NUMBERS.get(name, 3)],
        float: [NUMBERS.get(name, 0.25)],
        str: [TEXTS.get(name, "a_name")],
        type(None): [None],
    }
    assert annotation in plain, f"{name}: {annotation} is no plain type that YAML can give"
    return plain[annotation]


NEEDED: dict[str, dict[str, Any]] = {"OOMRecovery": {"loss": "mean"}}


def made(callback: type[L.Callback]) -> L.Callback:
    """The callback with no more arguments than it needs."""
    return callback(**NEEDED.get(callback.__name__, {}))


def arguments_of(callback: type[L.Callback]) -> dict[str, tuple[Any, Any]]:
    """Argument to (annotation, default)."""
    hints = typing.get_type_hints(callback.__init__)
    parameters = list(inspect.signature(callback.__init__).parameters.values())[1:]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters), "arguments are keyword-only"
    return {p.name: (hints[p.name], p.default) for p in parameters}


class AnyModule(Regression):
    """LightningCLI needs a class without arguments."""

    def __init__(self) -> None:
        super().__init__()


@every_callback
def test_every_argument_can_be_set_from_yaml(callback, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI's own use of it
    needed = NEEDED.get(callback.__name__, {})
    for name, (annotation, default) in arguments_of(callback).items():
        for value in values_to_set(name, annotation, default):
            if name in needed and value is None:
                continue
            path = f"lightning_memtools.{callback.__name__}"  # as the docs write it: through the lazy package
            entry = {"class_path": path, "init_args": needed | {name: value}}
            config = {"trainer": {"logger": False, "accelerator": "cpu", "callbacks": [entry]}}
            Path("config.yaml").write_text(yaml.safe_dump(config))
            cli = LightningCLI(
                AnyModule,
                args=["--config", "config.yaml"],
                run=False,
                save_config_callback=None,
                seed_everything_default=False,
            )
            (one,) = (c for c in cli.trainer.callbacks if isinstance(c, callback))
            kept = getattr(one, name)
            if callable(kept):  # YAML gives its import path
                kept = f"operator.{kept.__name__}"
            assert kept == (value if not isinstance(kept, tuple) else tuple(value)), f"{name}={value!r}"


@every_callback
def test_every_argument_is_described(callback):
    doc = inspect.getdoc(callback) or ""
    for name in arguments_of(callback):
        assert f"\n    {name}: " in doc, f"{callback.__name__} does not describe {name}"


def whole_run(root: Path, *callbacks: L.Callback, model: L.LightningModule | None = None, **options: Any) -> L.Trainer:
    """Fit, validate, test and predict with one Trainer."""
    model = model or Regression()
    run = trainer(root, *callbacks, **options)
    run.fit(model, loader(), loader(16, seed=1))
    run.validate(model, loader(16, seed=1), verbose=False)
    run.test(model, loader(16, seed=2), verbose=False)
    run.predict(model, loader(8, seed=3))
    return run


class Diverges(Regression):
    """Its loss is NaN in the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if batch_idx == 2 else loss


class RunsOut(Regression):
    """Runs out of memory in the third step, as on a GPU."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB."
            )
        return super().training_step(batch, batch_idx)


@every_callback
@pytest.mark.parametrize("model", [Regression, Diverges, RunsOut])
def test_without_a_logger_nothing_is_written_unasked(callback, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    run = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[made(callback)], **quiet)
    if model is Regression:
        run.fit(model(), loader(), loader(16, seed=1))
        run.test(model(), loader(16, seed=2), verbose=False)
    else:
        with contextlib.suppress(RuntimeError):
            run.fit(model(), loader(), loader(16, seed=1))
    assert not [*tmp_path.iterdir()]


def state_of(model: L.LightningModule) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), "rng": torch.get_rng_state()}


def moments_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{i}.{name}": value for i, state in states.items() for name, value in state.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": True},
    "accumulation": {"accumulate_grad_batches": 3},
    "without_validation": {"limit_val_batches": 0},
    "no_training_batches": {"limit_train_batches": 0},
    "validation_inside_the_epoch": {"val_check_interval": 2},
    "clipping": {"gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed"},
    "max_steps": {"max_epochs": None, "max_steps": 2},
    "barebones": {"barebones": True, "logger": None, "log_every_n_steps": None, "enable_checkpointing": None,
                  "enable_progress_bar": None, "enable_model_summary": None},
}  # fmt: skip


@every_callback
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_ends_in_the_same_bits_with_and_without(callback, options, tmp_path):
    ends = []
    for with_it in (True, False):
        L.seed_everything(0, verbose=False)
        model = Regression()
        run = trainer(tmp_path, *([made(callback)] if with_it else []), **options)
        run.fit(model, loader(), None if options.get("barebones") else loader(16, seed=1))
        ends.append(state_of(model) | moments_of(run.optimizers[0]))
    assert_same_bits(*ends)


@every_callback
def test_manual_optimization_with_two_optimizers_is_untouched(callback, tmp_path):
    ends = []
    for with_it in (True, False):
        L.seed_everything(0, verbose=False)
        model = Adversaries()
        trainer(tmp_path, *([made(callback)] if with_it else [])).fit(model, loader(), loader(16, seed=1))
        ends.append(state_of(model))
    assert_same_bits(*ends)


@every_callback
def test_a_resumed_run_ends_as_one_that_was_never_stopped(callback, tmp_path):
    def run(epochs: int, resume: str | None, *callbacks: L.Callback) -> tuple[L.Trainer, Regression]:
        L.seed_everything(0, verbose=False)
        model = Regression()
        model.net.add_module("3", torch.nn.Identity())  # RNG states are not part of a checkpoint
        fit = trainer(tmp_path, *callbacks, max_epochs=epochs)
        fit.fit(model, loader(), loader(16), ckpt_path=resume)
        return fit, model

    checkpoint = str(tmp_path / "half.ckpt")
    run(1, None, made(callback))[0].save_checkpoint(checkpoint)
    _, resumed = run(2, checkpoint, made(callback))
    _, straight = run(2, None)
    assert_same_bits(dict(resumed.state_dict()), dict(straight.state_dict()))


@every_callback
def test_a_trainer_with_two_loggers_can_be_used_twice(callback, tmp_path):
    model = Regression()
    run = whole_run(tmp_path, made(callback), model=model, logger=[TensorBoardLogger(tmp_path), CSVLogger(tmp_path)])
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(), loader(16))
    assert run.global_step == 8
    assert all(report.suffix in {".md", ".json"} for report in tmp_path.rglob("memtools/*"))


@every_callback
def test_two_of_a_kind_and_copies_and_pickles_work(callback, tmp_path):
    first = made(callback)
    second = pickle.loads(pickle.dumps(copy.deepcopy(first)))  # noqa: S301, our own
    if type(first).state_dict is not L.Callback.state_dict:
        second = first  # a stateful callback needs a state_key of its own for each
    run = whole_run(tmp_path, *{id(c): c for c in (first, second)}.values())
    assert run.global_step == 4
    pickle.dumps(first)


class Pickles(L.Callback):
    """Pickles and copies the Trainer with its callbacks at the end of a batch and of a validation."""

    takes_part_in_trials = False

    def __init__(self) -> None:
        self.copies: list[L.Trainer] = []

    def __getstate__(self) -> dict[str, object]:
        return {"copies": []}

    def on_train_batch_end(self, trainer, *args):
        self.copies += [pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)]  # noqa: S301, our own

    def on_validation_end(self, trainer, pl_module):
        self.on_train_batch_end(trainer)


@every_callback
def test_a_trainer_can_be_pickled_and_copied_while_it_trains(callback, tmp_path):
    pickles = Pickles()
    first = made(callback)
    with VirtualDevice("64MiB"):
        run = trainer(tmp_path, first, pickles, max_steps=2, logger=False)
        run.fit(Regression(), loader(), loader(16))
    assert run.global_step == (1 if isinstance(first, lightning_memtools.BatchSizeTuner) else 2)  # it takes all at once
    assert len(pickles.copies) >= 4  # the sanity check's too
    for twins in pickles.copies:
        (twin,) = (one for one in twins.callbacks if type(one) is type(first))
        assert twin is not first
        assert twins.save_checkpoint.__self__ is twins
    twin.teardown(pickles.copies[-1], Regression(), "fit")  # what belongs to the run stays with the original
    assert run.callbacks[0] is first


@every_callback
def test_nothing_is_left_behind_when_training_fails(callback, tmp_path):
    class Fails(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx:
                raise RuntimeError("from the user's code")

    model = Fails()
    hooks_before = hooks_of(model)
    run = trainer(tmp_path, made(callback))
    with pytest.raises(RuntimeError, match="from the user's code"):
        run.fit(model, loader(), loader(16))
    assert hooks_of(model) == hooks_before
    assert not any(hooks_of(optimizer) for optimizer in run.optimizers)


def hooks_of(target: torch.nn.Module | torch.optim.Optimizer) -> list[tuple[str, int]]:
    """Every table of hooks of a module and its children, or of an optimizer, that is not empty."""
    parts = target.modules() if isinstance(target, torch.nn.Module) else [target]
    return [
        (f"{type(part).__name__}.{name}", len(table))
        for part in parts
        for name, table in vars(part).items()
        if name.endswith("hooks") and table
    ]
