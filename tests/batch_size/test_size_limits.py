from __future__ import annotations

from functools import partial

import pytest

from lightning_memtools.batch_size.size_limits import SizeLimits, TunerSettings


@pytest.mark.parametrize("size", [1, 2, 5, 17, 33, 64, 100, 1000])
def test_rounding_down_is_the_largest_admitted_size(size):
    cases = [
        (SizeLimits(multiple_of=8), lambda n: n % 8 == 0),
        (SizeLimits(max_val=50), lambda n: n <= 50),
        (SizeLimits(per_rank=96), lambda n: 96 % n == 0),
        (SizeLimits(per_rank=96, multiple_of=16), lambda n: 96 % n == 0 and n % 16 == 0),
        (SizeLimits(n_samples=33), lambda n: n <= 33),
        (SizeLimits(n_samples=100, min_batches=4), lambda n: n <= 25),
        (SizeLimits(n_samples=65, avoid_single=True), lambda n: n <= 65 and n > 1 and 65 % n != 1),
        (SizeLimits(n_samples=65, avoid_single=True, drop_last=True), lambda n: 1 < n <= 65),
    ]
    for limits, admitted in cases:
        assert limits.round_down(size) == max(filter(admitted, range(1, size + 1)), default=0), limits


def test_ranks_share_an_effective_batch_evenly():
    arguments = {"batch_arg_name": "n", "margin": 0.0, "init_val": None, "max_val": None, "multiple_of": 1}
    settings = partial(TunerSettings, **arguments, stages=("train",), max_trials=1)
    assert settings(effective_batch_size=96).per_rank(3) == 32
    with pytest.raises(ValueError, match=r"effective_batch_size=100 must be a multiple of the 3 ranks"):
        settings(effective_batch_size=100).per_rank(3)
