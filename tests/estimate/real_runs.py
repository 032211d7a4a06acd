"""The same steps on real tensors in a VirtualDevice, written out once more: what an estimate is held against."""

from __future__ import annotations

import copy

import torch

from lightning_memtools import VirtualDevice


def copy_of(batch):
    return tuple(tensor.clone() for tensor in batch) if isinstance(batch, tuple) else batch.clone()


def peaks_of_real_run(model, batch, step, make_optimizer, *, steps=2, accumulate=1, clip=None):
    """Peak allocated and peak reserved of real training on a CPU copy of the model."""
    model = copy.deepcopy(model).train()
    device = VirtualDevice()
    with device:
        device.track(model)
        optimizer = make_optimizer(list(model.parameters())) if make_optimizer else None
        for _ in range(steps):
            for part in range(accumulate):
                with device.host():
                    fresh = copy_of(batch)
                device.count_batch(fresh)
                loss = step(model, fresh)
                if part == 0:
                    (optimizer or model).zero_grad()
                scaled = loss / accumulate if accumulate > 1 else loss
                scaled.backward()
                del scaled, fresh
                loss = loss.detach()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if optimizer is not None:
                optimizer.step()
    stats = device.stats()
    return stats.peak_allocated, stats.peak_reserved
