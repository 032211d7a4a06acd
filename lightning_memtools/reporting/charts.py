"""TensorBoard's custom-scalars page: which curves share a chart."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lightning_memtools.reporting.loggers import for_each_logger

Charts = Mapping[str, Mapping[str, Sequence[str]]]
"""Category to chart title to the tags drawn in it, as regular expressions without anchors."""

# Which writers of a Trainer have their layout: it is written once, by whichever callback comes first.
_WRITTEN: weakref.WeakKeyDictionary[Trainer, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


@runtime_checkable
class OffersCharts(Protocol):
    """A callback that has curves worth one chart."""

    def charts(self, trainer: Trainer) -> Charts:
        """Category to chart title to tags, of curves that the fit call which begins will have."""


def write_layout(trainer: Trainer) -> None:
    """Write the charts of all callbacks as one layout to every logger that takes one.

    Once for each, on rank 0, when a fit begins; call it in `on_fit_start`. Only the last layout given to a TensorBoard
    writer survives, so callbacks must not write one each.
    """
    if not trainer.is_global_zero:
        return
    written = _WRITTEN.setdefault(trainer, weakref.WeakSet())
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    layout = merged_layout([c.charts(trainer) for c in callbacks if isinstance(c, OffersCharts)])

    def write(logger: Logger) -> None:
        experiment: Any = logger.experiment  # type: ignore[attr-defined]
        if hasattr(experiment, "add_custom_scalars") and experiment not in written:
            written.add(experiment)
            experiment.add_custom_scalars(layout)

    for_each_logger(trainer, write)


def merged_layout(all_charts: Sequence[Charts]) -> dict[str, dict[str, list[Any]]]:
    """The charts of several callbacks in the form that `SummaryWriter.add_custom_scalars` takes."""
    layout: dict[str, dict[str, list[Any]]] = {}
    for charts in all_charts:
        for category, by_title in charts.items():
            for title, tags in by_title.items():
                layout.setdefault(category, {})[title] = ["Multiline", [_pattern(tag) for tag in tags]]
    return layout


def _pattern(tag: str) -> str:
    # TensorBoard matches tags with re.match: without "$", "loss/train" would also take "loss/train_epoch".
    # A logger's prefix is put before the tag, with a hyphen.
    return f"(.*-)?{tag}$"
