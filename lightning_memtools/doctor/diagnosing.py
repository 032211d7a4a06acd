"""`diagnose`: examines a model, its data and its optimizer without a Trainer, in a few steps that are then undone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools._lightning import Callback
from lightning_memtools.doctor.examination import Examination, selected_checks
from lightning_memtools.doctor.findings import DoctorReport, Finding
from lightning_memtools.doctor.graph_checks import evaluation_graphs
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.user_code import user_line_of
from lightning_memtools.reporting.phrases import first_of
from lightning_memtools.simulation.step_runner import (
    Recipe,
    StepFunction,
    StepListener,
    StepRunner,
    is_lightning_module,
)
from lightning_memtools.state.state_snapshot import StateSnapshot
from lightning_memtools.warning_categories import DegradedWarning

_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
_STATISTICS = ("num_batches_tracked", "running_mean", "running_var")


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
) -> DoctorReport:
    """Find the classic training mistakes in a model, its data and its optimizer, by running a few training steps.

    The steps are real, but undone afterwards: weights, buffers, optimizer state, attributes and random states are
    restored. Consumed data is not: a generator passed as `dataloader` loses up to `steps` batches.

    Args:
        model: A module, or a LightningModule. If the module itself is in eval mode, train() is called for the steps.
        dataloader: Yields the training batches. It is read again if it ends early. A tensor, or a tuple, dict or
            list of tensors, is taken as a single batch.
        optimizer: One or several optimizers. None calls configure_optimizers of a LightningModule. Without any
            optimizer, only gradients are computed.
        step: A function that returns the loss of a batch. Needed unless the model is a LightningModule.
        val_dataloader: Yields evaluation batches for `evaluate`.
        evaluate: A function that runs an evaluation batch as your own loop does, with or without no_grad. If it is
            None, evaluation is not checked.
        checkpoint: The path of a checkpoint, whose keys are compared with the model's.
        checks: "all", or names of checks.
        ignore: Names of checks to leave out.
        steps: The number of training steps to run, and the number of evaluation batches.

    Returns:
        The report. If a step raises, the report keeps what was found before, and adds the error with the user's line.

    Raises:
        ValueError: A check's name is unknown, `steps` is below 1, a plain module is passed without `step`, or the
            checkpoint cannot be read.
    """
    names = selected_checks(checks, ignore)
    if not is_count(steps):
        raise ValueError(f"steps={steps!r} watches nothing. Give a number of training steps from 1 upwards.")
    if step is None and not is_lightning_module(model):
        raise ValueError(f"{type(model).__name__} is no LightningModule: pass step=lambda model, batch: loss.")
    is_list = isinstance(dataloader, list) and bool(dataloader) and all(isinstance(one, Tensor) for one in dataloader)
    if is_list or isinstance(dataloader, Tensor | tuple | Mapping):
        dataloader = [dataloader]
    snapshot = StateSnapshot([model, optimizer])
    try:
        findings = []
        if checkpoint is not None and "checkpoint_keys" in names:
            findings = _load_and_compare(model, os.fspath(checkpoint))
            snapshot.restore()
        given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        case = TrainingCase(
            model=model,
            train_loader=dataloader,
            device=next((p.device for p in model.parameters()), torch.device("cpu")),
            others=[one for one in (step, evaluate) if one is not None],
        )
        examination = Examination(case, names, steps)
        examination.findings += findings
        try:
            run = _RealSteps(examination, step, given)
            run.train(steps)
            if evaluate is not None and "evaluation_graphs" in names:
                for batch in islice(val_dataloader or (), steps):
                    examination.findings += evaluation_graphs(evaluate(model, run.place(batch)))
        except Exception as error:  # noqa: BLE001, the user's own step may raise anything
            place = str(user_line_of(error) or "the training step")
            examination.findings.append(finding("step", place, f"The step raised {in_one_line(error).rstrip('.')}."))
        examination.tell("end")
    finally:
        snapshot.restore()
    if examination.failures:
        warnings.warn(f"These checks failed: {'; '.join(examination.failures)}.", DegradedWarning, stacklevel=2)
    return examination.report()


def _load_and_compare(model: nn.Module, path: str) -> list[Finding]:
    """Load a checkpoint of Lightning or of a plain script into the model; return findings on mismatched keys.

    The caller has to restore the model afterwards. No code in the file is executed (`weights_only=True`).

    Raises:
        ValueError: The file cannot be read, or holds no state_dict.
    """
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"checkpoint={path!r} cannot be read: {in_one_line(error)}") from error
    for key in _CONTAINERS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"checkpoint={path!r} holds {type(state).__name__}, and no state_dict.")
    try:
        # torch adds missing counters of old checkpoints itself, so that they are not among these.
        missing, unexpected = nn.Module.load_state_dict(model, state, strict=False)
    except RuntimeError as error:  # of other sizes
        return [finding("checkpoint_keys/others", path, " ".join(str(error).split())[:300])]
    if not (keys := [*missing, *unexpected]):
        return []
    evidence = f"Missing: {first_of(missing) or 'none'}. Unexpected: {first_of(unexpected) or 'none'}."
    if all(key.endswith(_STATISTICS) for key in keys):
        evidence += " BatchNorm has these keys; it counts batches since PyTorch 0.4.1, where it tracks statistics."
        return [finding("checkpoint_keys/statistics", f"{path}: {first_of(keys)}", evidence)]
    return [finding("checkpoint_keys/others", f"{path}: {first_of(keys)}", evidence)]


class _RealSteps(StepListener, Callback):
    """Runs training steps in Lightning's loop, and reports each event to an Examination, which runs the checks."""

    def __init__(self, examination: Examination, step: StepFunction | None, optimizers: Sequence[Optimizer]) -> None:
        self._examination, self._case = examination, examination.case
        self._batches: list[Any] = []
        model, make = self._case.model, (lambda _parameters: list(optimizers)) if optimizers else None
        hooks = step is None or len(optimizers) <= 1  # a LightningModule has one where it does not step them itself
        self._runner = StepRunner(model, Recipe(), self, step=step, make_optimizer=make, callbacks=[self], hooks=hooks)

    def train(self, steps: int) -> None:
        """Run `steps` training steps."""
        model, tell = self._case.model, self._examination.tell
        if not model.training:
            model.train()
        tell("start")
        for batch in islice(chain.from_iterable(repeat(self._case.train_loader, steps)), steps):
            self._batches = [self.place(batch)]
            tell("batch_start", self._batches[0])
            self._runner.run_batch()
            tell("batch_end")

    # --- called by the runner

    def next_batch(self) -> Any:
        """Return the batch that the loop is to run next."""
        return self._batches.pop(0)

    def place(self, batch: Any, *_: Any) -> Any:
        """Return the batch, copied to the model's device."""
        return map_tensors(batch, lambda tensor: tensor.to(self._case.device))

    def on_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Store the optimizers, and exclude them from searches for objects that hold autograd graphs."""
        self._case.optimizers = self._case.stop_at = optimizers

    # --- called by Lightning

    def on_before_backward(self, *arguments: Any) -> None:
        """Pass the loss to the checks."""
        self._examination.tell("loss", arguments[-1])

    def on_after_backward(self, *_: Any) -> None:
        """Tell the checks that gradients have been computed."""
        self._examination.tell("gradients")

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        """Pass the optimizer to the checks."""
        self._examination.tell("update", arguments[-1])
