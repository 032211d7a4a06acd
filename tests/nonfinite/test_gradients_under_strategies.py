"""The gradients that HaltOnNaN sees under each strategy."""

from __future__ import annotations

import lightning.pytorch.strategies as ours
import pytest
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_memtools.nonfinite.step_guard import gradients_under


@pytest.mark.parametrize(
    ("strategy", "seen"),
    [
        (ours.SingleDeviceStrategy, "whole"),
        (ours.DDPStrategy, "replicated"),
        (ours.FSDPStrategy, "sharded"),
        (ours.ModelParallelStrategy, "sharded"),
        (type("MyDDP", (ours.DDPStrategy,), {}), "replicated"),
        (type("NobodyKnows", (), {}), "sharded"),
    ],
)
def test_strategies_that_work(strategy, seen):
    assert gradients_under(strategy, world_size=2) == seen


@pytest.mark.parametrize("strategy", [ours.DeepSpeedStrategy, XLAStrategy, type("Mine", (ours.DeepSpeedStrategy,), {})])
def test_strategies_that_are_refused_say_why_and_what_to_do(strategy):
    with pytest.raises(
        ValueError, match=f"cannot guard a run under {strategy.__name__}: .* Remove HaltOnNaN, or train"
    ):
        gradients_under(strategy, world_size=2)


def test_one_process_of_an_unknown_strategy_has_whole_gradients():
    assert gradients_under(type("NobodyKnows", (), {}), world_size=1) == "whole"
