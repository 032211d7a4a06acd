"""A virtual device that records its history, over operators that behave as CUDA's."""

# ruff: noqa: SLF001, which storage a tensor has is private in torch

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_memtools.memory.allocator import CachingAllocator
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.mode import AccountingMode
from lightning_memtools.memory.virtual.place import OUTSIDE, Place
from lightning_memtools.simulation.cuda_ops.kernel_mode import KernelMode
from lightning_memtools.simulation.cuda_ops.kernels import KERNELS, SIZED, Kernel
from lightning_memtools.simulation.recording import Recorder, RecordingLedger


class TracedDevice(VirtualDevice):
    """A `VirtualDevice` without a limit, whose whole history is in `recorder`.

    Args:
        allocator: The allocator's settings, as in PYTORCH_ALLOC_CONF.
        cuda: Whether it stands for a GPU, or for the CPU.
        cublas_workspace: What cuBLAS takes at the first matrix product of forward, and again of backward.
        kernels: Whether operators may be replaced: by CUDA's, and where fakes have no size. On real tensors they may
            not.

    Attributes:
        recorder: The history.
    """

    def __init__(
        self, *, allocator: str = "", cuda: bool, cublas_workspace: str = "0MiB", kernels: bool = True
    ) -> None:
        super().__init__(
            allocator=allocator, cublas_workspace=cublas_workspace if cuda else "0MiB", cuda_like=cuda, record=True
        )
        self._kernels = {**SIZED, **(KERNELS if cuda else {})} if kernels else {}
        self.recorder = Recorder(self._allocator)
        self._ledger: RecordingLedger = RecordingLedger(self._allocator, self.recorder)

    @property
    def simulation(self) -> CachingAllocator:
        """The simulated allocator as the trace left it."""
        return self._allocator

    def finish(self) -> None:
        """Write down what all memory that is still held is for."""
        self._attribute()
        self._ledger.finish()

    def count_bucket(self, bucket: torch.Tensor) -> None:
        """A tensor on the device is a bucket of DDP."""
        entry = self._ledger.find(bucket.untyped_storage()._cdata)
        if entry is not None:
            self._ledger.assign(entry, Category.GRADIENT, "(DDP bucket)")

    def _new_mode(self) -> AccountingMode:
        return _TracedMode(
            self._ledger,
            self._names,
            error_of=self._out_of_memory,
            cublas_workspace=self._cublas_workspace,
            cuda_like=self._cuda_like,
            recorder=self.recorder,
            kernels=self._kernels,
        )


class _TracedMode(KernelMode):  # type: ignore[no-untyped-call]
    """Counts what operators make, and notes which operator runs."""

    def __init__(
        self, ledger: RecordingLedger, *args: Any, recorder: Recorder, kernels: dict[Any, Kernel], **options: Any
    ) -> None:
        super().__init__(ledger, *args, kernels=kernels, **options)
        self.place = _NotedPlace(ledger, recorder)
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or what CUDA has in its place."""
        self._recorder.operation = func
        return super().__torch_dispatch__(func, types, args, kwargs)

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> int:
        """A module is called."""
        depth = super().enter_module(module, args, kwargs)
        self._recorder.enter_place(self.place.scopes[-1])
        return depth


class _NotedPlace(Place):
    """A place in the program whose changes are noted."""

    def __init__(self, ledger: RecordingLedger, recorder: Recorder) -> None:
        super().__init__(ledger)
        self._recorder = recorder

    def leave_to(self, depth: int) -> None:
        """What began at this depth has ended."""
        super().leave_to(depth)
        self._recorder.enter_place(self.scopes[-1] if self.scopes else OUTSIDE)
