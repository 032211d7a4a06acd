from __future__ import annotations

import torch

from lightning_memtools.memory.arriving_values import ArrivingValues


def test_values_that_were_dropped_do_not_arrive():
    arriving = ArrivingValues[None]()
    arriving.send(torch.tensor([1.0]), None)
    arriving.clear()
    assert list(arriving.receive(wait=True)) == []
