"""What can be asked of an estimate."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch

from lightning_memtools.estimate import estimate_memory
from lightning_memtools.memory.allocator import replay
from tests.estimate.networks import Decoder, mlp, next_token, total

ADAM = torch.optim.Adam


@pytest.fixture(scope="module")
def estimate():
    return estimate_memory(mlp(256, 1024, 256), torch.zeros(2048, 256), step=total, optimizer=ADAM)


def test_categories_and_holders_add_up_to_the_peak_of_the_trace(estimate):
    played = replay(estimate.trace).stats
    assert (played.peak_allocated, played.peak_reserved) == (estimate.peak_allocated, estimate.peak_reserved)
    assert sum(estimate.composition.values()) == estimate.peak_allocated
    assert sum(holder.n_bytes for holder in estimate.holders) == estimate.peak_allocated


def test_the_peak_reserved_fits_and_less_than_the_peak_allocated_does_not(estimate):
    reserved = estimate.peak_reserved
    assert estimate.fits(f"{reserved}B")
    # Emptying the cache may help for a while, but not below what is allocated.
    assert not estimate.fits(f"{estimate.peak_allocated - 1}B")
    assert estimate.shortfall(f"{estimate.peak_allocated - 1}B") == 1


def test_a_gpu_leaves_room_for_its_context(estimate):
    gpus = dict(estimate.fitting_gpus())
    assert len(gpus) > 20
    assert all(gpus.values())
    with torch.device("meta"):
        large = mlp(*[16384] * 7)  # 6.4 GB of parameters, as much of gradients
    names = dict(estimate_memory(large, torch.zeros(1, 16384, device="meta"), step=total).fitting_gpus())
    assert not names["RTX 3080 10GB"]
    assert names["RTX 4090 24GB"]


@pytest.mark.parametrize(
    ("model", "batch", "step", "capacity"),
    [
        (mlp(256, 1024, 256), torch.zeros(8, 256), total, "64MiB"),
        (Decoder(), torch.zeros(100, 20, dtype=torch.long), next_token, "60MiB"),
    ],
)
def test_the_largest_batch_fits_and_one_more_does_not(model, batch, step, capacity):
    estimate = partial(estimate_memory, model, step=step, optimizer=ADAM)
    size = estimate(batch).max_batch_size(capacity)
    assert size > 1
    rows = batch[:1].expand(size + 1, *batch.shape[1:]).contiguous()
    assert estimate(rows[:-1].clone()).fits(capacity)
    assert not estimate(rows).fits(capacity)


def test_a_snapshot_tells_the_same_peak(estimate, tmp_path):
    path = tmp_path / "snapshot.pickle"
    estimate.as_snapshot(path)
    with path.open("rb") as file:
        snapshot = pickle.load(file)  # noqa: S301, written above
    allocated = peak = 0
    for event in snapshot["device_traces"][0]:
        if event["action"] in {"alloc", "free_completed"}:
            # The history has the sizes asked for; blocks are multiples of 512.
            size = -(-event["size"] // 512) * 512
            allocated += size if event["action"] == "alloc" else -size
            peak = max(peak, allocated)
    assert peak == estimate.peak_allocated
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == estimate.peak_reserved


def test_tables_hold_the_figures(estimate):
    text = estimate.to_markdown()
    assert "| parameters | 525,568 |" in text
    assert f"The peak is reached at {estimate.peak_at}." in text
    rows = {row[0]: row for row in estimate.module_table().rows}
    # ReLU keeps its output, 2048 x 1024 floats, which the last layer wants too.
    assert rows["1"][4] == "8.00 MiB"
    assert rows["0"][1:4] == ("Linear", "[2048, 1024]", "263,168")
    assert [row[0] for row in estimate.module_table(top=1).rows] == ["1"]
