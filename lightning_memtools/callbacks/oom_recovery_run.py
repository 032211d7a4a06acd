"""Reports to loggers, callbacks, other ranks and the user what OOMRecovery did in one call of the Trainer."""

from __future__ import annotations

import warnings

from lightning.pytorch import Trainer

from lightning_memtools._lightning import callbacks_of, training_step
from lightning_memtools.callbacks.oom_report import OOMReport
from lightning_memtools.recovery.step_recovery import Recoveries
from lightning_memtools.recovery.update_recovery import UpdateRecovery
from lightning_memtools.reporting.loggers import log_scalars
from lightning_memtools.reporting.ranks import RankPosts


class ToldRecoveries:
    """Reports each event once.

    Args:
        name: The name under which the ranks post to each other.
        recoveries: What happened to batches.
        warns: Whether to warn of the first recovery of each kind.

    Attributes:
        updates: What happened to the optimizers' updates; None outside of training.
    """

    def __init__(self, name: str, recoveries: Recoveries, *, warns: bool) -> None:
        self.updates: UpdateRecovery | None = None
        self._recoveries = recoveries
        self._warns = warns
        self._posts = RankPosts(name)
        # Recovered and skipped batches, whether an update was run again, and what other ranks recovered.
        self._told = (0, 0, False, 0)

    @property
    def remark(self) -> str:
        """A line on this rank and on the others as far as known by now; "" if nothing happened."""
        others = (f"Rank {rank}: {text}" for rank, text, _ in self._others() if text)
        return " ".join(filter(None, [self._own_remark(), *others]))

    def tell(self, trainer: Trainer, *, of_all: bool = False) -> None:
        """Report what is new; with `of_all`, also the number of recoveries on other ranks that is known by now."""
        found, update = self._recoveries, self.updates.told if self.updates else ""
        elsewhere = sum(n for *_, n in self._others()) if of_all else self._told[3]
        now = (found.n_recovered, found.n_skipped, bool(update), elsewhere)
        if now == self._told:
            return
        pairs = zip((found.latest, found.latest, update), now, self._told, strict=False)
        new = [text for text, n, before in pairs if n and not before]
        is_first, self._told = not any(self._told), now
        self._posts.post({"told": [self._own_remark(), found.n_recovered]})
        for text in dict.fromkeys(new) if self._warns else ():
            warnings.warn(f"OOMRecovery: {text}", stacklevel=3)
        for callback in callbacks_of(trainer) if is_first and new else ():
            if isinstance(callback, OOMReport):
                callback.report_recovered(trainer, new[0])
        scalars = {"memory/oom_recoveries": found.n_recovered + elsewhere, "memory/micro_batches": found.n_parts}
        log_scalars(trainer, scalars | {"memory/oom_skipped_batches": found.n_skipped}, training_step(trainer))

    def _own_remark(self) -> str:
        return " ".join(filter(None, [str(self._recoveries), self.updates.told if self.updates else ""]))

    def _others(self) -> list[tuple[int, str, int]]:
        """Return what other ranks have posted so far: the rank, its remark and its number of recoveries."""
        posted, own = self._posts.read(), self._posts.rank
        return [(rank, *one.values["told"]) for rank, one in enumerate(posted) if one.values and rank != own]
