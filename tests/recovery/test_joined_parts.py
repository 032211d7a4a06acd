"""What a whole batch would have logged is put together on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_memtools._lightning import LoggedValue
from lightning_memtools.recovery.joined_parts import logged_by_whole


@pytest.mark.cuda_memory
def test_nothing_waits_for_the_device():
    def number(value: float) -> Tensor:
        return torch.tensor(value, device="cuda")

    parts = [
        {
            "loss": LoggedValue("mean", number(n), number(2 * n), number(2)),
            "most": LoggedValue("max", None, number(n), None),
        }
        for n in (1.0, 2.0)
    ]
    losses = [number(1.0), number(2.0)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            losses[0].item()
        for weights in (None, [3.0, 5.0]):
            for adds in (False, True):
                whole = logged_by_whole(4, lambda: 4, parts, [2, 2], weights=weights, losses=losses, adds=adds)
                assert whole.keys() == {"loss", "most"}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert whole["loss"].on_step.device.type == whole["most"].of_epoch.device.type == "cuda"
