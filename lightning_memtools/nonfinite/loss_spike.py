"""A loss spike: the facts about it, and their text for the warning and the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_memtools.nonfinite.bad_step import rates_as_text
from lightning_memtools.reporting.spike_window import Spike

SpikeAction = Literal["report", "skip", "rollback"]


class LossSpikeError(RuntimeError):
    """Raised by LossSpikes at the next spike after `max_actions` skips or rollbacks. `spike` describes it."""

    def __init__(self, message: str, spike: LossSpike) -> None:
        super().__init__(message)
        self.spike = spike


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike:
    """A training step whose loss or gradient norm is far above those of earlier steps.

    Attributes:
        step: The training step, as on the x axis of the logs.
        batches: The indices of the step's batches within the epoch.
        loss: The mean loss of the step, on the rank where the mean is largest. NaN if there was no loss.
        norm: The L2 norm over all gradients, before clipping.
        loss_spike: How the loss compares with earlier losses; None if the loss did not spike.
        norm_spike: How the norm compares with earlier norms; None if the norm did not spike.
        learning_rates: The learning rates of the optimizer.
        done: The action taken: "report" (training was not changed), "skip", "rollback" or "halt".
        taken_back: The number of optimizer updates that the rollback undoes; 0 without a rollback.
        report: The path of the report; None if there is none.
    """

    step: int
    batches: tuple[int, ...]
    loss: float
    norm: float
    loss_spike: Spike | None
    norm_spike: Spike | None
    learning_rates: tuple[float, ...]
    done: Literal["report", "skip", "rollback", "halt"] = "report"
    taken_back: int = 0
    report: Path | None = None

    def headline(self) -> str:
        """Return a sentence that describes the spike."""
        found = (("loss", self.loss_spike), ("gradient norm", self.norm_spike))
        what = " and ".join(f"the {name} is {spike}" for name, spike in found if spike is not None)
        batches = ", ".join(map(str, self.batches))
        return f"Spike at step {self.step} (batch {batches}): {what}."

    def action(self) -> str:
        """Return a sentence that says what was done about the spike."""
        updates = f"{self.taken_back} update{'s' * (self.taken_back != 1)}"
        return {
            "report": "Nothing was changed: its update is made.",
            "skip": "Its update was held back.",
            "rollback": f"Training was taken back by {updates}, and goes on with the next batch.",
            "halt": "Training ends: its update was not made.",
        }[self.done]

    def lines(self) -> list[str]:
        """Return all that is known about the spike, as lines for the report."""
        lines = [self.headline(), self.action()]
        for name, value, spike in (("Loss", self.loss, self.loss_spike), ("Gradient norm", self.norm, self.norm_spike)):
            if spike is not None:
                lines.append(
                    f"{name}: {value:.4g}. In the {spike.n_values} steps before, the median was {spike.median:.4g} and "
                    f"95% were below {spike.upper:.4g}; a spike exceeds {spike.limit:.4g}."
                )
        lines.append(f"Learning rate: {rates_as_text(self.learning_rates)}.")
        lines.append(
            "Next: look at the samples and labels of its batches. If they are right, a lower learning rate or clipped "
            "gradients may help."
        )
        return lines

    def markdown(self) -> str:
        """Return the report as markdown."""
        title = f"# Loss spike at step {self.step}"
        return "\n".join([title, "", *(f"- {line}" for line in self.lines()), ""])
