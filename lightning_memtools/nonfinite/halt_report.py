"""The messages of HaltOnNaN, and its report in markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_memtools.nonfinite.bad_step import Evidence, Past, growth
from lightning_memtools.nonfinite.causes import Cause, Explanation
from lightning_memtools.nonfinite.diagnosis import Diagnosis
from lightning_memtools.nonfinite.evaluation_outputs import BadOutput
from lightning_memtools.nonfinite.finite_checks import BadTensor
from lightning_memtools.nonfinite.nonfinite_error import NonFiniteError


@dataclass(frozen=True, slots=True)
class Kept:
    """A capsule, as a message tells of it. Plain values: it travels between ranks.

    Attributes:
        path: Where it is; None if there is none.
        note: Why there is none, or what it does not hold.
        needs: What has to be done before it can be replayed.
    """

    path: Path | None = None
    note: str = ""
    needs: str = ""


@dataclass(slots=True, kw_only=True)
class Halt:
    """All that is known when a training step ends the run.

    Attributes:
        everyone: The evidence of each rank.
        diagnosis: What it points to.
        history: The last steps of this rank; the bad one is the last.
        skipped: The bad steps that were held back before, each with its batches.
        n_missing: How many ranks did not answer.
        report_path: Where the report is.
        report_note: Why there is no report.
        checkpoint_path: The checkpoint of the last good state.
        checkpoint_note: Why there is no such checkpoint.
        explanation: Which operation made the first bad value; None where that was not found.
        explanation_note: Why not.
        again: Whether the step was the same when it was run again.
        capsule: The step as a file, to run it again.
    """

    everyone: Sequence[Evidence]
    diagnosis: Diagnosis
    history: Sequence[Past]
    skipped: Sequence[tuple[int, tuple[int, ...]]] = ()
    n_missing: int = 0
    report_path: Path | None = None
    report_note: str = ""
    checkpoint_path: Path | None = None
    checkpoint_note: str = ""
    explanation: Explanation | None = None
    explanation_note: str = ""
    again: str = ""
    capsule: Kept = field(default_factory=Kept)

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
        """What was bad, at which step, in which batch, on which rank."""
        culprit = self.culprit
        bad = [loss for _, loss in culprit.losses if not math.isfinite(loss)]
        if bad:
            what = f"loss is {bad[0]}"
        elif culprit.gradients:
            what = f"gradient of {culprit.gradients[0]} is not finite"
        else:
            what = f"gradient norm is {culprit.norm}"
        return f"{what} at step {culprit.step} ({self._place()})."

    def tell(self, rank: int, explanation: Explanation | None, note: str) -> None:
        """Take up what running the step again has shown: it knows better than the evidence."""
        self.explanation, self.explanation_note = explanation, note
        if explanation is None:
            return
        found_rank = self.diagnosis.rank
        if explanation.cause is not Cause.NOT_REPRODUCIBLE and found_rank is None:
            found_rank = rank
        self.diagnosis = Diagnosis(explanation.cause, f"{explanation.because}.", explanation.advice, found_rank)

    def about(self) -> dict[str, Any]:
        """The small JSON beside a capsule: what is known of the step without loading it."""
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
            return f"batch {self.batch_idx}, rank unknown: every rank's own loss and batch were finite"
        accumulation = f" of batches {self.culprit.batches[0]} to {self.culprit.batches[-1]}"
        return f"batch {self.batch_idx}{accumulation * (len(self.culprit.batches) > 1)}, rank {rank}"

    def facts(self) -> list[tuple[str, str]]:
        """(what, value) of everything that was found, each value a sentence or less."""
        culprit = self.culprit
        facts = [
            ("Cause", f"{self.diagnosis.cause}: {self.diagnosis.because}"),
            ("Operation", self.explanation_note if self.explanation is None else self.explanation.what),
            ("Tried", "" if self.explanation is None else self.explanation.confirmed),
            ("Run again", self.again),
            ("Losses of the step", _losses(culprit)),
            ("Bad gradients", named(culprit.gradients, "none") + _carried(culprit)),
            ("Bad weights before the step", named(culprit.parameters, "none")),
            ("Bad inputs", "; ".join(map(str, culprit.inputs)) or f"none{_unseen(culprit)}"),
            ("Learning rate", ", ".join(f"{rate:g}" for rate in dict.fromkeys(culprit.learning_rates)) or "not known"),
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
        facts.append(("State", self._state()))
        facts.append(("Last good checkpoint", str(self.checkpoint_path or self.checkpoint_note)))
        facts.append(("The step as a file", " ".join(filter(None, [str(self.capsule.path or ""), self.capsule.note]))))
        return [(what, value) for what, value in facts if value]

    def _state(self) -> str:
        culprit = self.culprit
        if culprit.parameters:
            text = "the update was not applied, but weights or buffers were bad before this step"
        else:
            text = "the update was not applied; weights, optimizer state and buffers are those before the step"
        if culprit.unkept:
            text += f", except {', '.join(culprit.unkept)}, written for the first time in this step"
        if culprit.late:
            text += (
                ". This was read one step late: global_step, schedulers and learning rates are put back, and so is "
                "optimizer state that the step created; data loaders, random number generators and what hooks and "
                "other callbacks did are one step ahead"
            )
        return text + "."

    def message(self) -> str:
        """The text of the error: complete by itself."""
        lines = [f"{what}: {value}" for what, value in self.facts()]
        report = f"Report: {self.report_path or self.report_note}"
        return "\n".join([self.headline, *lines, report, f"Next: {self._next()}"])

    def _next(self) -> str:
        if self.capsule.path is None:
            return self.diagnosis.advice
        needs = f" ({self.capsule.needs})" if self.capsule.needs else ""
        return f"{self.diagnosis.advice} Run the step again: memtools replay {self.capsule.path}{needs}"

    def console(self) -> str:
        """The short form: the error that follows says the rest."""
        lines = [self.headline, f"Cause: {self.diagnosis.cause}: {self.diagnosis.because}"]
        lines += [self.explanation.what] if self.explanation is not None else []
        lines += [f"{what}: {path}" for what, path in self._files()]
        return "\n".join(["HaltOnNaN stops training.", *lines, f"Next: {self._next()}"])

    def error(self) -> NonFiniteError:
        """The error to raise, the same on every rank."""
        culprit = self.culprit
        return NonFiniteError(
            self.message(),
            step=culprit.step,
            batch_idx=self.batch_idx,
            rank=self.diagnosis.rank,
            stage="train",
            cause=self.diagnosis.cause.value,
            losses=[past.loss for past in self.history],
            parameters=culprit.gradients or culprit.parameters,
            norms=[past.norm for past in self.history],
            path=self.report_path,
            checkpoint_path=self.checkpoint_path,
            capsule_path=self.capsule.path,
            explanation=self.explanation,
        )

    def _files(self) -> list[tuple[str, Path]]:
        files = (("Last good checkpoint", self.checkpoint_path), ("Report", self.report_path))
        return [(what, path) for what, path in files if path is not None]

    def markdown(self) -> str:
        """The report: the message as a table, then every bad gradient and the last steps."""
        rows = [("Next", self._next()), *self.facts()]
        parts = [f"# Not finite: {self.headline}", _table(("", ""), rows)]
        for title, bad in (("Bad gradients", self.culprit.gradients), ("Bad weights", self.culprit.parameters)):
            if bad:
                parts += [f"## {title}", _table(("name", "amount"), [(each.name, each.amount) for each in bad])]
        past = [(str(each.step), f"{each.loss:.6g}", f"{each.norm:.6g}") for each in self.history]
        parts += ["## Last steps", _table(("step", "loss", "gradient norm"), past)]
        if self.skipped:
            skipped = [(str(step), ", ".join(map(str, batches))) for step, batches in self.skipped]
            parts += ["## Skipped steps", _table(("step", "batches"), skipped)]
        return "\n\n".join(parts) + "\n"


def _losses(evidence: Evidence) -> str:
    if not evidence.losses:
        return "none seen"
    return ", ".join(
        f"{loss:.6g}" + f" (batch {index})" * (len(evidence.losses) > 1) for index, loss in evidence.losses
    )


def _carried(evidence: Evidence) -> str:
    if not evidence.carried:
        return ""
    return f"; the loss of rank {evidence.rank} alone makes them NaN, by which HaltOnNaN tells the other ranks"


def _unseen(evidence: Evidence) -> str:
    return f" seen; batch {', '.join(map(str, evidence.unseen))} was no longer held" if evidence.unseen else ""


def _trend(norms: Sequence[float]) -> str:
    factor = growth(norms[:-1])
    if factor is None:
        return "too few steps to see a trend"
    return f"{'grew' if factor > 1 else 'did not grow'} before the bad step: {factor:.3g} times its earlier median"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


MOST_NAMES = 5  # in a message; the report lists all


def evaluation_message(
    everyone: Sequence[Sequence[BadOutput]], *, stage: str, step: int, weights: Sequence[BadTensor]
) -> str:
    """What to say when outputs or metrics of an evaluation run are NaN or Inf."""
    found = [
        f"{bad}{f' (rank {rank})' * (len(everyone) > 1)}" for rank, theirs in enumerate(everyone) for bad in theirs
    ]
    if weights:
        advice = "the weights are the cause: start again from a finite checkpoint."
    else:
        advice = (
            "look at the data of the first bad batch, and at domain errors (log or division by 0) in the evaluation "
            "step and its metrics; if the value may be NaN or Inf by right, use HaltOnNaN(check_outputs=False)."
        )
    return "\n".join(
        [
            f"The {stage} run at step {step} gave values that are not finite: {'; '.join(found)}.",
            f"Bad weights: {named(weights, 'none')}.",
            f"Next: {advice}",
        ]
    )


def overflow_message(
    bad: Sequence[BadTensor], *, step: int, rank: int, history: Sequence[Past], learning_rates: Sequence[float]
) -> str:
    """What to say when finite gradients made an update that was not finite, seen before a checkpoint."""
    return "\n".join(
        [
            f"{bad[0]} is not finite after the update of step {step} (rank {rank}). No checkpoint was written.",
            f"Bad weights and optimizer state: {named(bad, 'none')}.",
            "Cause: exploding gradient: losses and gradients were finite, so the update itself overflowed.",
            f"Learning rate: {', '.join(f'{rate:g}' for rate in dict.fromkeys(learning_rates))}",
            f"Last losses: {series([past.loss for past in history])}",
            f"Last gradient norms: {series([past.norm for past in history])}",
            "Next: lower the learning rate, set Trainer(gradient_clip_val=1.0), and start from an earlier checkpoint.",
        ]
    )


def named(bad: Sequence[BadTensor], otherwise: str) -> str:
    """The first of the bad tensors, as text; `otherwise` where there is none."""
    if not bad:
        return otherwise
    rest = f" and {len(bad) - MOST_NAMES} more" if len(bad) > MOST_NAMES else ""
    return ", ".join(map(str, bad[:MOST_NAMES])) + rest


def series(values: Sequence[float]) -> str:
    """Numbers, as text."""
    return " ".join(f"{value:.4g}" for value in values)
