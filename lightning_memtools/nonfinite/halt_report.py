"""The error that ends a run which met NaN or Inf, its messages, and the report in markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from lightning_memtools.memory.user_code import short_path
from lightning_memtools.nonfinite.bad_step import Evidence, PastStep, growth
from lightning_memtools.nonfinite.diagnosis import Diagnosis, Explanation, NonFiniteCause, rates_as_text
from lightning_memtools.nonfinite.finite_checks import BadTensor
from lightning_memtools.reporting.phrases import first_of
from lightning_memtools.reporting.tables import Table, markdown_table

HaltStage = Literal["train", "val", "test"]


class NonFiniteError(RuntimeError):
    """Raised when a loss, a gradient, a weight, an evaluation output or a logged metric is NaN or Inf.

    The message is the same on every rank and complete by itself; the fields are for programs.

    Attributes:
        step: The training step, counted as the x axis of `self.log` counts.
        batch_idx: The index of the batch within its epoch; None where it is not known.
        rank: The rank whose loss or batch was bad; None where only the gradients were bad, which all ranks share.
        stage: train, val or test.
        cause: The class of cause, one of the values of `NonFiniteCause`; None in evaluation.
        losses: The losses of the last steps (at most 20, on this rank), oldest first; the last is the bad step's.
        parameters: The parameters whose gradients held NaN or Inf, or that held NaN or Inf themselves.
        norms: The gradient norms that belong to `losses`.
        path: The report, if it could be written.
        checkpoint_path: The checkpoint of the last good state, if one was written.
        capsule_path: The step as a file for `replay`, if one was written.
        explanation: The operation that made the first bad value, and its cause, if they were found.
    """

    step: int
    batch_idx: int | None = None
    rank: int | None = None
    stage: HaltStage = "train"
    cause: str | None = None
    losses: Sequence[float] = ()
    parameters: Sequence[BadTensor] = ()
    norms: Sequence[float] = ()
    path: Path | None = None
    checkpoint_path: Path | None = None
    capsule_path: Path | None = None
    explanation: Explanation | None = None

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        vars(self).update({name: tuple(each) if type(each) is list else each for name, each in fields.items()})


@dataclass(frozen=True, slots=True)
class BadOutput:
    """An output or metric of an evaluation run that is NaN or Inf."""

    name: str  # the place in the outputs, such as ``outputs["loss"]``, or the metric's name
    batch: int | None  # the first batch where it was bad, counted over all loaders of the run; None for a metric
    value: float | None  # the metric's value; None for an output
    place: str = ""  # the batch within its data loader, where there are several; else empty

    def __str__(self) -> str:
        if self.batch is None:
            return f"metric {self.name} = {self.value}"
        return f"{self.name} from batch {self.batch} on{f' ({self.place})' if self.place else ''}"


@dataclass(frozen=True, slots=True)
class CapsuleNote:
    """The facts about a capsule for the messages. Plain values: they are sent to the other ranks."""

    path: Path | None = None  # the capsule; None if there is none
    note: str = ""  # the reason why there is none, or what the capsule leaves out
    lacks: str = ""  # names what of the step's batch it does not hold; empty if nothing


@dataclass(frozen=True, slots=True)
class RankFindings:
    """The findings of a rank from running the step again. Plain values: they are sent to the other ranks."""

    rank: int
    explanation: Explanation | None  # the operation and the cause; None where that was not found
    note: str = ""  # the reason why there is no explanation
    # says whether the step was the same when it was run again, or why it may not be; empty if it was not run
    again: str = ""
    is_bad: bool = False  # whether the step was bad when this rank ran it alone
    # the parameters that its forward pass wrote when it was run again, and that were not restored
    written: tuple[str, ...] = ()


def findings_to_report(everyone: Sequence[RankFindings], rank: int | None) -> RankFindings:
    """Return the findings of this rank; where no rank is known, of the first whose own step is bad when run again."""
    if rank is not None:
        return next((each for each in everyone if each.rank == rank), everyone[0])
    return next((each for each in everyone if each.is_bad), everyone[0])


@dataclass(slots=True, kw_only=True)
class HaltReport:
    """Everything that is known when a training step ends the run."""

    everyone: Sequence[Evidence]  # the evidence of each rank
    diagnosis: Diagnosis  # the cause that the evidence points to
    history: Sequence[PastStep]  # the last steps of this rank; the bad one is the last
    skipped: Sequence[tuple[int, tuple[int, ...]]] = ()  # the bad steps that were skipped before, each with its batches
    n_missing: int = 0  # the number of ranks that did not answer
    report_path: Path | None = None
    report_note: str = ""  # the reason why there is no report
    checkpoint_path: Path | None = None  # the checkpoint of the last good state
    checkpoint_note: str = ""  # the reason why there is no such checkpoint
    findings: RankFindings | None = None  # those of running the step again
    explanation_note: str = ""  # the reason why the operation was not found
    capsule: CapsuleNote = field(default_factory=CapsuleNote)  # the step as a file, to run it again
    metrics: Sequence[str] = ()  # the metrics of evaluation runs before it that were not finite, as text

    @property
    def unrestored(self) -> str:
        """The names of what the step wrote and could not be restored, as text."""
        return ", ".join([*self.culprit.unrestored, *(self.findings.written if self.findings else ())])

    @property
    def explanation(self) -> Explanation | None:
        """The operation that made the first bad value; None where that was not found."""
        return None if self.findings is None else self.findings.explanation

    @property
    def culprit(self) -> Evidence:
        """The evidence of the rank that the diagnosis names."""
        named = [each for each in self.everyone if each.rank == self.diagnosis.rank]
        return (named or list(self.everyone))[0]

    @property
    def batch_idx(self) -> int | None:
        """The batch with the first bad loss or input; the step's last batch where neither was bad."""
        culprit = self.culprit
        bad = [index for index, loss in culprit.losses if not math.isfinite(loss)]
        bad += [each.batch_idx for each in culprit.inputs if not each.is_mask]
        return next(iter([*bad, *reversed(culprit.batches)]), None)

    @property
    def headline(self) -> str:
        """The bad value, its step, batch and rank, as a sentence."""
        culprit = self.culprit
        bad = [loss for _, loss in culprit.losses if not math.isfinite(loss)]
        if culprit.update:
            what = "the update is not finite"
        elif bad:
            what = f"loss is {bad[0]}"
        elif culprit.gradients:
            what = f"gradient of {culprit.gradients[0]} is not finite"
        else:
            what = f"gradient norm is {culprit.norm}"
        return f"{what} at step {culprit.step} ({self._place()})."

    def add_findings(self, findings: RankFindings) -> None:
        """Add what running the step again has shown; it replaces the diagnosis that was inferred from the evidence."""
        self.findings, self.explanation_note, explanation = findings, findings.note, findings.explanation
        if explanation is None:
            return
        found_rank = self.diagnosis.rank
        if explanation.cause is not NonFiniteCause.NOT_REPRODUCIBLE and found_rank is None:
            found_rank = findings.rank
        self.diagnosis = Diagnosis(explanation.cause, f"{explanation.because}.", explanation.advice, found_rank)

    def about(self) -> dict[str, Any]:
        """Return the contents of the JSON file beside a capsule: what is known of the step without loading it."""
        found = self.explanation
        return {
            "headline": self.headline,
            "step": self.culprit.step,
            "rank": self.culprit.rank,
            "batches": list(self.culprit.batches),
            "cause": self.diagnosis.cause.value,
            "because": self.diagnosis.because,
            "what": "" if found is None else found.what,
            "advice": self.diagnosis.advice,
        }

    def _place(self) -> str:
        rank = self.diagnosis.rank
        if rank is None:
            return f"batch {self.batch_idx}, rank unknown: the loss and the batch of every rank were finite"
        accumulation = f" of batches {self.culprit.batches[0]} to {self.culprit.batches[-1]}"
        return f"batch {self.batch_idx}{accumulation * (len(self.culprit.batches) > 1)}, rank {rank}"

    def facts(self) -> list[tuple[str, str]]:
        """Return (what, value) of everything that was found; each value is a sentence or shorter."""
        culprit = self.culprit
        facts = [
            ("Cause", f"{self.diagnosis.cause}: {self.diagnosis.because}"),
            ("Operation", self.explanation_note if self.explanation is None else self.explanation.what),
            ("Tried", "" if self.explanation is None else self.explanation.confirmed),
            ("Run again", "" if self.findings is None else self.findings.again),
            ("Losses of the step", _losses(culprit)),
            ("Bad gradients", named(culprit.gradients, "none") + _carried(culprit)),
            ("Bad weights before the step", named(culprit.parameters, "none")),
            ("Bad inputs", "; ".join(map(str, culprit.inputs)) or f"none{_unseen(culprit)}"),
            ("Learning rate", rates_as_text(culprit.learning_rates)),
            ("Gradient norm", _trend([past.norm for past in self.history])),
            ("Last losses", series([past.loss for past in self.history])),
            ("Last gradient norms", series([past.norm for past in self.history])),
        ]
        others = [each for each in self.everyone if each.rank != culprit.rank]
        if others:
            facts.insert(5, ("Losses of the other ranks", "; ".join(f"rank {e.rank}: {_losses(e)}" for e in others)))
        if self.n_missing:
            facts.append(("Ranks that did not answer", str(self.n_missing)))
        if self.skipped:
            steps = ", ".join(str(step) for step, _ in self.skipped)
            facts.append(("Bad steps skipped before", steps))
        if self.metrics:
            facts.append(("Metrics that were not finite in evaluation", "; ".join(self.metrics)))
        facts.append(("State", self._state()))
        kept = f" (but for {self.unrestored}: see State)" if self.unrestored else ""
        good = f"{_shown(self.checkpoint_path)}{kept}" if self.checkpoint_path else self.checkpoint_note
        facts.append(("Last good checkpoint", good))
        facts.append(("The step as a file", " ".join(filter(None, [_shown(self.capsule.path), self.capsule.note]))))
        return [(what, value) for what, value in facts if value]

    def _state(self) -> str:
        culprit = self.culprit
        if culprit.is_lost:
            text = "the update was made before it was found to be bad, so the weights hold NaN or Inf"
        elif culprit.parameters:
            text = "the update was not applied, but weights or buffers were bad before this step"
        else:
            text = "the update was not applied; weights, optimizer state and buffers are those before the step"
        if self.unrestored:
            text += f", except {self.unrestored}, which this step wrote and of which there was no copy"
        if culprit.late:
            text += (
                ". This was read one step late: global_step, schedulers and learning rates were restored, and "
                "optimizer state that the step created was removed; data loaders, random number generators and what "
                "hooks and other callbacks changed are one step ahead"
            )
        return f"{text}. Lists, counters and other objects of the module are as the step left them."

    def message(self) -> str:
        """Return the text of the error, which is complete by itself."""
        lines = [f"{what}: {value}" for what, value in self.facts()]
        report = f"Report: {_shown(self.report_path) or self.report_note}"
        return "\n".join([self.headline, *lines, report, f"Next: {self._next()}"])

    def _next(self) -> str:
        if self.capsule.path is None:
            return self.diagnosis.advice
        if self.capsule.lacks.startswith("batch ("):
            return (
                f"{self.diagnosis.advice} The capsule lacks {self.capsule.lacks}; run the step again with a function "
                f"that returns it: replay({_shown(self.capsule.path)!r}, batch=my_function)."
            )
        lacks = f", which works where the step does not use {self.capsule.lacks}" if self.capsule.lacks else ""
        return f"{self.diagnosis.advice} Run the step again: memtools replay {quote(_shown(self.capsule.path))}{lacks}"

    def console(self) -> str:
        """Return the short form for the console; the error that follows says the rest."""
        lines = [self.headline, f"Cause: {self.diagnosis.cause}: {self.diagnosis.because}"]
        lines += [self.explanation.what] if self.explanation is not None else []
        lines += [f"{what}: {_shown(path)}" for what, path in self._files()]
        return "\n".join(["HaltOnNaN stops training.", *lines, f"Next: {self._next()}"])

    def error(self) -> NonFiniteError:
        """Return the error to raise, which is the same on every rank."""
        culprit = self.culprit
        return NonFiniteError(
            self.message(),
            step=culprit.step,
            batch_idx=self.batch_idx,
            rank=self.diagnosis.rank,
            cause=self.diagnosis.cause.value,
            parameters=culprit.gradients or culprit.parameters,
            **_of_steps(self.history),
            path=self.report_path,
            checkpoint_path=self.checkpoint_path,
            capsule_path=self.capsule.path,
            explanation=self.explanation,
        )

    def _files(self) -> list[tuple[str, Path]]:
        files = (("Last good checkpoint", self.checkpoint_path), ("Report", self.report_path))
        return [(what, path) for what, path in files if path is not None]

    def markdown(self) -> str:
        """Return the report: the message as a table, then every bad gradient and the last steps."""
        rows = [("Next", self._next()), *self.facts()]
        parts = [f"# Not finite: {self.headline}", markdown_table(Table(("", ""), rows, "ll"))]
        for title, bad in (("Bad gradients", self.culprit.gradients), ("Bad weights", self.culprit.parameters)):
            if bad:
                amounts = [(each.name, each.amount) for each in bad]
                parts += [f"## {title}", markdown_table(Table(("name", "amount"), amounts, "ll"))]
        past = [(str(each.step), f"{each.loss:.6g}", f"{each.norm:.6g}") for each in self.history]
        parts += ["## Last steps", markdown_table(Table(("step", "loss", "gradient norm"), past, "lll"))]
        if self.skipped:
            skipped = [(str(step), ", ".join(map(str, batches))) for step, batches in self.skipped]
            parts += ["## Skipped steps", markdown_table(Table(("step", "batches"), skipped, "ll"))]
        return "\n\n".join(parts) + "\n"


def _shown(path: Path | None) -> str:
    return "" if path is None else short_path(str(path))


def _losses(evidence: Evidence) -> str:
    if not evidence.losses:
        return "none seen"
    return ", ".join(
        f"{loss:.6g}" + f" (batch {index})" * (len(evidence.losses) > 1) for index, loss in evidence.losses
    )


def _carried(evidence: Evidence) -> str:
    if not evidence.carried:
        return ""
    return f"; HaltOnNaN made them NaN to tell the other ranks that the loss of rank {evidence.rank} is bad"


def _unseen(evidence: Evidence) -> str:
    return f" seen; batch {', '.join(map(str, evidence.unseen))} was no longer held" if evidence.unseen else ""


def _trend(norms: Sequence[float]) -> str:
    factor = growth(norms[:-1])
    if factor is None:
        return "too few steps to see a trend"
    return f"{'grew' if factor > 1 else 'did not grow'} before the bad step: {factor:.3g} times its earlier median"


MOST_NAMES = 5  # in a message; the report lists all


def evaluation_error(
    everyone: Sequence[Sequence[BadOutput]],
    *,
    stage: HaltStage,
    step: int,
    weights: Sequence[BadTensor],
    history: Sequence[PastStep],
) -> NonFiniteError:
    """Return the error of an evaluation run with outputs or metrics that are NaN or Inf."""
    found = [
        f"{bad}{f' (rank {rank})' * (len(everyone) > 1)}" for rank, theirs in enumerate(everyone) for bad in theirs
    ]
    if weights:
        advice = "the weights are the cause: start again from a finite checkpoint."
    else:
        advice = (
            "look at the data of the first bad batch, and for operations outside of their domain (log or division by "
            "0) in the evaluation step and its metrics; if the value may rightly be NaN or Inf, use "
            'HaltOnNaN(check_outputs="losses") for a metric and HaltOnNaN(check_outputs=False) for a loss.'
        )
    lines = [
        f"The {stage} run at step {step} gave values that are not finite: {'; '.join(found)}.",
        f"Bad weights: {named(weights, 'none')}.",
        f"Next: {advice}",
    ]
    rank = next(rank for rank, theirs in enumerate(everyone) if theirs)
    batch_idx = next((bad.batch for bad in everyone[rank] if bad.batch is not None), None)
    return NonFiniteError(
        "\n".join(lines),
        step=step,
        stage=stage,
        rank=rank,
        batch_idx=batch_idx,
        parameters=weights,
        **_of_steps(history),
    )


def overflow_error(
    everyone: Sequence[Sequence[BadTensor]], *, step: int, history: Sequence[PastStep], learning_rates: Sequence[float]
) -> NonFiniteError:
    """Return the error of an update that was not finite although its gradients were, found before a checkpoint."""
    rank, bad = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs)
    step = history[-1].step if history else step
    lines = [
        f"{bad[0]} is not finite after the update of step {step} (rank {rank}). No checkpoint was written.",
        f"Bad weights and optimizer state: {named(bad, 'none')}.",
        f"Cause: {NonFiniteCause.EXPLODING}: losses and gradients were finite, so the update itself overflowed.",
        f"Learning rate: {rates_as_text(learning_rates)}",
        f"Last losses: {series([past.loss for past in history])}",
        f"Last gradient norms: {series([past.norm for past in history])}",
        "Next: lower the learning rate, set Trainer(gradient_clip_val=1.0), and start from an earlier checkpoint.",
    ]
    cause = NonFiniteCause.EXPLODING.value
    return NonFiniteError("\n".join(lines), step=step, rank=rank, cause=cause, parameters=bad, **_of_steps(history))


def state_error(
    everyone: Sequence[Sequence[BadTensor]],
    *,
    step: int,
    finite_at: int,
    history: Sequence[PastStep],
) -> NonFiniteError:
    """Return the error of a buffer or optimizer state that is bad although losses and gradients are finite.

    Args:
        everyone: The bad tensors of each rank; those of the rank that reports come first.
        step: The training step.
        finite_at: The step at which they were last known to be finite.
        history: The steps before.
    """
    rank, bad = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs)
    cause = NonFiniteCause.STATE.value
    because = "losses and gradients were finite, so no update can have made it"
    unknown = f"It was finite at step {finite_at}. What wrote it since is not known."
    inputs = "also in branches that do not reach the loss and in validation; then start from an earlier checkpoint."
    lines = [
        f"{bad[0]} is not finite at step {step} (rank {rank}). No checkpoint was written.",
        f"Bad weights, buffers and optimizer state: {named(bad, 'none')}.",
        f"Cause: {cause}: {because}. {unknown}",
        f"Next: look at what writes it and from which inputs, {inputs}",
    ]
    return NonFiniteError("\n".join(lines), step=step, rank=rank, cause=cause, parameters=bad, **_of_steps(history))


def _of_steps(history: Sequence[PastStep]) -> dict[str, Any]:
    return {"losses": [past.loss for past in history], "norms": [past.norm for past in history]}


def named(bad: Sequence[BadTensor], otherwise: str) -> str:
    """Return the first of the bad tensors as text; `otherwise` where there is none."""
    return first_of(bad, MOST_NAMES) or otherwise


def series(values: Sequence[float]) -> str:
    """Return numbers as text."""
    return " ".join(f"{value:.4g}" for value in values)
