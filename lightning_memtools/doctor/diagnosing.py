"""`diagnose`: examines a model, its data and its optimizer without a Trainer, in a few steps that are taken back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools.argument_types import check_types
from lightning_memtools.doctor.check_registry import selected_checks
from lightning_memtools.doctor.examination import Examination
from lightning_memtools.doctor.findings import DoctorReport, Finding
from lightning_memtools.doctor.step_trial import place_of_error
from lightning_memtools.doctor.training_case import Forward, TrainingCase
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.simulation.fakes import copy_optimizer
from lightning_memtools.simulation.trainer_stand_in import (
    SilentLogger,
    TrainerStandIn,
    accepted_arguments,
    attach,
    configured_optimizers,
    has_step,
    is_lightning_module,
)
from lightning_memtools.state.state_snapshot import StateSnapshot

_STAND_IN_LACKS = (
    "which diagnose has no Trainer to answer for. Pass step=lambda model, batch: loss, or use TrainingDoctor."
)


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
    if checkpoint is not None and not Path(checkpoint).is_file():
        is_there = "is a directory; give one file" if Path(checkpoint).is_dir() else "does not exist"
        raise ValueError(f"checkpoint={os.fspath(checkpoint)!r} {is_there}.")
    snapshot = StateSnapshot([model, optimizer])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice to a training that is not one
            optimizers = _optimizers_of(model, optimizer)
            snapshot_of_state = StateSnapshot(optimizers)
            case = TrainingCase(
                model=model,
                optimizers=optimizers,
                train_loader=dataloader,
                evaluation_loaders=() if val_dataloader is None else (val_dataloader,),
                n_train_batches=_length_of(dataloader),
                forward=_forward(step, optimizers),
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
                _examine(examination, step, val_dataloader, evaluate)
            except Exception as error:  # noqa: BLE001, the user's own step may raise anything
                examination.conclude()
                examination.findings.append(_step_failed(error, model))
            snapshot_of_state.restore()
    finally:
        snapshot.restore()
    return examination.report()


def _optimizers_of(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    if optimizer is not None:
        return list(optimizer)
    if not is_lightning_module(model):
        return []
    attach(model, TrainerStandIn(backward=_backward, logger=SilentLogger(), missing=_STAND_IN_LACKS))
    return configured_optimizers(model)[0]


def _examine(
    examination: Examination,
    step: Callable[[nn.Module, Any], Tensor] | None,
    val_dataloader: Iterable[Any] | None,
    evaluate: Callable[[nn.Module, Any], Any] | None,
) -> None:
    case = examination.case
    model = case.model
    examination.before_loading()
    if not model.training:
        model.train()
    examination.before_training()
    runs = _LoopOfSteps(examination, step)
    for index, batch in enumerate(_batches(case.train_loader, case.steps)):
        runs.run(map_tensors(batch, lambda tensor: tensor.to(case.device)), index)
    examination.conclude()
    if val_dataloader is None:
        return
    modes = {module: module.training for module in model.modules()}
    is_own = evaluate is None and is_lightning_module(model) and has_step(model, "validation_step")
    if is_own:
        model.eval()
    for index, batch in enumerate(islice(val_dataloader, case.steps)):
        placed = map_tensors(batch, lambda tensor: tensor.to(case.device))
        examination.evaluation_batch_start()
        outputs: Any = None
        if evaluate is not None:
            outputs = evaluate(model, placed)
        elif is_own:
            attach(
                model, TrainerStandIn(backward=_backward, stage="val", logger=SilentLogger(), missing=_STAND_IN_LACKS)
            )
            function: Any = model.validation_step
            with torch.no_grad():
                outputs = function(*accepted_arguments(function, placed, index))
        examination.evaluation_batch_end(outputs)
    for module, mode in modes.items():
        module.training = mode


class _LoopOfSteps:
    """Runs real training steps as a Trainer does, and tells the examination of them."""

    def __init__(self, examination: Examination, step: Callable[[nn.Module, Any], Tensor] | None) -> None:
        self._examination = examination
        self._step = step
        self._stand_in = TrainerStandIn(
            backward=self._manual_backward,
            optimizers=examination.case.optimizers,
            step=self._manual_step,
            logger=SilentLogger(),
            missing=_STAND_IN_LACKS,
        )

    def run(self, batch: Any, index: int) -> None:
        """Run one step."""
        examination, model = self._examination, self._examination.case.model
        examination.batch_start(batch)
        if self._step is not None:
            loss: Any = self._step(model, batch)
        else:
            attach(model, self._stand_in)
            function: Any = model.training_step
            loss = function(*accepted_arguments(function, batch, index))
        loss = loss.get("loss") if isinstance(loss, dict) else loss
        if isinstance(loss, Tensor) and getattr(model, "automatic_optimization", True):
            for optimizer in examination.case.optimizers:
                optimizer.zero_grad()
            if not examination.case.optimizers:
                model.zero_grad()
            self._manual_backward(loss)
            del loss
            for optimizer in examination.case.optimizers:
                examination.before_optimizer_step(optimizer)
                optimizer.step()
        examination.batch_end(batch)

    def _manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        # A node of its own, as Lightning makes by scaling: a graph that the user keeps begins below it.
        self._examination.before_backward(loss)
        loss.backward(*args, **kwargs)
        self._examination.after_backward()

    def _manual_step(self, optimizer: Optimizer) -> None:
        self._examination.before_optimizer_step(optimizer)
        optimizer.step()


def _forward(step: Callable[[nn.Module, Any], Tensor] | None, optimizers: Sequence[Optimizer]) -> Forward:
    """Return the forward pass for trials."""
    if step is not None:
        return step

    def forward(model: Any, batch: Any) -> Any:
        stand_in = TrainerStandIn(
            backward=_backward,
            optimizers=[copy_optimizer(one, lambda _: None, with_state=False) for one in optimizers],
            step=lambda _: None,
            logger=SilentLogger(),
            missing=_STAND_IN_LACKS,
        )
        attach(model, stand_in)
        out = model.training_step(*accepted_arguments(model.training_step, batch, 0))
        if not model.automatic_optimization:
            return None
        return out.get("loss") if isinstance(out, dict) else out

    return forward


def _batches(loader: Iterable[Any], n: int) -> Iterator[Any]:
    """Yield n batches; a loader that ends early is read again."""
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


def _backward(loss: Any, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **kwargs)


def _step_failed(error: Exception, model: nn.Module) -> Finding:
    return Finding(
        "step",
        "error",
        place_of_error(error, model),
        f"The step raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}",
        "Training ends there; the checks that need more steps say nothing.",
        "Mend the step first, and examine again.",
    )
