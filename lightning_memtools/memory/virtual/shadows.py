"""Runs CUDA's kernels on fake copies of an operator's real arguments: memory is CUDA's, and numbers are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_memtools._torch import FakeTensorMode, fake_copy, storage_id
from lightning_memtools.memory.virtual.ledger import VirtualLedger
from lightning_memtools.memory.virtual.storages import flat, storage_key


def can_be_copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all tensors among an operator's arguments are dense and on the device that the CPU stands for."""
    tensors = [*flat(args), *flat(tuple(kwargs.values()))]
    return bool(tensors) and all(
        one.is_cpu and one.layout is torch.strided and not one.is_nested and not one.is_quantized for one in tensors
    )


class Shadows:
    """Makes fake copies of tensors, and passes the memory of fake results on to the real ones.

    Args:
        ledger: Has the storages of fake results.
    """

    def __init__(self, ledger: VirtualLedger) -> None:
        self._ledger = ledger
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None]:
        """Call a kernel with copies, and return a function that gives the memory of its results to the real ones."""
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        fake_args = self._copied(args, copies)
        fake_kwargs = {name: self._copied(value, copies) for name, value in kwargs.items()}
        with self._mode:
            made = kernel(fake_args, fake_kwargs)
        originals = {id(copy): original for original, copy in copies.values()}

        def pass_on(results: Any) -> None:
            for fake, real in zip(_each(made), _each(results), strict=False):
                if isinstance(fake, torch.Tensor) and isinstance(real, torch.Tensor):
                    # CUDA's kernel may have written its result into an argument, which is the result from now on.
                    self._pass_on(originals.get(id(fake), fake), real)

        return pass_on

    # No closure: it would refer to itself, and so keep the tensors until Python collects garbage.
    def _copied(self, value: Any, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = value, fake_copy(value, self._mode)
            return copies[id(value)][1]
        return type(value)(self._copied(one, copies) for one in value) if type(value) in {list, tuple} else value

    def _pass_on(self, holder: torch.Tensor, result: torch.Tensor) -> None:
        entry = self._ledger.find(storage_key(holder))
        storage = result.untyped_storage()
        if entry is not None and self._ledger.find(storage_id(storage)) is None:
            self._ledger.pass_on(entry, storage)


def _each(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
