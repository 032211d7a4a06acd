"""The convolutions that ran in a dry run, and the workspaces that a real cuDNN would have taken for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lightning_memtools.memory.allocator import replay
from lightning_memtools.memory.allocator.memory_snapshot import config_of, trace_until
from lightning_memtools.memory.convolution_workspaces import ConvolutionShape, Operation
from lightning_memtools.memory.sizes import GpuShape


@dataclass(frozen=True, slots=True)
class RecordedConvolution:
    """One convolution.

    Attributes:
        result: The address of what it made.
        operation: Forward, or one of the gradients.
        shape: Its sizes; None for one with groups, whose workspaces are not known.
    """

    result: int
    operation: Operation
    shape: ConvolutionShape | None

    @classmethod
    def read(cls, line: str) -> tuple[int, Self]:
        """Return the device and the convolution of a line that the stub of cuDNN wrote (null_cuda/sources/cudnn.c)."""
        device, operation, result, element_size, is_last, groups, *sizes = line.split()
        source, weight, out = (tuple(map(int, one.split(","))) for one in sizes)
        shape = ConvolutionShape(
            source=source, out=out, kernel=weight[2:], element_size=int(element_size), channels_last=is_last == "1"
        )
        known: Operation = operation.replace("-", " ")  # type: ignore[assignment]
        return int(device), cls(int(result), known, shape if groups == "1" else None)


def convolutions_in(record: Path, device: int) -> Iterator[RecordedConvolution]:
    """Yield the convolutions of a device from the file that they were written to, in their order."""
    if record.exists():
        for line in record.read_text(encoding="ascii").splitlines():
            where, one = RecordedConvolution.read(line)
            if where == device:
                yield one


def growth_with_workspaces(
    snapshot: dict[str, Any], device: int, convolutions: Iterable[RecordedConvolution], gpu: GpuShape
) -> int:
    """Return by how much the peak of reserved memory grows when each convolution takes its workspace for a moment.

    A convolution runs right after its result was allocated, so the workspaces are put there into the history.
    """
    entries: list[dict[str, Any]] = snapshot["device_traces"][device]
    sizes = workspaces_after(entries, convolutions, gpu)
    if not sizes:
        return 0
    longer = [one for at, entry in enumerate(entries) for one in (entry, *_passing(entry, sizes.get(at, ())))]
    before, after = (_peak_reserved(snapshot, history, device) for history in (entries, longer))
    return max(0, after - before)


def _passing(entry: dict[str, Any], sizes: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield the entries of blocks that are freed at once, one after the other."""
    for n_bytes in sizes:
        block = entry | {"addr": 0, "size": n_bytes}
        yield from (block | {"action": "alloc"}, block | {"action": "free_completed"})


def workspaces_after(
    entries: list[dict[str, Any]], convolutions: Iterable[RecordedConvolution], gpu: GpuShape
) -> dict[int, list[int]]:
    """Return the bytes of the workspaces, by the number of the history's entry that they follow."""
    places: dict[int, list[int]] = {}
    for at, entry in enumerate(entries):
        if entry["action"] == "alloc":
            places.setdefault(entry["addr"], []).append(at)
    sizes: dict[int, list[int]] = {}
    last = -1
    for one in convolutions:
        known = places.get(one.result, [])
        following = bisect_right(known, last)
        # The second part of a batch that torch splits is written into the result of the first.
        last = known[following] if following < len(known) else last
        n_bytes = 0 if one.shape is None else one.shape.workspace(one.operation, gpu)
        if n_bytes and last >= 0:
            sizes.setdefault(last, []).append(n_bytes)
    return sizes


def _peak_reserved(snapshot: dict[str, Any], entries: list[dict[str, Any]], device: int) -> int:
    histories = {**dict(enumerate(snapshot["device_traces"])), device: entries}
    trace = trace_until(
        snapshot | {"device_traces": histories},
        config_of(snapshot),
        capacity=None,
        used_by_others=0,
        until=entries[-1]["time_us"] + 1,
        device=device,
    )
    return replay(trace).stats.peak_reserved or 0
