from __future__ import annotations

import gc
import traceback

import pytest
import torch

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.memory_releaser import free_failed_backward


def test_a_backward_that_ran_out_of_memory_is_released():
    with VirtualDevice("52MiB") as device:

        def fail():
            x = torch.ones(1 << 22, requires_grad=True)
            loss = x.tanh().sum() + x.sigmoid().sum()
            with pytest.raises(torch.OutOfMemoryError) as raised:
                loss.backward()
            traceback.clear_frames(raised.value.__traceback__)

        fail()
        gc.collect()
        assert device.stats().allocated >= 16 << 20, "autograd's queue keeps what was still to be run"
        free_failed_backward()
        assert device.stats().allocated == 0
