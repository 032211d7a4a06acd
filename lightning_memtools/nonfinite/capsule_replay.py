"""Runs a bad step, or that of a loss spike, again in a fresh process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools.argument_types import check_types
from lightning_memtools.memory.nested_tensors import map_tensors, plain_name
from lightning_memtools.nonfinite.bad_step import TRAINER_FACTS, MicroBatch, StepConditions, mismatches
from lightning_memtools.nonfinite.diagnosis import Explanation, KnownOfStep, NonFiniteCause
from lightning_memtools.nonfinite.explain import explain
from lightning_memtools.nonfinite.loss_spike import SpikeComparison, compare_spike
from lightning_memtools.nonfinite.step_rerun import (
    CannotRerunError,
    EarlierValues,
    StepRerun,
    configured,
    says_nothing,
    values_up_to_nan,
)
from lightning_memtools.reporting.tables import shown_as
from lightning_memtools.simulation.step_runner import is_lightning_module
from lightning_memtools.state.capsule.capsule_file import CapsuleError, LeftOut, dtype_named, from_plain, read_capsule
from lightning_memtools.state.capsule.environment import (
    changed_since,
    differences,
    importing_from,
    machine_now,
    switched,
)
from lightning_memtools.state.capsule.saved_module import Find, rebuilt, start_from
from lightning_memtools.state.random_state import RandomState
from lightning_memtools.state.starts import restore_frozen, simple_items


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of running a step again from its capsule.

    Attributes:
        path: The capsule.
        step: The training step.
        losses: The loss of each micro-batch (in manual optimization: of each backward pass).
        gradients: Name of the parameter to its gradient, as the optimizer would get it.
        is_finite: Whether all losses and gradients are finite now.
        mismatches: The differences to the step, one sentence each.
        differences: The differences of this machine to the one that the step ran on, such as ``"torch 2.11.0, was
            2.13.0"``.
        changed: The files of the training code that have changed since.
        doubts: The reasons why it may not be exact, one sentence each.
        gradients_of: The run whose gradients were compared: ``"step"``, or ``"replay"`` for the rerun in the training
            process.
        n_values: The number of operations up to the first NaN whose outputs were compared with those of the rerun in
            the training process.
        says_nothing: Whether no loss and no gradient holds a finite number to compare.
        explanation: The operation that made the first bad value; None where that was not found.
        spike: The step of a loss spike, run again with other weights and another batch; None for other steps.
        model: The module, as it was when the step began.
        batches: The batches of the step.
    """

    path: Path
    step: int
    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor] = field(repr=False)
    is_finite: bool
    mismatches: tuple[str, ...]
    differences: tuple[str, ...]
    changed: tuple[str, ...]
    doubts: tuple[str, ...]
    gradients_of: str
    n_values: int
    says_nothing: bool
    explanation: Explanation | None
    spike: SpikeComparison | None
    model: nn.Module = field(repr=False)
    batches: tuple[Any, ...] = field(repr=False)

    @property
    def exact(self) -> bool:
        """True if losses, gradients and what was computed up to the first NaN are the same in every bit.

        False where there was nothing to compare: all losses and gradients are NaN or Inf, and so are any others.
        """
        return not self.mismatches and (self.n_values > 0 or not self.says_nothing)

    def summary(self) -> str:
        """Return the result as text for people."""
        lines = [f"Step {self.step} of {self.path}, run again.", f"Losses: {' '.join(f'{x:.6g}' for x in self.losses)}"]
        bad = [name for name, gradient in self.gradients.items() if not bool(torch.isfinite(_dense(gradient)).all())]
        lines.append(f"Gradients: {len(self.gradients)}, of which {len(bad)} hold NaN or Inf")
        if self.exact and self.says_nothing:
            lines.append(
                f"Bit for bit the same as in the training process: the outputs of {self.n_values} operations up to "
                "the first NaN. Losses and gradients hold no finite number to compare."
            )
        elif self.exact:
            of = "" if self.gradients_of == "step" else ", these as replayed in the training process"
            lines.append(f"Bit for bit the same as in the step: losses and gradients{of}.")
        elif not self.mismatches:
            lines.append("Losses and gradients hold no finite number to compare with those of the step.")
        else:
            lines += ["Not the same as in the step:", *(f"- {each}" for each in self.mismatches)]
            if self.changed:
                lines.append(f"The code has changed since: {', '.join(self.changed)}.")
        if self.differences:
            lines.append(f"This machine is another: {'; '.join(self.differences)}.")
        elif self.mismatches:
            lines.append(f"Machine and versions are the same{'' if self.changed else ', and so is the code'}.")
        lines += [f"Note: {doubt}" for doubt in self.doubts]
        lines += self._spike_lines()
        if self.explanation is not None:
            if self.is_finite and self.explanation.cause is not NonFiniteCause.NOT_REPRODUCIBLE:
                lines += ["", "The step is finite now. What was found when it was not:"]
            else:
                lines.append("")
            lines += [f"Cause: {self.explanation.cause}: {self.explanation.because}.", self.explanation.what]
            if self.explanation.confirmed:
                lines.append(f"Tried: {self.explanation.confirmed}.")
            lines.append(f"Next: {self.explanation.advice}")
        return "\n".join(lines)

    def _spike_lines(self) -> list[str]:
        if self.spike is None:
            return []
        lines = ["", *self.spike.lines()]
        if self.mismatches and not (self.differences or self.changed or self.doubts):
            lines.append(
                "The same step gave other bits on the same machine: suspect kernels that are not deterministic, or the "
                "hardware."
            )
        return lines

    _repr_html_ = shown_as(summary)


def replay(
    path: str | Path,
    *,
    model: Any = None,
    batch: Callable[[int], Any] | None = None,
    trust: bool | Callable[[str, str], bool] = False,
) -> Replay:
    """Run the step that HaltOnNaN stopped at, or that LossSpikes reported, again from its capsule; compare every bit.

    On the machine that wrote it, losses and gradients are the same bit for bit; on another, the result says what
    differs. No Trainer, data set or process group is needed, and nothing is logged or written.

    Args:
        path: The capsule, ``nonfinite-step<n>-rank<r>-capsule.pt``.
        model: A LightningModule of the same class, or a function or class that makes one. When left out, the class
            is made from its saved hyperparameters. The module given gets the weights of the capsule.
        batch: Returns the batch with an index within the epoch, for batches that a capsule cannot hold.
        trust: Whether modules that the capsule names may be imported, which runs their code; or a function that is
            called with a module's name and its place, and decides. Modules that are imported already are always used.

    Raises:
        TypeError: `batch` is no function.
        CapsuleError: The capsule cannot be read, its module cannot be made, or it names code that is not trusted; the
            message says what can still be read.
    """
    check_types(replay, {"path": path, "trust": trust})
    if batch is not None and not callable(batch):
        raise TypeError(f"batch must be a function of a batch index, got {type(batch).__name__}")
    # Making a module uses random numbers.
    random = RandomState.now()
    try:
        trusts = trust if callable(trust) else lambda _name, _path: bool(trust)
        return _replay(Path(path), model, batch, trusts)
    except CapsuleError:
        raise
    except Exception as error:
        raise CapsuleError(
            f"{path} cannot be replayed: {type(error).__name__}: {error}. It was changed after it was written, or this "
            "process differs too much from the one that wrote it.\nNext: copy the capsule once more, or pass the "
            "module: replay(path, model=my_module)."
        ) from error
    finally:
        random.restore()


def _replay(path: Path, model: Any, batch: Callable[[int], Any] | None, trusts: Callable[[str, str], bool]) -> Replay:
    saved = read_capsule(path)
    conditions, device = _conditions_here(saved)
    with switched(saved["switches"]) as not_set, importing_from(saved["origin"], trusts) as find:
        module = rebuilt(saved, model, device, find)
        doubts = [*saved["doubts"], *(f"The capsule does not hold {name}." for name in saved["left_out"])]
        doubts += [*(f"The switch {name!r} could not be set here." for name in not_set)]
        if saved["weights"] is None:
            doubts.append("The capsule holds no weights (max_bytes): the module's own were used.")
        micro = [_micro(each, module, device, find, batch) for each in saved["micro"]]
        if not micro:
            raise CapsuleError(f"{path} lacks the batch of the step, which was no longer held when it was written.")
        if (start := micro[0].start) is not None:
            restore_frozen(module, start.frozen)
        if not is_lightning_module(module):
            raise CapsuleError(f"{type(module).__name__} is no LightningModule, so that it has no step to replay.")
        optimizers, schedulers = configured(module, conditions)
        doubts += _load_optimizers(optimizers, saved["optimizers"], find)
        wanted = set(saved["parameters"])
        parameters = [p for name, p in module.named_parameters() if plain_name(name) in wanted]
        rerun = StepRerun(
            module, micro, conditions, optimizers=optimizers, schedulers=schedulers, parameters=parameters
        )
        try:
            with rerun:
                outcome = rerun.run()
                losses = tuple(float(loss) for loss in outcome.losses)
                nothing = says_nothing(outcome)
                gradients = {name: gradient.clone() for name, gradient in outcome.gradients.items()}
                found = mismatches(saved["losses"], saved["digests"], outcome)
                changed, n_values = changed_since(saved["origin"]), 0
                if (kept := saved["values"]) is not None and not outcome.is_finite:
                    values = EarlierValues(*map(tuple, kept))
                    n_values = values.n_compared
                    difference = values.difference(values_up_to_nan(rerun))
                    found += [difference] if difference else []
                explanation = _explanation(saved, find)
                # The explanation from then does not hold for code that has changed since.
                if not outcome.is_finite and (explanation is None or (changed and found)):
                    explanation = explain(rerun, outcome, KnownOfStep(doubts=doubts))
                spike = None if saved.get("spike") is None else compare_spike(rerun, outcome, saved["spike"], find)
        except CannotRerunError as error:
            raise CapsuleError(f"{path}: {error}") from error
    return Replay(
        path=path,
        step=int(saved["step"]),
        losses=losses,
        gradients=gradients,
        mismatches=tuple(found),
        is_finite=outcome.is_finite,
        differences=tuple(differences(saved["machine"], machine_now(str(device)))),
        changed=tuple(changed),
        doubts=tuple(doubts),
        gradients_of=saved["digests_of"],
        n_values=n_values,
        says_nothing=nothing,
        explanation=explanation,
        spike=spike,
        model=module,
        batches=tuple(each.batch for each in micro),
    )


def _conditions_here(saved: Mapping[str, Any]) -> tuple[StepConditions, torch.device]:
    """Return what the step ran under, and the device to run it on: the CPU where the step's own is missing."""
    conditions = StepConditions(**saved["conditions"])
    for name in (conditions.autocast, conditions.default_dtype):
        if name is not None:
            dtype_named(name)  # raises for what is no data type
    facts = {key: value for key, value in conditions.trainer.items() if key in TRAINER_FACTS}
    conditions = dataclasses.replace(conditions, trainer=simple_items(facts))
    device = torch.device(saved["machine"]["device"])
    if _is_here(device):
        return conditions, device
    return dataclasses.replace(conditions, device_type="cpu"), torch.device("cpu")


def _is_here(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return device.type != "meta"


def _micro(
    saved: Mapping[str, Any], module: nn.Module, device: torch.device, find: Find, batch_of: Callable[[int], Any] | None
) -> MicroBatch:
    try:
        batch = from_plain(saved["batch"], find) if batch_of is None else batch_of(saved["index"])
    except (ImportError, AttributeError) as error:
        raise CapsuleError(
            f"A class of the batch cannot be imported: {error}. Run where the training code is."
        ) from error
    if isinstance(batch, LeftOut):
        raise CapsuleError(
            f"{batch.name} was left out of the capsule: it holds tensors, containers, dataclasses and named tuples.\n"
            "Next: pass a function that returns the batch of an index: replay(path, batch=my_function)."
        )
    return MicroBatch(
        saved["index"],
        map_tensors(batch, lambda tensor: tensor.to(device)),
        start=start_from(saved["start"], module, find),
        steps_before=saved["steps_before"],
        resumed=start_from(saved["resumed"], module, find),
    )


def _load_optimizers(optimizers: Sequence[Optimizer], saved: Sequence[Any] | None, find: Find) -> list[str]:
    """Load the optimizers' state, which a step may read; return what is missing."""
    if saved is None:
        return []
    try:
        for optimizer, state in zip(optimizers, saved, strict=True):
            optimizer.load_state_dict(from_plain(state, find))
    except (ValueError, KeyError) as error:
        return [f"The optimizers' state could not be loaded ({error}): the step sees fresh optimizers."]
    return []


def _explanation(saved: Mapping[str, Any], find: Find) -> Explanation | None:
    if saved["explanation"] is None:
        return None
    fields = from_plain(saved["explanation"], find)
    return Explanation(**{**fields, "cause": NonFiniteCause(fields["cause"]), "samples": tuple(fields["samples"])})


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
