"""The line through two traced batch sizes gives what a trace of any other size gives."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from lightning_memtools import estimate_memory
from lightning_memtools.estimate.line import line_through
from lightning_memtools.estimate.result import MemoryEstimate


def traced(model: nn.Module, n: int, *shape: int, device: Literal["cpu", "cuda"] = "cpu") -> MemoryEstimate:
    batch = torch.empty(n, *shape, device="meta")
    step = lambda m, x: m(x).square().sum()  # noqa: E731
    return estimate_memory(model, batch, step=step, optimizer=torch.optim.Adam, device=device)


CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "convolutions": (CONVOLUTIONS, (3, 33, 33)),
    "transformer": (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (24, 64)),
}


@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_those_of_a_trace_to_the_byte(name):
    model, shape = MODELS[name]
    model(torch.empty(2, *shape))  # lazy layers get their shapes
    line = line_through(traced(model, 32, *shape), traced(model, 16, *shape))
    assert line is not None
    # A single sample is left out: views of it are contiguous, and some copies are not made.
    for size in (2, 7, 16, 33, 250):
        expected = traced(model, size, *shape)
        found = line(size)
        assert (found.peak_allocated, found.peak_reserved) == (expected.peak_allocated, expected.peak_reserved)
        assert found.batch_size == size
        for capacity in (expected.peak_reserved, expected.peak_reserved - 1, expected.peak_allocated):
            assert found.fits(f"{capacity}B") == expected.fits(f"{capacity}B")


def test_kernels_that_round_by_themselves_leave_it_within_a_thousandth():
    model, shape = MODELS["transformer"]
    line = line_through(traced(model, 32, *shape, device="cuda"), traced(model, 16, *shape, device="cuda"))
    assert line is not None
    for size in (7, 33, 250):
        expected = traced(model, size, *shape, device="cuda")
        assert line(size).peak_allocated == pytest.approx(expected.peak_allocated, rel=1e-3)


class ByParity(nn.Module):
    """Does something else at odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out.exp() if len(x) % 2 else out


def test_there_is_none_where_the_steps_differ_or_the_sizes_are_the_same():
    model = ByParity()
    one = traced(model, 8, 4)
    assert line_through(one, traced(model, 7, 4)) is None
    assert line_through(one, traced(model, 8, 4)) is None
    assert line_through(one, traced(model, 6, 4)) is not None
