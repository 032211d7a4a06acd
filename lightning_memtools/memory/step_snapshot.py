"""A memory snapshot of one training step, in which phases, modules and the owners of blocks are marked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memtools._torch import label_cuda_memory
from lightning_memtools.memory.history_recording import HistoryRecording, record
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.owned import CATEGORIES_OF_OWNERS, KnowsItsTensors, cuda_address
from lightning_memtools.memory.peak_holders import block_owners
from lightning_memtools.memory.readers import CudaReader
from lightning_memtools.memory.stats import MemoryReader

MARKS = "memtools"
"""The key under which a snapshot has its marks; torch's viewer ignores it."""


class StepSnapshot:
    """Records the allocator's history during one training step, from `begin` to `end`.

    On a GPU every allocation is labelled "<phase> | <module>", which torch writes into the snapshot as "user_metadata".
    During forward, <module> is the innermost running module; during backward, the module whose backward began last.
    A VirtualDevice (a simulated device) adds such labels by itself.
    """

    def __init__(
        self, recording: HistoryRecording, reader: MemoryReader, model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        self._recording = recording
        self._reader = reader
        self._model = model
        self._optimizers = optimizers
        self._batch: Any = None
        self._phases: list[tuple[int, str]] = []
        self._owned: list[tuple[int, dict[str, dict[int, str]]]] = []
        self._labels: ModuleLabels | None = None

    @classmethod
    def begin(
        cls, reader: MemoryReader | None, model: nn.Module, optimizers: Sequence[Optimizer], batch: Any
    ) -> Self | None:
        """Start recording a step, and return the recorder; return None if the device keeps no history."""
        recording = record(reader)
        if reader is None or recording is None:
            return None
        snapshot = cls(recording, reader, model, optimizers)
        snapshot._batch = batch
        if isinstance(reader, CudaReader):
            snapshot._labels = ModuleLabels(model)
        return snapshot

    def mark(self, phase: str) -> None:
        """Record that a phase of the step, such as "backward", begins now."""
        now = self._recording.now()
        self._phases.append((now, phase))
        self._owned.append((now, self._addresses()))
        if self._labels is not None:
            self._labels.enter_phase(phase)

    def end(self, *, step: int, rank: int) -> dict[str, Any]:
        """Stop recording, and return the snapshot as a dict that includes step, rank, phases and owners of blocks."""
        self._owned.append((self._recording.now(), self._addresses()))
        snapshot = self._recording.take()
        self.stop()
        device = self._reader.index if isinstance(self._reader, CudaReader) else 0
        if self._phases:
            # Somebody else may have recorded for longer.
            begin, traces = self._phases[0][0], snapshot["device_traces"]
            traces[device] = [entry for entry in traces[device] if entry["time_us"] >= begin]
        snapshot[MARKS] = {
            "step": step,
            "rank": rank,
            "device": device,
            "name": self._reader.name,
            "phases": self._phases,
            "owned": self._owned,
        }
        return snapshot

    def stop(self) -> None:
        """Stop recording, and remove the hooks that were added to the model. Idempotent."""
        self._recording.stop()
        if self._labels is not None:
            self._labels.remove()
        self._labels = self._batch = None

    def _addresses(self) -> dict[str, dict[int, str]]:
        """Return, for each category such as "parameters", a dict from block addresses to the names of tensors."""
        address_of = self._reader.address_of if isinstance(self._reader, KnowsItsTensors) else cuda_address
        named: dict[str, dict[int, str]] = {category: {} for category in CATEGORIES_OF_OWNERS}
        owners = block_owners(self._model, self._optimizers, self._batch, address_of=address_of)
        for address, owner in owners.items():
            named[owner.category][address] = owner.name
        return named


class ModuleLabels:
    """Labels each allocation on CUDA with the running phase and module, using hooks on all modules."""

    def __init__(self, model: nn.Module) -> None:
        self._phase = ""
        self._stack: list[str] = []
        self._hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            label = name or type(model).__name__
            self._hooks += [
                module.register_forward_pre_hook(partial(self._enter, label)),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def enter_phase(self, phase: str) -> None:
        """Label allocations with `phase` from now on, and with no module until a module is called."""
        self._phase = phase
        self._stack.clear()
        self._write("")

    def remove(self) -> None:
        """Remove the hooks from the modules, and clear the current label."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        label_cuda_memory("")

    def _write(self, module: str) -> None:
        label_cuda_memory(f"{self._phase} | {module}" if module else self._phase)

    def _enter(self, label: str, *_: Any) -> None:
        self._stack.append(label)
        self._write(label)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        label = self._stack.pop() if self._stack else ""
        if self._phase == "forward":
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(partial(self._enter_backward, label))  # type: ignore[no-untyped-call]
        self._write(self._stack[-1] if self._stack else "")

    def _enter_backward(self, label: str, _gradient: Tensor) -> None:
        if self._hooks:
            self._write(label)
