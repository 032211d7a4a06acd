"""Results of repeated fakes, compared with those of a FakeTensorMode."""

from __future__ import annotations

from collections import Counter

import torch

from lightning_memtools._torch import OperatorMode
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.simulation.known_values import KnownValues
from lightning_memtools.simulation.repeated_fakes import RepeatedFakes

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
