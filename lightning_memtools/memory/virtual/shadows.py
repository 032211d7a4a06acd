"""Runs CUDA's kernels on fake copies of an operator's real arguments: memory is CUDA's, and numbers are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_memtools._torch import FakeTensorMode, fake_copy, storage_id
from lightning_memtools.memory.virtual.ledger import VirtualLedger
from lightning_memtools.memory.virtual.storages import given_tensors, parts, storage_key


def can_be_copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all tensors among an operator's arguments are dense and on the device that the CPU stands for."""
    tensors = given_tensors(args, kwargs)
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

    def run(
        self, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Callable[[Any], None]]:
        """Call a kernel with copies; return its results, and a function that gives their memory to the real ones."""
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        fake_args = self._copied(args, copies)
        fake_kwargs = {name: self._copied(value, copies) for name, value in kwargs.items()}
        with self._mode:
            made = kernel(fake_args, fake_kwargs)
        originals = {id(copy): original for original, copy in copies.values()}

        def pass_on(out: Any) -> None:
            results = _each(out)
            for number, fake in enumerate(_each(made)):
                # What CUDA's kernel returns beside the CPU's results lives as long as the last of these.
                is_result = number < len(results)
                real = results[number] if is_result else results[-1]
                if not isinstance(fake, torch.Tensor) or not isinstance(real, torch.Tensor):
                    continue
                # CUDA's kernel may have written its result into an argument, which is the result from now on.
                for made_part, part in zip(parts(originals.get(id(fake), fake)), parts(real), strict=True):
                    storage = part.untyped_storage()
                    entry = self._ledger.find(storage_key(made_part))
                    is_known = is_result and self._ledger.find(storage_id(storage)) is not None
                    if entry is not None and not is_known:
                        self._ledger.pass_on(entry, storage)

        return made, pass_on

    # No closure: it would refer to itself, and so keep the tensors until Python collects garbage.
    def _copied(self, value: Any, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = value, fake_copy(value, self._mode)
            return copies[id(value)][1]
        return type(value)(self._copied(one, copies) for one in value) if type(value) in {list, tuple} else value


def _each(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
