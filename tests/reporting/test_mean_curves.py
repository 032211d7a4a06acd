from __future__ import annotations

import gc

import pytest
import torch

from lightning_memtools.reporting.mean_curves import RunningMeans

CPU = torch.device("cpu")


def live_tensors() -> int:
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_weighted_means_and_their_weights_then_anew():
    means = RunningMeans()
    means.add("a", torch.tensor(1.0))
    means.add("a", torch.tensor([[2.0]], dtype=torch.bfloat16), weight=3)
    means.add("b", torch.tensor(5))
    assert means.take(["b", "a"], CPU).tolist() == [[5.0, 7 / 4], [1.0, 4.0]]
    (mean,), (weight,) = means.take(["a"], CPU).tolist()
    assert mean != mean  # noqa: PLR0124, NaN
    assert weight == 0


def test_a_long_interval_keeps_no_more_tensors_than_a_short_one():
    means = RunningMeans()
    values = torch.arange(5000.0) % 7
    before = live_tensors()
    for value in values:
        means.add("a", value, weight=2)
    assert live_tensors() - before < 300
    (mean,), (weight,) = means.take(["a"], CPU).tolist()
    assert mean == pytest.approx(values.mean().item(), rel=1e-6)
    assert weight == 10000


def test_a_value_that_is_overwritten_later_does_not_change_the_mean():
    means, value = RunningMeans(), torch.tensor(1.0)
    means.add("a", value)
    value.fill_(100.0)
    assert means.take(["a"], CPU)[0].item() == 1.0
