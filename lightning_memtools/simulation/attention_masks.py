"""Lets transformers leave out an attention mask of ones while a step is traced, as it does in a real step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_memtools._torch import FakeTensor
from lightning_memtools.memory.nested_tensors import tensors_in

# Both look at the values of a mask only if this function of theirs says that it is not traced.
_ASKING = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
_FUNCTION = "is_tracing"


@contextmanager
def masks_left_out(batch: Any) -> Iterator[None]:
    """Within, transformers takes attention masks of fake tensors for ones, if those of the real batch are ones.

    A mask that is not left out has an element for every pair of words, and attention with one takes other kernels. The
    values that transformers reads of fake masks have to be true.
    """
    asking = [vars(module) for name in _ASKING if (module := sys.modules.get(name)) and _FUNCTION in vars(module)]
    if not asking or not _has_ones_only(batch):
        yield
        return
    before = [names[_FUNCTION] for names in asking]
    for names in asking:
        names[_FUNCTION] = lambda _tensor=None: False
    try:
        yield
    finally:
        for names, function in zip(asking, before, strict=True):
            names[_FUNCTION] = function


def _has_ones_only(batch: Any) -> bool:
    """Returns whether all masks of a batch are ones: what is named so, or else all tables of zeros and ones."""
    named = {name: value for name, value in batch.items() if "mask" in str(name)} if isinstance(batch, Mapping) else {}
    found = list(tensors_in(named or batch))
    if any(isinstance(one, FakeTensor) or one.is_meta for one in found):
        return False  # there are no values
    return all(bool(one.all()) for one in found if named or _is_table_of_flags(one))


def _is_table_of_flags(one: Tensor) -> bool:
    return one.ndim > 1 and not one.is_floating_point() and bool(((one == 0) | (one == 1)).all())
