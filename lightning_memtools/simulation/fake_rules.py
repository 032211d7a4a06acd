"""Rules for operators that make other tensors of fakes than of real tensors, whatever device is simulated."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memtools._torch import FakeTensor, stores_gradient
from lightning_memtools.memory.cuda_ops.rules import Call, Rule

aten = torch.ops.aten


def clone(call: Call) -> Any:
    """Return a sparse tensor with as many values; FakeTensorMode's clone has none.

    Autograd keeps a new sparse gradient itself, if nothing else refers to it. For fake tensors it cannot tell, and
    clones it.
    """
    source = call.args[0]
    if source.layout is not torch.sparse_coo:
        return call.results()
    parts = [call.run(each, source) for each in (aten._indices.default, aten._values.default)]
    if not stores_gradient():
        parts = [call.run(call.func, part) for part in parts]
    dimensions = source.sparse_dim(), source.dense_dim(), source.shape
    options = {"dtype": source.dtype, "layout": source.layout, "device": source.device}
    return call.run(aten._sparse_coo_tensor_with_dims_and_tensors.default, *dimensions, *parts, **options)


def skip(call: Call) -> Any:
    """Skip an in-place operator on lists, which makes no tensor: this halves the time of a fake optimizer's step.

    Counts of steps are fake tensors that have values, by which optimizers divide.
    """
    tensors = call.args[0]
    is_skipped = tensors and isinstance(tensors[0], FakeTensor) and tensors[0].constant is None
    return None if is_skipped else call.results()


_IN_PLACE = (
    aten._foreach_add_, aten._foreach_sub_, aten._foreach_mul_, aten._foreach_div_, aten._foreach_lerp_,
    aten._foreach_addcmul_, aten._foreach_addcdiv_, aten._foreach_sqrt_, aten._foreach_neg_, aten._foreach_zero_,
    aten._foreach_maximum_, aten._foreach_minimum_, aten._foreach_clamp_max_, aten._foreach_clamp_min_,
    aten._foreach_copy_, aten._foreach_pow_, aten._foreach_reciprocal_, aten._foreach_sign_,
)  # fmt: skip
FAKE_RULES: dict[Any, Rule] = {
    aten.clone.default: clone,
    **{getattr(one, name): skip for one in _IN_PLACE for name in one.overloads()},  # type: ignore[no-untyped-call]
}
