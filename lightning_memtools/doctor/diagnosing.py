"""`diagnose`: examines a model, its data and its optimizer without a Trainer, in a few steps that are taken back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools.argument_types import check_types
from lightning_memtools.doctor.examination import Examination, selected_checks
from lightning_memtools.doctor.findings import DoctorReport, Finding
from lightning_memtools.doctor.step_trial import place_of_error
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.simulation.step_runner import (
    Recipe,
    StepListener,
    StepRunner,
    forward_of,
    has_step,
    is_lightning_module,
)
from lightning_memtools.state.state_snapshot import StateSnapshot


def diagnose(
    model: nn.Module,
    dataloader: Iterable[Any],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    val_dataloader: Iterable[Any] | None = None,
    evaluate: Callable[[nn.Module, Any], Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checks: str | Sequence[str] = "all",
    ignore: Sequence[str] = (),
    steps: int = 20,
    precision: str = "32-true",
    clip: float | None = None,
) -> DoctorReport:
    """Find the classic training mistakes in a model, its data and its optimizer, by running a few training steps.

    The steps are real, and taken back: afterwards weights, buffers, optimizer state, attributes and random streams are
    as before. A loader's data set is read, and a generator given as the dataloader is used up by `steps` batches.

    Args:
        model: A module, or a LightningModule. Where it is in eval mode as a whole, train() is called for the steps.
        dataloader: Gives the training batches. It is read again where it ends early.
        optimizer: The optimizer, or several. A LightningModule's own are made if it is None. Without any, only
            gradients are computed.
        step: Returns the loss of a batch. Needed for a plain module; a LightningModule has its training_step.
        val_dataloader: Gives evaluation batches; without it, evaluation is not examined.
        evaluate: Runs an evaluation batch as your own loop does, with no_grad or without. None takes a
            LightningModule's validation_step, without gradients as Lightning does.
        checkpoint: A checkpoint that is to be loaded, whose keys are compared with the model.
        checks: "all", or names of checks.
        ignore: Names of checks to leave out.
        steps: The training steps to watch.
        precision: As Lightning names it, to judge combinations of settings; the steps run as they are.
        clip: Gradients are clipped to this norm, to judge combinations of settings.

    Returns:
        The report. A step that raises is an error in it, at the user's line; what was found until then stands.

    Raises:
        ValueError: A check's name is unknown, `steps` is below 1, a plain module comes without `step`, or the
            checkpoint is no file.
        TypeError: The dataloader is one batch instead of an iterable of batches.
    """
    check_types(diagnose, locals())
    names = selected_checks(checks, ignore)
    if not is_count(steps):
        raise ValueError(f"steps={steps!r} watches nothing. Give a number of training steps from 1 upwards.")
    is_lightning = is_lightning_module(model)
    if step is None and not is_lightning:
        raise ValueError(
            f"{type(model).__name__} is no LightningModule, so diagnose does not know its loss. Pass "
            "step=lambda model, batch: loss."
        )
    # The function that `memtools estimate` takes returns (model, batch).
    if isinstance(dataloader, Tensor | tuple | Mapping):
        raise TypeError(f"dataloader is one batch, a {type(dataloader).__name__}. Give batches, such as [batch].")
    if checkpoint is not None and not Path(checkpoint).is_file():
        is_there = "is a directory; give one file" if Path(checkpoint).is_dir() else "does not exist"
        raise ValueError(f"checkpoint={os.fspath(checkpoint)!r} {is_there}.")
    snapshot = StateSnapshot([model, optimizer])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice to a training that is not one
            steps_of = _StepsOf(model, step, _given(optimizer))
            optimizers = steps_of.optimizers
            snapshot_of_state = StateSnapshot(optimizers)
            case = TrainingCase(
                model=model,
                optimizers=optimizers,
                train_loader=dataloader,
                evaluation_loaders=() if val_dataloader is None else (val_dataloader,),
                n_train_batches=_length_of(dataloader),
                forward=step or forward_of(model, optimizers=optimizers),
                device=next((p.device for p in model.parameters()), torch.device("cpu")),
                precision=precision,
                clip=clip,
                checkpoint=None if checkpoint is None else os.fspath(checkpoint),
                seeded="PL_GLOBAL_SEED" in os.environ,
                steps=steps,
                others=[one for one in (step, evaluate) if one is not None],
                stop_at=optimizers,
            )
            examination = Examination(case, names)
            try:
                _examine(examination, steps_of, val_dataloader, evaluate)
            except Exception as error:  # noqa: BLE001, the user's own step may raise anything
                examination.conclude()
                examination.findings.append(_step_failed(error, model))
            snapshot_of_state.restore()
    finally:
        snapshot.restore()
    return examination.report()


def _given(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())


def _examine(
    examination: Examination,
    steps: _StepsOf,
    val_dataloader: Iterable[Any] | None,
    evaluate: Callable[[nn.Module, Any], Any] | None,
) -> None:
    case = examination.case
    model = case.model
    examination.before_loading()
    if not model.training:
        model.train()
    examination.before_training()
    for batch in _batches(case.train_loader, case.steps):
        steps.run(examination, batch)
    examination.conclude()
    if val_dataloader is None:
        return
    batches = list(islice(val_dataloader, case.steps))
    if evaluate is None and is_lightning_module(model) and has_step(model, "validation_step"):
        steps.evaluate(examination, batches)
        return
    modes = {module: module.training for module in model.modules()}
    for batch in batches:
        placed = map_tensors(batch, lambda tensor: tensor.to(case.device))
        examination.evaluation_batch_start()
        examination.evaluation_batch_end(None if evaluate is None else evaluate(model, placed))
    for module, mode in modes.items():
        module.training = mode


class _StepsOf(StepListener, Callback):
    """Runs real training and evaluation steps in Lightning's loops, and passes their events to an examination."""

    def __init__(
        self, model: nn.Module, step: Callable[[nn.Module, Any], Tensor] | None, optimizers: Sequence[Optimizer]
    ) -> None:
        self._model = model
        self._examination: Any = None
        self._batches: list[Any] = []
        self.optimizers: list[Optimizer] = []
        self._runner = StepRunner(model, Recipe(), self, step=step, optimizers=optimizers, callbacks=[self])

    def run(self, examination: Examination, batch: Any) -> None:
        """Run one training step."""
        placed = map_tensors(batch, lambda tensor: tensor.to(examination.case.device))
        examination.batch_start(placed)
        self._examination, self._batches = examination, [placed]
        self._runner.run_batch()
        examination.batch_end(placed)

    def evaluate(self, examination: Examination, batches: list[Any]) -> None:
        """Run the evaluation steps of these batches."""
        self._examination, self._batches = examination, batches
        StepRunner(self._model, Recipe(stage="val", steps=len(batches)), self, callbacks=[self]).run()

    # --- called by the runner

    def next_batch(self) -> Any:
        """Return the next batch."""
        return self._batches.pop(0)

    def place(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Return the batch on the model's device."""
        del move
        return map_tensors(batch, lambda tensor: tensor.to(self._examination.case.device))

    def on_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Keep the optimizers."""
        self.optimizers = optimizers

    # --- called by Lightning

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Pass the loss on."""
        del trainer, pl_module
        self._examination.before_backward(loss)

    def on_after_backward(self, *_: Any) -> None:
        """Pass on that gradients exist."""
        self._examination.after_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Pass the optimizer on."""
        del trainer, pl_module
        self._examination.before_optimizer_step(optimizer)

    def on_validation_batch_start(self, *_: Any, **_named: Any) -> None:
        """Pass on that an evaluation step begins."""
        self._examination.evaluation_batch_start()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **_named: Any) -> None:
        """Pass its outputs on."""
        del trainer, pl_module
        self._examination.evaluation_batch_end(outputs)


def _batches(loader: Iterable[Any], n: int) -> Iterator[Any]:
    """Yield n batches, and start the loader again where it ends early. An empty loader yields none."""
    while n > 0:
        before = n
        for batch in islice(loader, n):
            n -= 1
            yield batch
        if n == before:
            return


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a generator, or a loader of an iterable data set
        return None


def _step_failed(error: Exception, model: nn.Module) -> Finding:
    return Finding(
        "step",
        "error",
        place_of_error(error, model),
        f"The step raised {in_one_line(error)}",
        "Training ends there; the checks that need more steps say nothing.",
        "Mend the step first, and examine again.",
    )
