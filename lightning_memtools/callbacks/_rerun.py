"""Runs a bad step once more within the training process, for HaltOnNaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import gradient_scaler
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.nonfinite.bad_step import Evidence, Past, Trip
from lightning_memtools.nonfinite.capsule.capsule_file import Capsule, write_capsule
from lightning_memtools.nonfinite.cause.explain import explain
from lightning_memtools.nonfinite.causes import Background, Cause, Explanation
from lightning_memtools.nonfinite.diagnosis import what_grew
from lightning_memtools.nonfinite.halt_report import Kept
from lightning_memtools.nonfinite.micro_batches import SIMPLE
from lightning_memtools.nonfinite.step_outcome import (
    TRAINER_FACTS,
    Conditions,
    Outcome,
    digests_of,
    doubts_about,
    mismatches,
    precision_now,
)
from lightning_memtools.nonfinite.step_rerun import CannotRerunError, Rerun
from lightning_memtools.nonfinite.tensor_names import names_of


def conditions_of(trainer: Trainer, pl_module: LightningModule, trip: Trip) -> Conditions:
    """Under which conditions the step ran."""
    scaler = gradient_scaler(trainer)
    automatic = pl_module.automatic_optimization
    with trainer.precision_plugin.train_step_context():
        precision = precision_now(pl_module.device.type)
    return Conditions(
        automatic=automatic,
        divided_by=trainer.accumulate_grad_batches if automatic else 1,
        scale=None if scaler is None else scaler.get_scale(),
        unscales_itself=getattr(trip.step.optimizer, "_step_supports_amp_scaling", False),
        trainer={name: value for name, value in _facts(trainer) if type(value) in SIMPLE},
        **precision,
    )


def _facts(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    for name in TRAINER_FACTS:
        try:
            yield name, getattr(trainer, name)
        except Exception:  # noqa: BLE001, S112, such as an estimate of steps without a data loader
            continue


@contextmanager
def step_again(trainer: Trainer, pl_module: LightningModule, trip: Trip, conditions: Conditions) -> Iterator[Rerun]:
    """The step of a trip, to be run again; call it once the step was undone."""
    device = VirtualDevice.current()
    rerun = Rerun(
        pl_module,
        trip.step.micro,
        conditions,
        optimizers=trainer.optimizers,
        schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
        parameters=trip.step.parameters,
        trainer=trainer,
        host=nullcontext if device is None else device.host,
    )
    with rerun:
        yield rerun


@dataclass(frozen=True, slots=True)
class Account:
    """What a rank found out by running the step again. Plain values: it travels between ranks.

    Attributes:
        rank: Which rank.
        explanation: The operation and the cause; None where that was not found.
        note: Why there is no explanation.
        again: Whether the step was the same when it was run again, and why it may not be; empty if it was not run.
        is_bad: Whether it was bad when this rank ran it alone.
    """

    rank: int
    explanation: Explanation | None
    note: str = ""
    again: str = ""
    is_bad: bool = False


def culprit_of(accounts: Sequence[Account], rank: int | None) -> Account:
    """The account of this rank; where no rank is known, of the one whose own step is bad when it is run again."""
    if rank is not None:
        return next((each for each in accounts if each.rank == rank), accounts[0])
    return next((each for each in accounts if each.is_bad), accounts[0])


class Aftermath:
    """Runs a bad step again on this rank: explains it, and keeps it as a file. Whatever fails here is only noted.

    Call it once the step was undone, and before anything else is.

    Args:
        trainer: The Trainer.
        pl_module: The module, with the weights and buffers that the step began with.
        trip: The step.
        evidence: What is known of it.
        history: The last steps.
    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, trip: Trip, evidence: Evidence, history: Sequence[Past]
    ) -> None:
        self._trainer, self._module, self._trip = trainer, pl_module, trip
        self._conditions = conditions_of(trainer, pl_module, trip)
        self._background = Background(
            grown=what_grew(history, evidence),
            learning_rates=evidence.learning_rates,
            plain_sgd=evidence.plain_sgd,
            scaler=evidence.scaler,
            doubts=doubts_about(trip.step.micro, evidence.unkept),
        )
        self._doubts = list(self._background.doubts)
        self._digests, self._digests_of = self._own_digests(evidence), "step"
        self._evidence = evidence
        self._explanation: Explanation | None = None
        self._has_run = self._is_bad = False

    def account(self, *, explains: bool) -> Account:
        """Run the step again, and say what made it bad."""
        rank = self._evidence.rank
        if all(micro.batch is None for micro in self._trip.step.micro):
            return Account(rank, None, "not sought: the batch was no longer held")
        try:
            with step_again(self._trainer, self._module, self._trip, self._conditions) as rerun:
                plain = rerun.run()
                self._compare(plain)
                if not explains:
                    return Account(rank, None, "not asked for (explain=False)", self._again(), self._is_bad)
                self._explanation = explain(rerun, plain, replace(self._background, doubts=self._doubts))
        except CannotRerunError as error:
            if not self._has_run:
                self._doubts.append(f"It could not be run again in the training process: {error}.")
            return Account(rank, None, f"not found: {error}", self._again(), self._is_bad)
        except Exception as error:  # noqa: BLE001, whatever fails here must not hide the halt
            return Account(rank, None, f"not found: {type(error).__name__}: {error}")
        return Account(rank, self._explanation, again=self._again(), is_bad=self._is_bad)

    def write(self, path: Path, max_bytes: int, about: dict[str, Any]) -> Kept:
        """Write the capsule."""
        explanation = self._explanation
        plain = None if explanation is None else {**asdict(explanation), "cause": explanation.cause.value}
        scaler = gradient_scaler(self._trainer)
        capsule = Capsule(
            step=self._evidence.step,
            module=self._module,
            micro=self._trip.step.micro,
            conditions=self._conditions,
            optimizers=self._trainer.optimizers,
            scaler={} if scaler is None else scaler.state_dict(),
            parameters=names_of(self._module, self._trip.step.parameters),
            losses=self._trip.losses,
            digests=self._digests,
            digests_of=self._digests_of,
            doubts=self._doubts,
            about=about,
            explanation=plain,
        )
        try:
            written = write_capsule(capsule, path, max_bytes)
        except Exception as error:  # noqa: BLE001, as above
            return Kept(note=f"could not be written: {type(error).__name__}: {error}")
        note = f"without {', '.join(written.left_out)}" if written.left_out else ""
        return Kept(path, note, "; ".join(written.needs))

    def _own_digests(self, evidence: Evidence) -> dict[str, str]:
        """Of the gradients of the step itself: only where they are this rank's alone and still there."""
        if evidence.late or evidence.carried or self._trainer.world_size > 1:
            return {}
        names = names_of(self._module, self._trip.step.parameters)
        named = zip(names, self._trip.step.parameters, strict=True)
        return digests_of({name: p.grad for name, p in named if p.grad is not None})

    def _again(self) -> str:
        if self._explanation is not None and self._explanation.cause is Cause.NOT_REPRODUCIBLE:
            return ""
        of = "losses and gradients" if self._digests_of == "step" else "losses"
        if not self._has_run:
            return ""
        return " ".join(self._doubts) or f"{of} are the same bit for bit."

    def _compare(self, plain: Outcome) -> None:
        self._has_run, self._is_bad = True, not plain.is_finite
        found = mismatches(self._trip.losses, self._digests, plain)
        if not self._digests:
            self._digests, self._digests_of = digests_of(plain.gradients), "replay"
        # A step that was bad and is not any more is what an explanation is about, not what makes it doubtful.
        if found and not plain.is_finite:
            self._doubts.append(f"Run again in the training process, the step was not the same. {' '.join(found)}")
