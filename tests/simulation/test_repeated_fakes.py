"""What is made of shapes known already is what a FakeTensorMode makes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools import VirtualDevice
from lightning_memtools._torch import OperatorMode, fake_mode
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.simulation.fakes import TensorExchange, borrowed
from lightning_memtools.simulation.known_values import KnownValues
from lightning_memtools.simulation.repeated_fakes import RepeatedFakes
from lightning_memtools.simulation.simulated import simulated
from tests.checkpointing.foreign_models import made

aten = torch.ops.aten

# Where fakes keep a number that they know. From torch 2.15 on, `torch.tensor(3)` keeps it in the memo of `item` too.
KNOWN_NUMBER = ("constant", "_item_memo", "_item_memo_vc", "_item_memo_epoch")


def described(out, given):
    """Shapes, strides, types, devices, memory, attributes, and which storage is that of an argument."""
    places = {one.untyped_storage()._cdata: at for at, one in reversed(list(enumerate(given)))}
    return [
        (
            type(one), one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one.requires_grad,
            one.untyped_storage().nbytes(), one.is_inference(), places.get(one.untyped_storage()._cdata),
            vars(one) | dict.fromkeys(KNOWN_NUMBER), torch._C._dispatch_keys(one),
        )
        for one in tensors_in(out)
    ]  # fmt: skip


class ComparedWithFakeTensorMode(OperatorMode):
    """Runs operators three times: as a FakeTensorMode does, and twice with what is known."""

    def __init__(self, mode):
        super().__init__()
        self.repeated = RepeatedFakes(mode, KnownValues())
        self.compared = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.native_layer_norm_backward.default:  # as its kernels do first, unlike a FakeTensorMode
            args = (args[0].contiguous(), args[1].contiguous(), *args[2:])
        plain = func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        for _ in range(2):
            other = self.repeated.run(func, args, kwargs)
            assert type(other) is type(plain), func
            assert described(other, given) == described(plain, given), func
            assert (other is args[0]) == (plain is args[0]) if args else True, func
        self.compared[func] += 1
        return plain


@pytest.mark.parametrize("name", ["gpt2", "timm_convnext"])
def test_a_step_of_a_model_gets_the_same_tensors(name):
    model, batch = made(name)
    with fake_mode() as mode, borrowed(model, exchange := TensorExchange()):
        batch = {key: exchange(value) if isinstance(value, Tensor) else value for key, value in batch.items()}
        with ComparedWithFakeTensorMode(mode) as both:
            model(batch).backward()
    assert len(both.compared) > 20
    assert both.compared.total() > 300


def test_what_changes_tensors_returns_them_and_counts_as_a_change():
    with simulated(nn.Identity(), VirtualDevice(), TensorExchange(), cuda=False):
        for _ in range(2):
            x = torch.ones(3, 4)
            assert x.add_(1) is x
            assert (x.relu_() is x, x._version) == (True, 2)
            with pytest.raises(RuntimeError, match="shape"):
                x.add_(torch.ones(5, 3, 4))
            assert x.resize_(2, 2).shape == (2, 2)


def test_the_type_of_a_number_and_the_default_type_count():
    with simulated(nn.Identity(), VirtualDevice(), TensorExchange(), cuda=False):
        x = torch.ones(3, dtype=torch.int64)
        for _ in range(2):
            assert [(x * one).dtype for one in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
            assert (x / 2).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert (x * 1.0).dtype == (x / 2).dtype == torch.empty(2).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)
