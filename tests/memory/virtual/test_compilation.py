"""torch.compile under a device: eager, said once, and as before afterwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.reading import peak


def counting_backend(graphs: list[Any]) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        graphs.append(graph)
        return graph.forward

    return backend


def test_compiled_code_runs_eagerly_inside_and_compiled_afterwards() -> None:
    graphs: list[Any] = []
    before = torch.compile(lambda x: x.sin().cos(), backend=counting_backend(graphs))
    new = torch.compile(lambda x: x.cos().sin(), backend=counting_backend(graphs))
    x = torch.ones(1000)
    before(x)
    assert len(graphs) == 1
    with VirtualDevice() as device:
        y = before(x)
        # Eagerly: sin's result is there for a moment beside cos's.
        assert peak(device) == 2 * 4096
        assert torch.equal(y, x.sin().cos())
        new(x)
        assert len(graphs) == 1
    before(x)
    assert len(graphs) == 1
    new(x)
    assert len(graphs) == 2


def test_the_note_about_compiled_code_is_given_once() -> None:
    with VirtualDevice():
        with pytest.warns(UserWarning, match=r"torch\.compile has no effect"):
            net: Any = torch.compile(nn.Linear(3, 3), backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(torch.ones(1, 3))
            torch.compile(lambda x: x, backend="eager")
    compiled: Any = torch.compile(nn.Linear(3, 3), backend="eager")
    with VirtualDevice(), pytest.warns(UserWarning, match="compiled code runs eagerly"):
        compiled(torch.ones(1, 3))
