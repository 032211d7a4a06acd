"""Optimizers and schedulers, built again as if the batch size had been there from the beginning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_memtools._lightning import loop_of, source_of
from lightning_memtools.state.random_state import RandomState
from lightning_memtools.state.state_snapshot import StateSnapshot


class Building:
    """Watches the Trainer build optimizers and schedulers, so that they can be built again with the same numbers."""

    def __init__(self) -> None:
        self._before: StateSnapshot | None = None
        self._random_after: RandomState | None = None

    def watch(self, trainer: Trainer) -> None:
        """Note the random numbers when they are built."""
        strategy: Any = trainer.strategy
        build = strategy.setup_optimizers

        def build_and_note(*args: Any, **kwargs: Any) -> None:
            strategy.__dict__.pop("setup_optimizers", None)
            self._before = StateSnapshot(_passed_loaders(trainer))
            build(*args, **kwargs)
            self._random_after = RandomState.now()

        strategy.setup_optimizers = build_and_note

    def forget(self, trainer: Trainer) -> None:
        """Watch no longer. Twice does no harm."""
        trainer.strategy.__dict__.pop("setup_optimizers", None)
        self._before = self._random_after = None

    def go_back(self) -> None:
        """Put the random numbers, and the passed loaders' own, to where they were before anything was built."""
        if self._before is not None:
            self._before.restore()

    def repeat(self, trainer: Trainer) -> None:
        """Build them again, as if the model had had its present size from the beginning, with the same numbers."""
        now = RandomState.now()
        undisturbed = self._random_after is not None and now == self._random_after
        self.go_back()
        trainer.strategy.setup_optimizers(trainer)
        trainer.strategy.setup_precision_plugin()
        if not undisturbed:
            now.restore()  # somebody drew numbers since, and would do so again after these


def _passed_loaders(trainer: Trainer) -> list[Any]:
    sources = [source_of(loop_of(trainer, stage)) for stage in ("train", "val")]
    return [source.instance for source in sources if not source.is_module()]
