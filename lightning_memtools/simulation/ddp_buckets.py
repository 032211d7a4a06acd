"""The buckets in which DistributedDataParallel sums gradients over ranks, as its reducer allocates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memtools._torch import uncompiled

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is small, so that the first sum starts early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""
_BROADCAST_BYTES = 250 * 2**20
_NO_LIMIT = 2**62

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """Settings of DDP's buckets.

    Attributes:
        bucket_mb: The size of a bucket in MiB.
        as_view: Gradients are views of the buckets, not copied into them.
        are_rebuilt: DDP begins with one bucket and makes those of this size in the second forward, in the order in
            which the first backward produced gradients. It does so unless it looks for unused parameters.
        starts_small: The first bucket has 1 MiB, as it has unless DDP is given a size.
    """

    bucket_mb: float
    as_view: bool = False
    are_rebuilt: bool = True
    starts_small: bool = True

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return the settings of a DistributedDataParallel; None for any other module."""
        if not isinstance(model, DistributedDataParallel):
            return None
        return cls(
            bucket_mb=model.bucket_bytes_cap / 2**20,
            as_view=model.gradient_as_bucket_view,
            are_rebuilt=model.static_graph or not model.find_unused_parameters,
            starts_small=model.bucket_bytes_cap_default,
        )


class Buckets:
    """Allocates one rank's buckets from DDP's constructor on, as torch/csrc/distributed/c10d/reducer.cpp does.

    Before that, the constructor sends the model's state to the other ranks in pieces, two of them at a time
    (broadcast_coalesced in comm.cpp).

    With ``as_view`` a gradient is copied into its bucket once it is complete (mark_variable_ready_dense), so it exists
    twice for a moment. When buckets are rebuilt it is copied again, so old and new buckets exist for a moment. Torch
    2.11 and 2.13 do the same: tests/estimate/test_buckets.py compares.

    Args:
        model: The module that DDP wraps.
        settings: The settings of the buckets.
        count: Called with every bucket that is made.
        on_host: Count the tensors that DDP keeps in host memory too. A run on the CPU does not tell them apart.
    """

    def __init__(
        self, model: nn.Module, settings: BucketSettings, *, count: Callable[[torch.Tensor], object], on_host: bool
    ) -> None:
        self._settings = settings
        self._count = count
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        _broadcast([*model.parameters(), *model.buffers()])
        self._buckets: list[torch.Tensor] = []
        self._places: dict[int, torch.Tensor] = {}
        self._came: dict[int, nn.Parameter] = {}
        self._to_rebuild = settings.are_rebuilt
        self._syncs = True
        cap = int(settings.bucket_mb * 2**20)
        self._limits = (min(FIRST_BUCKET_BYTES, cap) if settings.starts_small else cap, cap)
        self._make(reversed(self._trained), (_NO_LIMIT,) if settings.are_rebuilt else self._limits)
        n_notes = 0 if settings.are_rebuilt else 1 + on_host
        self._notes = [torch.empty(len(self._trained), dtype=torch.int32) for _ in range(n_notes)]
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def begin_forward(self, *, syncs: bool) -> None:
        """Rebuild the buckets where DDP does so: at the start of the second forward pass.

        Args:
            syncs: The backward of this pass sums gradients over ranks. With accumulated batches only the last does.
        """
        self._syncs = syncs
        if self._to_rebuild and self._came:
            self._to_rebuild = False
            came = {**self._came, **{id(parameter): parameter for parameter in self._trained}}
            self._make(came.values(), self._limits)
            if self._settings.as_view:
                for parameter in self._trained:
                    self._move(parameter)

    def _make(self, parameters: Iterable[nn.Parameter], limits: Sequence[int]) -> None:
        self._buckets.clear()
        self._places.clear()
        for group in assigned(parameters, limits):
            bucket = torch.empty(sum(parameter.numel() for parameter in group), dtype=group[0].dtype)
            self._count(bucket)
            self._buckets.append(bucket)
            offset = 0
            for parameter in group:
                self._places[id(parameter)] = bucket.as_strided(parameter.shape, parameter.stride(), offset)
                offset += parameter.numel()

    def _take(self, parameter: nn.Parameter) -> None:
        if self._syncs:
            self._came.setdefault(id(parameter), parameter)
            if self._settings.as_view:
                self._move(parameter)

    def _move(self, parameter: nn.Parameter) -> None:
        place = self._places[id(parameter)]
        if parameter.grad is not None and parameter.grad is not place:
            parameter.grad = place.copy_(parameter.grad)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile's wrapper; any other module itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else uncompiled(model)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def _broadcast(tensors: Iterable[torch.Tensor]) -> None:
    under_way: list[torch.Tensor] = []
    for group in assigned(tensors, (_BROADCAST_BYTES,)):
        # DDP waits for a piece only after it has sent the next one, so two of them exist at a time.
        under_way[:] = [torch.empty(sum(tensor.numel() for tensor in group), dtype=group[0].dtype)]


def assigned(tensors: Iterable[_Tensor], limits: Sequence[int]) -> list[list[_Tensor]]:
    """Return the tensors of every bucket.

    Tensors go into buckets in their order; each bucket holds one dtype and is closed once it has reached its size. This
    is the rule of compute_bucket_assignment_by_size in reducer.cpp.

    Args:
        tensors: The tensors; for gradients, the parameters in the order in which gradients are expected.
        limits: The size in bytes of each dtype's first bucket, of its second, and so on; the last holds for all others.
    """
    opened: dict[torch.dtype, list[_Tensor]] = {}
    n_closed: Counter[torch.dtype] = Counter()
    closed: list[list[_Tensor]] = []
    for tensor in tensors:
        kind = tensor.dtype
        group = opened.setdefault(kind, [])
        group.append(tensor)
        if sum(one.numel() * one.element_size() for one in group) >= limits[min(n_closed[kind], len(limits) - 1)]:
            closed.append(opened.pop(kind))
            n_closed[kind] += 1
    return [*closed, *opened.values()]
