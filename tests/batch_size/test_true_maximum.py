"""The size that BatchSizeTuner finds beside the largest that a plain fit runs; benchmarks/batch_size.py has more."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools import BatchSizeTuner, VirtualDevice
from lightning_memtools.memory.sizes import parse_size
from tests.batch_size_models import MODELS, trainer_for
from tests.fake_training import fake_tensors, fakes_of


def trains(kind, model, device, root):
    """Return whether six steps run without a retry."""
    device.track(model)
    try:
        trainer_for(kind, root, limit_val_batches=0, max_steps=6).fit(model)
    except torch.OutOfMemoryError:
        return False
    return device.stats().alloc_retries == 0


# Lightning asks whether a length is zero, which a fake tensor cannot say.
@pytest.mark.filterwarnings("ignore:Total length of `FakeLoader`")
@pytest.mark.parametrize(("name", "step"), [("batchnorm", 2), ("contrastive", 64), ("many weights", 1)])
def test_a_plain_fit_runs_the_size_that_is_found_and_none_a_twentieth_larger(tmp_path, name, step):
    tuner, capacity = BatchSizeTuner(stages=("train",), multiple_of=step), parse_size("2GiB")
    with fake_tensors(VirtualDevice(f"{capacity}B")):
        trainer_for(MODELS[name], tmp_path, tuner, max_steps=0, limit_val_batches=0).fit(fakes_of(MODELS[name])())

    def fits(size):
        model, device = fakes_of(MODELS[name])(size), VirtualDevice(f"{int(0.95 * capacity)}B")
        with fake_tensors(device):
            return trains(MODELS[name], model, device, tmp_path)

    size = tuner.result.sizes["train"]
    assert tuner.result.peaks["train"] <= 0.95 * capacity
    assert fits(size)
    assert not fits(int(1.05 * size) // step * step)


@pytest.mark.parametrize(("name", "capacity"), [("dropout", "64MiB"), ("dropout", "128MiB"), ("attention", "64MiB")])
def test_on_a_device_of_few_segments_the_size_is_the_largest_that_trains(tmp_path, name, capacity):
    """The margin is smaller than a segment of the allocator, which only tensors can leave free."""
    kind, tuner = MODELS[name], BatchSizeTuner(stages=("train",))

    def fits(size):
        with VirtualDevice(capacity) as device:
            return trains(kind, kind(size), device, tmp_path)

    with VirtualDevice(capacity):
        trainer_for(kind, tmp_path, tuner, max_steps=0, limit_val_batches=0).fit(kind())
    size, trial = tuner.result.sizes["train"], tuner.result.trials[0]
    assert fits(size)
    assert not fits(int(1.05 * size) + 1)
    assert (trial.limit, trial.spare) == (parse_size(capacity), parse_size(capacity) - int(0.95 * parse_size(capacity)))
