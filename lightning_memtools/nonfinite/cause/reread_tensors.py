"""Compares the tensors that a step reads in two reruns: those that are proved to be as the step found them.

A step that was bad and is finite when it is run again is a sign of failing hardware only where they all are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import DispatchMode, tree_leaves, written_arguments
from lightning_memtools.memory.fingerprints import fingerprint
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.user_code import CodeLine, line_on_stack
from lightning_memtools.nonfinite import step_rerun
from lightning_memtools.nonfinite.cause.bad_value_roots import PriorTensors, ValueOrigin
from lightning_memtools.nonfinite.cause.operation_trace import StorageKeys
from lightning_memtools.nonfinite.step_rerun import StepRerun


@dataclass(frozen=True, slots=True)
class _Read:
    """A tensor that an operation read and that no operation before it made: its memory, reader and digest."""

    key: int
    tensor: Tensor
    place: CodeLine | None
    digest: int


class _TensorReads(DispatchMode):
    """Takes a digest of each tensor that a step reads and has not made, and notes which of them it writes."""

    def __init__(self, memory: StorageKeys) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[_Read] = []
        self.written: set[int | None] = set()
        self._memory = memory
        self._known: set[int | None] = {None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in tree_leaves((args, kwargs)):
            key = self._memory.key(each) if isinstance(each, Tensor) else None
            if key is not None and key not in self._known:
                self._known.add(key)
                place = line_on_stack(stop_at=frozenset({step_rerun.__file__}))
                self.reads.append(_Read(key, each, place, int(fingerprint(each))))
        self.written.update(map(self._memory.key, tensors_in(written_arguments(func, args, kwargs))))
        out = func(*args, **kwargs)
        self._known.update(map(self._memory.key, tensors_in(out)))
        return out


@dataclass(frozen=True, slots=True)
class RereadTensors:
    """The tensors that a step reads, compared in two reruns.

    Attributes:
        n_same: The number of those that are proved to be as the step found them.
        others: The names of those that may have been others then.
        is_finite: Whether both reruns were finite.
    """

    n_same: int
    others: tuple[str, ...]
    is_finite: bool


def tensors_read_again(rerun: StepRerun, same: Sequence[Tensor], restored: Collection[str] = ()) -> RereadTensors:
    """Run the step twice, and compare digests of every tensor that it reads.

    Args:
        rerun: The step, entered.
        same: Tensors that are neither weights, buffers nor of the batch, and are known to be as they were.
        restored: The names of the parameters and attributes that forward passes write and that were put back.
    """
    memory = StorageKeys()
    finite, readers = list[bool](), list[_TensorReads]()
    for _ in range(2):
        rerun.reset()
        prior, reader = PriorTensors(rerun, memory), _TensorReads(memory)
        readers.append(reader)
        with torch.compiler.set_stance("force_eager"):
            finite.append(rerun.run(within=reader).is_finite)
        # A tensor may be written without an operation: by NumPy, or by putting another in its place.
        reader.written |= {each.key for each in reader.reads if int(fingerprint(each.tensor)) != each.digest}
    one, other = readers
    if len(one.reads) != len(other.reads):
        return RereadTensors(0, ("the step itself, which reads other tensors in each rerun",), all(finite))
    others, proved = list[str](), {memory.key(each) for each in same}
    for first, second in zip(one.reads, other.reads, strict=True):
        leaf, is_prior = prior(first.key), first.key == second.key
        is_known = leaf.origin is not ValueOrigin.ELSEWHERE or first.key in proved
        is_put_back = leaf.origin is ValueOrigin.BUFFER or leaf.name in restored
        # What is made anew in each rerun is made of Python's numbers, which are no tensors.
        if first.digest == second.digest and not (
            is_prior and (not is_known or (first.key in one.written and not is_put_back))
        ):
            continue
        at = f" that {first.place} reads" if first.place is not None else ""
        is_named = leaf.origin is not ValueOrigin.ELSEWHERE
        others.append(leaf.name if is_named else f"a tensor of shape {tuple(first.tensor.shape)}{at}")
    return RereadTensors(len(one.reads) - len(others), tuple(dict.fromkeys(others)), all(finite))
