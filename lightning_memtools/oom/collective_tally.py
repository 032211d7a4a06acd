"""Counts the collectives of a step that fails, so that a stand-in of it can take part in those that are left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import finished_work, in_backward, replaced_collectives
from lightning_memtools.memory.nested_tensors import tensors_in

# Its name, and the number of elements that it takes and gives.
Collective = tuple[str, int]


class CollectivesDifferError(Exception):
    """A stand-in of a step starts other collectives than the step that failed."""


class CollectiveTally:
    """The collectives of one attempt at a step, which other ranks take part in.

    Those of other threads, such as one that saves a checkpoint, are not counted.

    Attributes:
        unclear: The collective in which the attempt ended, so that other ranks may have it or not; "" if none.
        done: The collectives that were run.
    """

    def __init__(self) -> None:
        self.unclear = ""
        self.done: list[Collective] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within, collectives run as ever, and are counted."""

        def collective(name: str, run: Callable[[], Any], tensors: tuple[Any, ...]) -> Any:
            self.unclear = name
            work = run()
            self.unclear = ""
            self.done.append((name, _n_elements(tensors)))
            return work

        with _watched(collective):
            yield

    @contextmanager
    def continued(self, usual: AbstractSet[Collective] = frozenset()) -> Iterator[None]:
        """Within, collectives that were counted are left out, and of the others the gradients sent are 0.

        Args:
            usual: Those of steps that did not fail: other ranks run the like.

        Raises:
            CollectivesDifferError: One has another name than that in its place was counted with, or a size that those
                of its name never had, because it depends on the number of samples.
        """
        waiting = iter(self.done)

        def collective(name: str, run: Callable[[], Any], tensors: tuple[Any, ...]) -> Any:
            counted = next(waiting, None)
            if counted is None:
                sizes = [size for other, size in usual if other == name]
                if sizes and (size := _n_elements(tensors)) not in sizes:
                    raise CollectivesDifferError(f"{name} of {size:,} numbers instead of at most {max(sizes):,}")
                if _is_reduction(name):
                    _zero(tensors[1])
                return run()
            if counted[0] != name:
                raise CollectivesDifferError(f"{name} instead of {counted[0]}")
            return _leave_out(name, run, tensors)

        with _watched(collective):
            yield


@contextmanager
def left_out() -> Iterator[None]:
    """Within, no collective is run. What is left out leaves numbers that can be computed with. They serve nothing."""
    with _watched(_leave_out):
        yield


def _leave_out(name: str, _run: Callable[[], Any], tensors: tuple[Any, ...]) -> Any:
    if _is_reduction(name):
        _zero(tensors[0])
    elif isinstance(tensors[0], Tensor) and len(tensors) > 1 and isinstance(tensors[1], Tensor):
        output, own = tensors[0], tensors[1]
        if output.numel() % max(1, own.numel()) == 0:  # gathered: this rank's own shard in the place of each
            output.view(-1, own.numel()).copy_(own.reshape(1, -1).clone())  # it is a view of the output
    return finished_work(list(tensors_in(tensors[0])))


def _n_elements(tensors: tuple[Any, ...]) -> int:
    return sum(tensor.numel() for tensor in tensors_in(tensors))


def _is_reduction(name: str) -> bool:
    return "reduce_scatter" in name


@contextmanager
def _watched(collective: Callable[[str, Callable[[], Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    thread = threading.get_ident()

    def replacement(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(group: Any, *arguments: Any, **options: Any) -> Any:
            def run() -> Any:
                return original(group, *arguments, **options)

            # On a GPU, backward runs in a thread of its own.
            if threading.get_ident() != thread and not in_backward():
                return run()
            return collective(name, run, (*arguments, None, None))

        return watched

    with replaced_collectives(replacement):
        yield


@torch.no_grad()
def _zero(tensors: Any) -> None:
    for tensor in tensors_in(tensors):
        tensor.zero_()
