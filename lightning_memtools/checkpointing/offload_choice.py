"""Chooses the layers whose kept tensors may go to host memory, with what a step needs then, in bytes and in time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from lightning_memtools.checkpointing.chains import Chain
from lightning_memtools.checkpointing.memory_model import Ranges, Unit, kept_by_unit, runs_again
from lightning_memtools.checkpointing.optimal_ranges import Row
from lightning_memtools.checkpointing.step_profile import StepProfile

# A larger part of the forward pass is divided: what leaves as a whole has to come back as a whole.
_MOST_OF_FORWARD = 0.25
_LEAST_KEPT = 0.001  # of the activation memory
_EVERY = (1, 2, 3, 4)
# Half of what NVIDIA's datasheet of the A100 gives, 312e12 in half precision and 19.5e12 in float32; and three quarters
# of PCIe 4.0 x16, 32e9.
_ASSUMED_HALF, _ASSUMED_FLOAT, _ASSUMED_LINK = 156e12, 9.75e12, 24e9
_COPIED_BYTES = 32 << 20
_WIDTH = 2048


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The speed of a device, and that of copies between it and the host.

    Attributes:
        operations: Floating-point operations per second.
        n_bytes: Bytes per second, in each direction.
        is_measured: False for a machine without a GPU, where both are those of an A100 on PCIe 4.0.
    """

    operations: float
    n_bytes: float
    is_measured: bool

    @staticmethod
    def of(device: torch.device, dtype: torch.dtype) -> DeviceRates:
        """Measure a CUDA device by a matrix product in a type and a copy of 32 MiB to pinned memory and back.

        Steps do half as many operations per second as one large product. Waits for the device, of which it takes 64
        MiB. Any other device, and one that computes nothing, gets the assumed rates.
        """
        if device.type == "cuda":
            square = torch.zeros(_WIDTH, _WIDTH, dtype=dtype, device=device)
            there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
            host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
            product_s = _seconds(lambda: square @ square)
            copy_s = max(
                _seconds(lambda: host.copy_(there, non_blocking=True)),
                _seconds(lambda: there.copy_(host, non_blocking=True)),
            )
            if product_s > 0 and copy_s > 0:
                return DeviceRates(_WIDTH**3 / product_s, _COPIED_BYTES / copy_s, is_measured=True)
        return DeviceRates.assumed(dtype)

    @staticmethod
    def assumed(dtype: torch.dtype) -> DeviceRates:
        """Return the rates of an A100 on PCIe 4.0."""
        operations = _ASSUMED_HALF if dtype.itemsize <= 2 else _ASSUMED_FLOAT  # noqa: PLR2004, bytes of half a float
        return DeviceRates(operations, _ASSUMED_LINK, is_measured=False)

    def __str__(self) -> str:
        known = "measured" if self.is_measured else "assumed: an A100 on PCIe 4.0, no GPU has confirmed it"
        return f"{self.operations / 1e12:.1f}e12 operations and {self.n_bytes / 1e9:.1f} GB per second, {known}"


@dataclass(frozen=True, slots=True)
class OffloadedLayer:
    """A layer whose kept tensors may go to host memory.

    Attributes:
        start: Its first unit.
        stop: The index after its last unit.
        place: The indices of its chain and of it in that one.
        n_bytes: What it keeps for backward.
        input_bytes: What it keeps if it is recomputed.
        may_run_again: Whether it may be recomputed as well.
    """

    start: int
    stop: int
    place: tuple[int, int]
    n_bytes: int
    input_bytes: int
    may_run_again: bool


def offloadable(profile: StepProfile, chains: Sequence[Chain], rows: Sequence[Row]) -> list[OffloadedLayer]:
    """Return the largest layers of at most a quarter of the forward pass, in its order, none inside another."""
    units = profile.units
    forward = sum(unit.operations for unit in units)
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for place, span in profile.spans.items():
        chain = chains[place[0]]
        why_not = chain.outside.get(place[1], "")
        if not chain.forced and not (why_not and (chain.is_module or why_not in {"excluded", "compiled"})):
            places.setdefault(span, place)

    def is_small(span: tuple[int, int]) -> bool:
        if sum(unit.operations for unit in units[span[0] : span[1]]) <= _MOST_OF_FORWARD * forward:
            return True
        return not any(span[0] <= one[0] and one[1] <= span[1] and one != span for one in places)

    pairs = {pair for row in rows for pair in itertools.pairwise(row)}
    found: list[OffloadedLayer] = []
    for start, stop in sorted(filter(is_small, places), key=lambda span: (span[0], -span[1])):
        if found and start < found[-1].stop:
            continue
        kept, before = _kept(units[start:stop])[-1], units[start].in_kept
        if kept > _LEAST_KEPT * profile.plain.activation_bytes:
            again = (start, stop) in pairs and units[start].may_start
            found.append(OffloadedLayer(start, stop, places[start, stop], kept, before, again))
    return found


def free_host_bytes(trainer: Any) -> float:
    """Return a quarter of the host memory that is free, divided by the processes of a Trainer on this machine."""
    return psutil.virtual_memory().available / 4 / (1 if trainer is None else trainer.num_devices)


def choices(layers: Sequence[OffloadedLayer], host_bytes: float) -> Iterator[tuple[OffloadedLayer, ...]]:
    """Yield sets of layers that the host has room for: all, every second, every third and every fourth.

    The last layer of a set frees no memory: a layer's memory is freed when the next one of the set has run.
    """
    for every in _EVERY:
        taken = tuple(layers[::every])
        # Pinned memory comes in powers of two.
        if len(taken) > 1 and sum(_power_of_two(one.n_bytes) for one in taken) <= host_bytes:
            yield taken


def units_with_offload(units: Sequence[Unit], layers: Sequence[OffloadedLayer], *, again: bool = False) -> list[Unit]:
    """Return units of which some layers keep nothing on the device.

    While one of these runs, what the one before it kept is still there; in its backward pass, that of the one before it
    is there again. With `again` they are recomputed too, and only their inputs leave.
    """
    changed = list(units)
    last = 0
    for one in layers[:-1]:
        kept = _kept(units[one.start : one.stop])
        left = one.input_bytes if again else one.n_bytes
        for at, sofar in zip(range(one.start, one.stop), kept, strict=True):
            unit = units[at]
            inside = sofar - unit.own_bytes
            changed[at] = replace(
                unit,
                own_bytes=0,
                in_kept=0,
                out_kept=0,
                out_held=False,
                pinned=True,
                forward_bytes=unit.forward_bytes + last + (0 if again else max(inside, 0)),
                backward_peak=None if unit.backward_peak is None else unit.backward_peak + sofar + last,
            )
        last = left
    return changed


def rows_without(rows: Sequence[Row], layers: Sequence[OffloadedLayer]) -> list[Row]:
    """Return the rows, split wherever they cross one of the layers."""
    found: set[Row] = set()
    for row in rows:
        run = [row[0]]
        for before, after in itertools.pairwise(row):
            if any(one.start < after and before < one.stop for one in layers):
                found.add(tuple(run))
                run = [after]
            else:
                run.append(after)
        found.add(tuple(run))
    return sorted(one for one in found if len(one) > 1)


def waiting_seconds(
    units: Sequence[Unit],
    ranges: Ranges,
    layers: Sequence[OffloadedLayer],
    rates: DeviceRates,
    *,
    again: bool = False,
) -> float:
    """Return how long a step waits for copies, where operations run at the device's rate.

    A backward pass takes twice the operations of its forward pass. What a layer kept leaves when it has run, one layer
    after the other; the next layer of the set waits for it when it has run. It comes back when the backward pass of the
    next layer of the set begins.
    """
    times = [1] * len(units)
    for at in runs_again(ranges):
        times[at] += 1
    ends = {one.stop - 1: at for at, one in enumerate(layers)}
    plain = sum((2 + n) * unit.operations for n, unit in zip(times, units, strict=True)) / rates.operations
    copy_s = [(one.input_bytes if again else one.n_bytes) / rates.n_bytes for one in layers]
    now = left = 0.0
    for at, unit in enumerate(units):
        now += unit.operations / rates.operations
        if at in ends:
            now = max(now, left)
            left = max(left, now) + copy_s[ends[at]]
    back = [0.0] * len(layers)  # the last one never left
    for at in range(len(units) - 1, -1, -1):
        if at in ends:
            now = max(now, back[ends[at]])
            if ends[at]:
                back[ends[at] - 1] = max(back[ends[at]], now) + copy_s[ends[at] - 1]
        now += (1 + times[at]) * units[at].operations / rates.operations
    return max(now - plain, 0.0)


def _kept(units: Sequence[Unit]) -> list[int]:
    """Return the bytes that are kept once each unit has run, the first one's input included."""
    return list(itertools.accumulate(kept_by_unit(units, (), input_held=False)))


def _power_of_two(n_bytes: int) -> int:
    return 1 << max(n_bytes - 1, 0).bit_length()


def _seconds(run: Callable[[], Any]) -> float:
    """Return the time that the device takes for something, the second time."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
