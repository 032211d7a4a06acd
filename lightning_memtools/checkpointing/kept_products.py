"""Keeps what matrix products, convolutions and attention give in a range, which then computes only the rest again.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` does this too, but allows only one backward, and raises
where a kept tensor is changed in place later. Here the product is computed again in both cases.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_memtools._torch import (
    DispatchMode,
    OpOverload,
    alias_below_autograd,
    operator_packet,
    operator_schema,
    tree_flatten,
    tree_unflatten,
    write_count,
)


def is_product(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an operator is a product whose results may be kept.

    Those are the operators that torch counts FLOPs of, but not where they draw random numbers: if such a call were
    left out, later calls would draw other numbers.
    """
    is_one, rate_at = _product(operator)
    if rate_at is None:
        return is_one
    return not (args[rate_at] if len(args) > rate_at else kwargs.get("dropout_p", 0))


@cache
def _product(operator: Any) -> tuple[bool, int | None]:
    """Return whether an operator is a product, and the position of its rate of dropout if it has one."""
    if not isinstance(operator, OpOverload) or operator_packet(operator) not in flop_registry:
        return False, None
    names = [argument.name for argument in operator_schema(operator).arguments]
    if "dropout_p" in names:
        return True, names.index("dropout_p")
    return torch.Tag.nondeterministic_seeded not in operator.tags, None


class KeptProducts:
    """The results of products that one call of a range keeps.

    Args:
        kept: Which of the range's products are kept, counted in the order of their calls.
    """

    def __init__(self, kept: Collection[int]) -> None:
        self._kept = kept
        self._results: dict[int, tuple[list[Any], list[int | None], Any]] = {}

    def keeping(self) -> _ProductMode:
        """Return the context of the first run."""
        return _ProductMode(self._kept, self._keep)

    def using(self) -> _ProductMode:
        """Return the context of a later run. What it uses is released, so that yet another one computes it again."""
        return _ProductMode(self._kept, self._use)

    def _keep(self, at: int, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = operator(*args, **kwargs)
        flat, structure = tree_flatten(out)
        aliases = [alias_below_autograd(one) if isinstance(one, Tensor) else one for one in flat]
        self._results[at] = aliases, _write_counts(aliases), structure
        return out

    def _use(self, at: int, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, counts, structure = self._results.pop(at, ([], [None], None))
        if structure is None or _write_counts(flat) != counts:
            return operator(*args, **kwargs)
        return tree_unflatten(flat, structure)


class _ProductMode(DispatchMode):
    """Counts the products that run, and hands those that are kept to a function."""

    def __init__(self, kept: Collection[int], run: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._run = run
        self._at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if not is_product(func, args, kwargs):
            return func(*args, **kwargs)
        at = self._at
        self._at += 1
        return self._run(at, func, args, kwargs) if at in self._kept else func(*args, **kwargs)


def _write_counts(flat: list[Any]) -> list[int | None]:
    return [write_count(one) if isinstance(one, Tensor) else None for one in flat]
