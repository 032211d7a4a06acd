from __future__ import annotations

import torch

from lightning_memtools.reporting.mean_curves import RunningMeans

CPU = torch.device("cpu")


def test_weighted_means_and_their_weights_then_anew():
    means = RunningMeans()
    means.add("a", torch.tensor(1.0))
    means.add("a", torch.tensor([[2.0]], dtype=torch.bfloat16), weight=3)
    means.add("b", torch.tensor(5))
    assert means.take(["b", "a"], CPU).tolist() == [[5.0, 7 / 4], [1.0, 4.0]]
    (mean,), (weight,) = means.take(["a"], CPU).tolist()
    assert mean != mean  # noqa: PLR0124, NaN
    assert weight == 0


def test_a_value_that_is_overwritten_later_does_not_change_the_mean():
    means, value = RunningMeans(), torch.tensor(1.0)
    means.add("a", value)
    value.fill_(100.0)
    assert means.take(["a"], CPU)[0].item() == 1.0
