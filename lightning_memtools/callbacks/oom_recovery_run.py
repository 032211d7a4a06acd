"""Reports to loggers, callbacks, other ranks and the user what OOMRecovery did in one call of the Trainer."""

from __future__ import annotations

import warnings

from lightning.pytorch import Trainer

from lightning_memtools._lightning import callbacks_of, training_step
from lightning_memtools.callbacks.oom_report import OOMReport
from lightning_memtools.recovery.step_recovery import Recoveries
from lightning_memtools.reporting.loggers import log_scalars
from lightning_memtools.reporting.ranks import RankPosts


class ToldRecoveries:
    """Reports each event once.

    Args:
        name: The name under which the ranks post to each other.
        recoveries: What happened to batches.
        warns: Whether to warn of the first recovery and of the first skipped batch.
    """

    def __init__(self, name: str, recoveries: Recoveries, *, warns: bool) -> None:
        self._recoveries = recoveries
        self._warns = warns
        self._posts = RankPosts(name)
        self._told = (0, 0, 0)  # recovered and skipped batches, and what other ranks recovered

    @property
    def remark(self) -> str:
        """A line on this rank and on the others as far as known by now; "" if nothing happened."""
        others = (f"Rank {rank}: {text}" for rank, text, _ in self._others() if text)
        return " ".join(filter(None, [str(self._recoveries), *others]))

    def tell(self, trainer: Trainer, *, of_all: bool = False) -> None:
        """Report what is new; with `of_all`, also the number of recoveries on other ranks that is known by now."""
        mine, before = self._recoveries, self._told
        elsewhere = sum(n for *_, n in self._others()) if of_all else before[2]
        self._told = (mine.n_recovered, mine.n_skipped, elsewhere)
        if self._told == before:
            return
        self._posts.post({"told": [str(mine), mine.n_recovered]})
        is_first_of_kind = any(now and not then for now, then in zip(self._told[:2], before[:2], strict=True))
        if is_first_of_kind and self._warns:
            warnings.warn(f"OOMRecovery: {mine.latest}", stacklevel=3)
        for callback in callbacks_of(trainer) if is_first_of_kind and not any(before) else ():
            if isinstance(callback, OOMReport):
                callback.report_recovered(trainer, mine.latest)
        scalars = {"memory/oom_recoveries": mine.n_recovered + elsewhere, "memory/micro_batches": mine.n_parts}
        log_scalars(trainer, scalars | {"memory/oom_skipped_batches": mine.n_skipped}, training_step(trainer))

    def _others(self) -> list[tuple[int, str, int]]:
        """Return what other ranks have posted so far: the rank, its remark and its number of recoveries."""
        posted = enumerate(self._posts.read())
        return [(rank, *post.values["told"]) for rank, post in posted if post.values and rank != self._posts.rank]
