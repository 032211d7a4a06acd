"""Strategies are recognised by their classes' names, so that those of pytorch_lightning count too."""

from __future__ import annotations

import lightning.pytorch.strategies as ours
import pytest
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_memtools.reporting.strategies import strategy_family, why_unsupported


@pytest.mark.parametrize(
    ("strategy", "family"),
    [
        (type("Mine", (ours.DeepSpeedStrategy,), {}), "DeepSpeed"),
        (type("FSDPStrategy", (), {}), "FSDP"),  # of another package
        (type("NobodyKnows", (), {}), "unknown"),
    ],
)
def test_the_family_of_a_strategy(strategy, family):
    assert strategy_family(strategy) == family


SHARDED = {"DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"}


@pytest.mark.parametrize(
    ("callback", "refused"),
    [
        ("GradientCheckpointing", SHARDED - {"ModelParallelStrategy"}),
        ("OOMReport", SHARDED),
        ("OOMRecovery", SHARDED | {"NobodyKnows", "XLAStrategy", "SingleDeviceXLAStrategy"}),
        ("BatchSizeTuner", SHARDED | {"NobodyKnows"}),
        ("HaltOnNaN", {"DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"}),
        ("TrainingDoctor", SHARDED | {"NobodyKnows", "XLAStrategy", "SingleDeviceXLAStrategy"}),
        ("MemoryMonitor", set()),
        ("LossCurves", set()),
    ],
)
def test_each_callback_gives_a_reason_for_exactly_those_strategies_that_it_does_not_support(callback, refused):
    strategies = [
        *(ours.SingleDeviceStrategy, ours.DDPStrategy, ours.FSDPStrategy, ours.ModelParallelStrategy),
        *(ours.DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy, type("NobodyKnows", (), {})),
    ]
    assert {one.__name__ for one in strategies if why_unsupported(callback, one)} == refused


def test_a_reason_names_the_class_that_was_given():
    mine = type("Mine", (ours.FSDPStrategy,), {})
    assert (why_unsupported("OOMReport", mine) or "").startswith("Mine shards the model")
