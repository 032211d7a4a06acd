from __future__ import annotations

import re

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_memtools import LossCurves, MemoryMonitor, VirtualDevice
from lightning_memtools.reporting.loggers import merged_layout
from tests.lightning_models import Regression, loader, trainer


class CountsLayouts(TensorBoardLogger):
    """A TensorBoard logger whose writer counts the layouts it is given."""

    layouts: list[object]

    @property
    def experiment(self):
        writer = super().experiment
        if not hasattr(self, "layouts"):
            self.layouts = []
            original = writer.add_custom_scalars
            writer.add_custom_scalars = lambda layout: (self.layouts.append(layout), original(layout))
        return writer


def test_one_layout_holds_the_charts_of_all_callbacks_and_is_written_once(tmp_path):
    logger = CountsLayouts(tmp_path)
    model = Regression()
    run = trainer(tmp_path, MemoryMonitor(), LossCurves(grad_norm=True), logger=logger)
    run.fit(model, loader(), loader(8))
    run.test(model, loader(8), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(), loader(8))
    (layout,) = logger.layouts
    assert {category: sorted(charts) for category, charts in layout.items()} == {
        "memory": ["host (GiB)"],
        "loss": ["gradient norm", "training and validation"],
    }


def test_test_and_predict_are_charted_with_units_and_the_charts_of_fit_stay(tmp_path):
    logger = CountsLayouts(tmp_path)
    model = Regression()
    with VirtualDevice("1GiB"):
        run = trainer(tmp_path, MemoryMonitor(), LossCurves(), logger=logger)
        run.fit(model, loader(), loader(8))
        run.test(model, loader(8), verbose=False)
        run.predict(model, loader(8))
    assert len(logger.layouts) == 3
    layout = logger.layouts[-1]
    charted = [title for title in layout["memory"] if "allocated and reserved" in title]
    assert charted == [f"{stage}: allocated and reserved (GiB)" for stage in ("train", "val", "test", "predict")]
    assert list(layout["loss"]) == ["training and validation"]
    assert all("(GiB)" in title for title in layout["memory"])


def test_patterns_take_their_tags_with_any_logger_prefix_and_nothing_else():
    layout = merged_layout([{"loss": {"a": ["loss/train(/.+)?"]}}, {"loss": {"b": ["x"]}, "memory": {"c": ["y"]}}])
    assert sorted(layout["loss"]) == ["a", "b"]
    kind, (pattern,) = layout["loss"]["a"]
    assert kind == "Multiline"
    taken = ["loss/train", "loss/train/g_loss", "exp1-loss/train"]
    left = ["loss/train_epoch", "myloss/train", "loss/training"]
    assert [bool(re.match(pattern, tag)) for tag in taken + left] == [True] * 3 + [False] * 3
