from __future__ import annotations

import torch

from lightning_memtools.memory.arriving_values import ArrivingValues


def test_on_the_cpu_values_arrive_at_once_and_in_order():
    arriving = ArrivingValues[str]()
    arriving.send(torch.tensor([1.0]), "first")
    arriving.send(torch.tensor([[2.0, 3.0]]), "second")
    assert arriving.notes() == ["first", "second"]
    assert list(arriving.receive()) == [([1.0], "first"), ([[2.0, 3.0]], "second")]
    assert arriving.notes() == []
    assert list(arriving.receive(wait=True)) == []


def test_values_that_were_dropped_do_not_arrive():
    arriving = ArrivingValues[None]()
    arriving.send(torch.tensor([1.0]), None)
    arriving.clear()
    assert list(arriving.receive(wait=True)) == []


def test_a_value_not_received_because_the_reader_stopped_is_received_next():
    arriving = ArrivingValues[int]()
    for number in range(3):
        arriving.send(torch.tensor([float(number)]), number)
    assert next(arriving.receive()) == ([0.0], 0)
    assert list(arriving.receive()) == [([1.0], 1), ([2.0], 2)]
