"""The size that BatchSizeTuner finds beside the largest that a plain fit runs; benchmarks/batch_size.py has more."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools import BatchSizeTuner, VirtualDevice
from lightning_memtools.memory.sizes import parse_size
from tests.batch_size_models import MODELS, trainer_for
from tests.fake_training import fake_tensors, fakes_of


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
            device.track(model)
            try:
                trainer_for(MODELS[name], tmp_path, max_steps=6, limit_val_batches=0).fit(model)
            except torch.OutOfMemoryError:
                return False
        return device.stats().alloc_retries == 0

    size = tuner.result.sizes["train"]
    assert tuner.result.peaks["train"] <= 0.95 * capacity
    assert fits(size)
    assert not fits(int(1.05 * size) // step * step)


def test_every_size_of_a_small_device_on_real_tensors(tmp_path):
    kind, capacity = MODELS["dropout"], 128 << 20

    def fits(size):
        model, device = kind(size), VirtualDevice(f"{int(capacity * 0.95)}B")
        with device:
            device.track(model)
            try:
                trainer_for(kind, tmp_path, limit_val_batches=0).fit(model)
            except torch.OutOfMemoryError:
                return False
        return device.stats().alloc_retries == 0

    *_, truth = (size for size in range(1, 13) if fits(size))
    assert 4 < truth < 12
    tuner = BatchSizeTuner(stages=("train",))
    with VirtualDevice(f"{capacity}B"):
        trainer_for(kind, tmp_path, tuner, max_steps=0, limit_val_batches=0).fit(kind())
    assert tuner.result.sizes["train"] == truth
