"""The same steps on real tensors in a VirtualDevice, written out once more: what an estimate is held against."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import torch

from lightning_memtools import VirtualDevice

HALF = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def copy_of(batch, dtype=None):
    if isinstance(batch, tuple):
        return tuple(copy_of(tensor, dtype) for tensor in batch)
    return batch.to(dtype if batch.is_floating_point() else None, copy=True)


@contextmanager
def forward_context(precision):
    """What Lightning's precision plugins enter for a step."""
    if precision in MIXED:
        with torch.autocast("cpu", dtype=MIXED[precision]):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(HALF.get(precision, before))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def peaks_of_real_run(model, batch, step, make_optimizer, *, steps=2, accumulate=1, clip=None, precision="32-true"):
    """Peak allocated and peak reserved of real training on a CPU copy of the model."""
    dtype = HALF.get(precision)
    model = copy.deepcopy(model).train().to(dtype)
    device = VirtualDevice()
    with device:
        device.track(model)
        optimizer = make_optimizer(list(model.parameters())) if make_optimizer else None
        # Not 65536, from where on float16 overflows here, and a scaler skips the optimizer's step.
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=precision == "16-mixed")
        for _ in range(steps):
            for part in range(accumulate):
                with device.host():
                    fresh = copy_of(batch, dtype)
                device.count_batch(fresh)
                with forward_context(precision):
                    loss = step(model, fresh)
                if part == 0:
                    (optimizer or model).zero_grad()
                scaled = loss / accumulate if accumulate > 1 else loss
                scaler.scale(scaled).backward()
                del scaled, fresh
                loss = loss.detach()
            if optimizer is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if optimizer is not None:
                scaler.step(optimizer)
                scaler.update()
    stats = device.stats()
    return stats.peak_allocated, stats.peak_reserved
