"""The result of an estimate: the peak and its composition, what fits, tables and snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_memtools.estimate.batch_sizes import TracedSize, largest_batch
from lightning_memtools.memory.allocator import AllocationTrace, CachingAllocator, replay, take_snapshot, write_snapshot
from lightning_memtools.memory.peak_holders import PeakHolder
from lightning_memtools.memory.sizes import context_bytes, format_size, known_gpus, parse_capacity
from lightning_memtools.reporting.tables import Table, markdown_table, shown_as


@dataclass(frozen=True, slots=True)
class PeakPlace:
    """The point of a step at which the peak is reached.

    Attributes:
        step: The step, counted from 1; 0 before the first.
        phase: setup, inputs, forward, backward, clip or optimizer.
        module: The path of the module that allocated; in backward, of the module whose gradients are computed.
        operation: The operator that allocated, such as "aten.convolution_backward"; empty if no operator did.
    """

    step: int
    phase: str
    module: str
    operation: str

    def __str__(self) -> str:
        by = f", in {self.module}" if self.module else ""
        what = f" ({self.operation})" if self.operation else ""
        return f"step {self.step}, {self.phase}{by}{what}"


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """The memory of one module of the model.

    Attributes:
        name: Its path; empty for the model itself.
        kind: Its class.
        output_shapes: The shapes of the tensors that the module's first call returned.
        n_parameters: The number of elements in its parameters and those of its submodules, each parameter counted once.
        saved_bytes: Bytes of activations that are still allocated at the end of the last forward, and that the module
            allocated itself, not in a submodule.
        at_peak_bytes: Bytes of activations at the peak that the module allocated itself, not in a submodule.
    """

    name: str
    kind: str
    output_shapes: tuple[tuple[int, ...], ...]
    n_parameters: int
    saved_bytes: int
    at_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The predicted memory of training steps. Sizes are in bytes; nothing was measured on a GPU.

    Attributes:
        peak_allocated: The most memory that tensors take at one moment, as in torch.cuda.max_memory_allocated.
        peak_reserved: The most memory that the allocator reserves, as in torch.cuda.max_memory_reserved. The CUDA
            context, 300 to 700 MB more, is not part of it.
        peak_at: The point at which ``peak_allocated`` was reached first.
        composition: The bytes by category at the peak: parameters, gradients, optimizer, activations, inputs,
            temporaries (of backward and of the optimizer's step), workspace (of cuBLAS and other kernels) and other,
            which includes buffers. They add up to ``peak_allocated``.
        parameter_count: The number of elements in all parameters; tied parameters count once.
        gradient_count: The number of elements in the parameters that got a gradient.
        parameter_bytes: Bytes of parameters and buffers.
        modules: Every module of the model, in its order.
        holders: What holds the memory at the peak: category, module, line of code and bytes, largest first. They add
            up to ``peak_allocated``.
        trace: All requests of the steps to the allocator.
        begin: The number of events in ``trace`` before the first step, while the model is put on the device.
        batch_size: The first dimension of the batch's first tensor; None without such a tensor.
        notes: Remarks on how the estimate was made, such as a fallback.
        capacity: The capacity that was passed to `estimate_memory`, or None.
    """

    peak_allocated: int
    peak_reserved: int
    peak_at: PeakPlace
    composition: Mapping[str, int]
    parameter_count: int
    gradient_count: int
    parameter_bytes: int
    modules: tuple[ModuleMemory, ...] = field(repr=False)
    holders: tuple[PeakHolder, ...] = field(repr=False)
    trace: AllocationTrace = field(repr=False)
    begin: int = field(repr=False)
    batch_size: int | None
    notes: tuple[str, ...] = ()
    capacity: str | None = None
    _simulation: CachingAllocator = field(repr=False)
    _retrace: Callable[[int], MemoryEstimate] = field(repr=False)

    def fits(self, capacity: str) -> bool:
        """Return whether the steps fit in a capacity. If memory runs short, the allocator first empties its cache.

        Args:
            capacity: A size such as "24GiB", or a GPU's name such as "RTX 4090", whose CUDA context takes 500 MiB.

        Raises:
            ValueError: The capacity cannot be read.
        """
        usable = usable_bytes(capacity)
        # Steps that never ask the device for more than is left need no replay.
        if self.peak_reserved <= usable:
            return True
        return replay(self.trace, capacity=usable).completed

    def shortfall(self, capacity: str) -> int:
        """Return the bytes by which the peak of allocated memory exceeds a capacity; 0 if it does not."""
        return max(0, self.peak_allocated - usable_bytes(capacity))

    def max_batch_size(self, capacity: str) -> int:
        """Return a batch size n that fits although n + 1 does not; 0 if a batch of one does not fit.

        The result is predicted from traces of two batch sizes. Then n and n + 1 are traced as well, so usually three or
        four traces are made in addition to the estimate's own. Because of how the allocator splits segments, a batch
        a few samples larger than n + 1 may fit after all.

        Raises:
            ValueError: The capacity cannot be read, the batch has no tensor with a first dimension, the step fails with
                a batch of another size, or memory does not grow with the batch.
        """
        if self.batch_size is None:
            raise ValueError("The batch holds no tensor with a first dimension, so there is no batch size to change.")
        usable = usable_bytes(capacity)

        def attempt(size: int) -> TracedSize:
            if size == self.batch_size:
                return self.traced_size(capacity)
            try:
                return self._retrace(size).traced_size(capacity)
            except (IndexError, KeyError, RuntimeError, AttributeError) as error:
                raise ValueError(
                    f"The batch cannot be resized: with {size} in place of {self.batch_size} as its first dimension, "
                    f"the step fails ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Estimate batches "
                    "of several sizes that you make yourself."
                ) from error

        def serves(trace: AllocationTrace) -> bool:
            return replay(trace, capacity=usable).completed

        return largest_batch(self.batch_size, attempt=attempt, serves=serves, limit=usable)

    def traced_size(self, capacity: str) -> TracedSize:
        """Return this estimate as a TracedSize, so that `largest_batch` can use it as a trial."""
        return TracedSize(self.fits(capacity), self.peak_allocated, self.trace)

    def fitting_gpus(self) -> list[tuple[str, bool]]:
        """Return (name, whether the steps fit) for each known GPU, the smallest first."""
        gpus = sorted(known_gpus(), key=lambda gpu: (gpu.usable_bytes, gpu.name))
        return [(gpu.name, self.fits(gpu.name)) for gpu in gpus]

    def as_snapshot(self, path: str | Path) -> None:
        """Write a memory snapshot for https://pytorch.org/memory_viz, like torch.cuda.memory._dump_snapshot."""
        write_snapshot(take_snapshot(self._simulation), path)

    def summary_table(self) -> Table:
        """Return a table of the main results, such as the peaks and the number of parameters, one per row."""
        rows = [
            ("peak allocated", format_size(self.peak_allocated)),
            ("peak reserved (without the CUDA context)", format_size(self.peak_reserved)),
            *((f"at the peak: {name}", format_size(size)) for name, size in self.composition.items() if size),
            ("parameters", f"{self.parameter_count:,}"),
            ("parameters with a gradient", f"{self.gradient_count:,}"),
        ]
        return Table(("estimate (simulated)", "value"), rows)

    def module_table(self, top: int | None = None) -> Table:
        """Return one row per module: its output, its parameters, and the activations that it keeps for backward.

        Args:
            top: The number of modules to show, starting with those that keep the most; None for all, in model order.
        """
        modules = list(self.modules)
        if top is not None:
            modules = sorted(modules, key=lambda module: -module.saved_bytes)[:top]
        rows = [
            (
                module.name or "(model)",
                module.kind,
                ", ".join(str(list(shape)) for shape in module.output_shapes),
                f"{module.n_parameters:,}",
                format_size(module.saved_bytes),
            )
            for module in modules
        ]
        return Table(("module", "class", "output", "parameters", "saved for backward"), rows)

    def to_markdown(self, top: int | None = 10) -> str:
        """Return the whole estimate as markdown text and tables; `top` limits the number of modules listed."""
        parts = [
            markdown_table(self.summary_table()),
            f"The peak is reached at {self.peak_at}.",
            *([self.word_on_capacity()] if self.capacity is not None else []),
            markdown_table(self.module_table(top)),
            *(f"Note: {note}" for note in self.notes),
        ]
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.to_markdown()

    _repr_html_ = shown_as(__str__)

    def word_on_capacity(self) -> str:
        """Return a sentence that says whether the steps fit in `self.capacity`; "" if no capacity was given."""
        if self.capacity is None:
            return ""
        usable = usable_bytes(self.capacity)
        if self.fits(self.capacity):
            taken = format_size(self.peak_reserved)
            return f"It fits in {self.capacity}. It reserves {taken} of the {format_size(usable)} that are usable."
        if self.parameter_bytes > usable:
            excess = format_size(self.parameter_bytes - usable)
            return (
                f"It does not fit in {self.capacity}: the parameters and buffers alone take "
                f"{format_size(self.parameter_bytes)}, {excess} more than its {format_size(usable)}. No batch "
                "size helps: shard the model (FSDP), use a smaller precision, or a larger device."
            )
        over = self.shortfall(self.capacity)
        how = f"{format_size(over)} too little at the peak" if over else "too fragmented at the peak"
        return f"It does not fit in {self.capacity} ({format_size(usable)} usable): {how}."


def usable_bytes(capacity: str) -> int:
    """Return the bytes that the allocator can use: a size itself, or a named GPU's memory minus its CUDA context.

    Raises:
        ValueError: The text is neither a size nor the name of a known GPU.
    """
    return parse_capacity(capacity) - context_bytes(capacity)
