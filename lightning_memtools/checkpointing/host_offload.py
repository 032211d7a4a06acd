"""Keeps what layers save for backward in host memory, and brings it back one unit before the backward pass needs it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools._torch import FakeTensor, is_fsdp_module, write_count
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.device import host_memory
from lightning_memtools.memory.virtual.storages import storage_key

# Smaller tensors take longer to start copying than to copy.
_LEAST_BYTES = 1 << 16
# A view that is a smaller part of its memory stays: the whole would be copied for it.
_LEAST_PART = 0.25


class HostOffload:
    """Moves what the layers of one model save for backward to host memory, and back.

    On CUDA, copies from and to pinned memory run on two streams of their own, one for each direction. The memory of a
    unit's tensors is given back when the next unit has run, and the stream that computes waits for the copies there:
    nothing depends on when a copy happens to end. In backward, the first tensor that a unit needs starts the copies of
    the unit before it.

    Tensors that are in host memory already, parameters, buffers, subclasses of Tensor and what takes less than 64 KiB
    stay where they are. On a `VirtualDevice` copies are made at once.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_OffloadedUnit] | None = None
        self.streams: dict[tuple[torch.device, bool], Any] = {}

    @contextmanager
    def unit(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Keep what is saved for backward inside in host memory.

        Args:
            modules: The modules that run inside: their parameters and buffers stay where they are.
        """
        before = None if self._last is None else self._last()
        unit = _OffloadedUnit(self, list(modules), before)
        with torch.autograd.graph.saved_tensors_hooks(unit.pack, unit.unpack):
            yield
        unit.end()
        if unit.has_copies:
            self._last = weakref.ref(unit)

    def copying(self, device: torch.device, *, back: bool) -> Any:
        """Return a context in which copies in one direction run, after all work that is queued on the device now."""
        if device.type != "cuda":
            return host_memory() if device.type == "cpu" else nullcontext()
        if (device, back) not in self.streams:
            self.streams[device, back] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.streams[device, back].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self.streams[device, back])


class _Copy:
    """The memory of tensors that were saved, on the device, in host memory, or in both.

    Attributes:
        on_device: The memory on the device as a flat tensor; None while only the host has it.
        ready: The event after which `on_device` can be read, if nobody has waited for it yet.
    """

    def __init__(self, tensor: Tensor, offload: HostOffload) -> None:
        self.ready: Any = None
        self.on_device: Tensor | None = _flat(tensor)
        self._offload, self._host = offload, None
        self._made_like = self.on_device.shape, tensor.dtype, tensor.device
        # Fake tensors have no values to keep, and nothing counts what the host holds.
        self._is_fake = isinstance(tensor, FakeTensor)
        if not self._is_fake:
            with offload.copying(tensor.device, back=False):
                is_pinned = tensor.device.type == "cuda"
                self._host = torch.empty(self.on_device.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
                self._host.copy_(self.on_device, non_blocking=True)

    def bring_back(self) -> None:
        """Begin to copy it to the device, if it is not there."""
        if self.on_device is not None:
            return
        shape, dtype, device = self._made_like
        self.on_device = torch.empty(shape, dtype=dtype, device=device)
        if self._is_fake:
            return
        assert self._host is not None
        with self._offload.copying(device, back=True):
            self.on_device.copy_(self._host, non_blocking=True)
            self.ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Let the current stream wait until it is on the device."""
        if self.ready is not None:
            torch.cuda.current_stream(self._made_like[2]).wait_event(self.ready)
            self.ready = None

    def leave(self) -> None:
        """Give back the device's memory."""
        self.wait()  # a copy back may still write to it, where backward began before the next unit had run
        self.on_device = None

    def __del__(self) -> None:
        # Nobody else may be given this memory while a copy still writes to it.
        self.wait()


class _OffloadedUnit:
    """The tensors that one unit saved. Only autograd's graph holds it, through what `pack` returned.

    Attributes:
        copies: The copies, by the identity of the memory and the number of times that it had been written.
    """

    def __init__(self, offload: HostOffload, modules: list[nn.Module], before: _OffloadedUnit | None) -> None:
        self._offload, self._modules = offload, modules
        self._before = None if before is None else weakref.ref(before)
        self.copies: dict[tuple[int, int], weakref.ref[_Copy]] = {}
        self._copied: dict[torch.device, Any] = {}
        self._own = _storages_of(modules)
        self._gathers = any(is_fsdp_module(part) for module in modules for part in module.modules())
        self._is_on_its_way = False

    @property
    def has_copies(self) -> bool:
        """True if anything was copied."""
        return bool(self.copies)

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps of a tensor: the tensor, or its copy with type, shape, strides and offset."""
        with torch.no_grad():
            found = self._copy_of(tensor) if self._may_leave(tensor) else None
        if found is None:
            return tensor
        return self, found, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        """Return a tensor that was saved."""
        if isinstance(kept, Tensor):
            return kept
        _, copy, dtype, size, stride, offset = kept
        before = None if self._before is None else self._before()
        with torch.no_grad():
            self.bring_back()
            if before is not None:
                before.bring_back()
            copy.bring_back()  # where a graph is gone through again, the rest may be gone
            copy.wait()
            tensor: Tensor = copy.on_device.view(dtype).as_strided(size, stride, offset)
            return tensor

    def end(self) -> None:
        """Note that the unit has run; give back the memory of the unit before it."""
        self._modules, self._own = [], set()
        streams = self._offload.streams.items()
        self._copied = {device: stream.record_event() for (device, back), stream in streams if not back}
        before = None if self._before is None else self._before()
        if before is not None:
            before.leave()

    def leave(self) -> None:
        """Give back the device's memory once it is copied."""
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)
        for copy in filter(None, (one() for one in self.copies.values())):
            copy.leave()

    def bring_back(self) -> None:
        """Begin to copy what it saved to the device, once."""
        if not self._is_on_its_way:
            self._is_on_its_way = True
            for copy in filter(None, (one() for one in self.copies.values())):
                copy.bring_back()

    def _may_leave(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) in {Tensor, FakeTensor} and tensor.layout is torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return False
        least = max(_LEAST_BYTES, _LEAST_PART * tensor.untyped_storage().nbytes())
        if tensor.nbytes < least or not _is_on_device(tensor):
            return False
        own = _storages_of(self._modules) if self._gathers else self._own
        return storage_key(tensor) not in own

    def _copy_of(self, tensor: Tensor) -> _Copy:
        """Return the copy of a tensor's memory: the one that there is, or a new one."""
        key = storage_key(tensor), write_count(tensor)
        before = None if self._before is None else self._before()
        # What one unit returns, the next one is given: both keep it.
        known = self.copies.get(key) or (None if before is None else before.copies.get(key))
        copy = None if known is None else known()
        if copy is None or copy.on_device is None:  # once it left, other memory may have the same identity
            copy = _Copy(tensor.detach(), self._offload)
        self.copies[key] = weakref.ref(copy)
        return copy


def _flat(tensor: Tensor) -> Tensor:
    """Return all memory that a tensor is a view of, as a tensor of one dimension."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _is_on_device(tensor: Tensor) -> bool:
    """Return whether a tensor takes memory of a GPU, or of one that is simulated."""
    device = VirtualDevice.current()
    return tensor.is_cuda or (device is not None and device.holds(tensor))


def _storages_of(modules: Iterable[nn.Module]) -> set[int]:
    return {
        storage_key(one)
        for module in modules
        for one in (*module.parameters(), *module.buffers())
        if one.layout is torch.strided
    }
