"""Host memory of a run: the process, its loader workers, pinned memory, and what the container or machine has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.memory.shared_memory import container_use, shared_memory_use
from lightning_memtools.memory.sizes import MIB, format_size, to_gib

# DataLoader gives its workers this name (torch/utils/data/_utils/worker.py).
_WORKER_NAME = "pt_data_worker"
# Growth below this is that of a worker's own buffers.
_LEAST_GROWTH = 64 * MIB
# Growth below this share of all that the run holds is not worth a warning.
_LEAST_SHARE = 0.1
_NEARLY_FULL = 0.9
# A worker has to be seen growing this many times: buffers and imports grow once.
_TIMES_GROWN = 3


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of one process in bytes.

    Attributes:
        pid: The process's id.
        proportional: Memory of this process alone, plus a proportional part of what it shares with others (PSS).
        unique: The memory of this process alone (USS).
    """

    pid: int
    proportional: int
    unique: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of this process and its data-loader workers, in bytes.

    Attributes:
        process: The memory of this process.
        workers: The memory of each data-loader worker.
        pinned: Pinned memory that torch holds for CUDA; None without CUDA.
        used: The part of `limit` that is in use, by all processes together.
        limit: The memory limit of the container; without one, the memory of the machine.
        in_container: Whether `limit` is the limit of a container.
        shared: The used bytes of /dev/shm; None if it does not exist.
    """

    process: ProcessMemory
    workers: tuple[ProcessMemory, ...]
    pinned: int | None
    used: int
    limit: int
    in_container: bool
    shared: int | None

    @property
    def in_workers(self) -> int:
        """The memory of all loader workers."""
        return sum(worker.proportional for worker in self.workers)

    @property
    def total(self) -> int:
        """The memory of the process and its workers together; memory that they share counts once."""
        return self.process.proportional + self.in_workers

    def scalars(self) -> dict[str, float]:
        """Return the sizes in GiB, as a dict by log tag."""
        sizes = {
            "process": self.process.proportional,
            "unique": self.process.unique,
            "workers": self.in_workers,
            "pinned": self.pinned,
            "used": self.used,
            "limit": self.limit,
            "shared": self.shared,
        }
        return {f"memory/host/{name}_gib": to_gib(size) for name, size in sizes.items() if size is not None}

    def describe(self) -> str:
        """Return one sentence that names all known sizes."""
        parts = [f"this process {format_size(self.process.proportional)}"]
        if self.workers:
            parts.append(f"{len(self.workers)} loader worker(s) {format_size(self.in_workers)}")
        if self.pinned:
            parts.append(f"pinned {format_size(self.pinned)}")
        if self.shared is not None:
            parts.append(f"shared memory {format_size(self.shared)}")
        whose = "the container's limit of" if self.in_container else "the machine's"
        return f"{', '.join(parts)}; {format_size(self.used)} of {whose} {format_size(self.limit)} are used"


def read_host_memory() -> HostMemory:
    """Read the host's memory. This takes milliseconds per GiB, because the kernel visits all pages of the processes."""
    me = psutil.Process()
    workers = [found for child in me.children() if _is_worker(child) and (found := _memory_of(child)) is not None]
    mine = _memory_of(me)
    in_container = container_use()
    machine = psutil.virtual_memory()
    shared = shared_memory_use()
    return HostMemory(
        process=mine or ProcessMemory(me.pid, me.memory_info().rss, 0),
        workers=tuple(workers),
        pinned=_pinned(),
        used=machine.total - machine.available if in_container is None else in_container[0],
        limit=machine.total if in_container is None else in_container[1],
        in_container=in_container is not None,
        shared=None if shared is None else shared[0],
    )


def _is_worker(process: psutil.Process) -> bool:
    try:
        return str(process.name()).startswith(_WORKER_NAME)
    except psutil.Error:  # it has ended
        return False


def _memory_of(process: psutil.Process) -> ProcessMemory | None:
    try:
        full = process.memory_full_info()
    except (psutil.Error, OSError):  # it has ended, or the system does not tell
        return None
    return ProcessMemory(process.pid, int(getattr(full, "pss", full.rss)), int(getattr(full, "uss", 0)))


def _pinned() -> int | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    stats = torch.cuda.host_memory_stats()
    return next((int(stats[key]) for key in ("allocated_bytes.current", "active_bytes.current") if key in stats), None)


class HostWatch:
    """Reads host memory from time to time, and warns about each problem once.

    Args:
        share: The fraction of the run's time that these readings may take.
        read: The function that reads the memory.
    """

    def __init__(self, *, share: float = 0.005, read: Callable[[], HostMemory] = read_host_memory) -> None:
        self._share = share
        self._read = read
        self._next_s = 0.0
        self._first: dict[int, int] = {}  # the unique memory of each worker when it was first seen
        self._grown: list[int] = []  # how much the workers had grown, each time that it was more
        self._highest: dict[int, int] = {}  # epoch to the highest total
        self._is_new = FirstTime()

    def look(self, *, epoch: int | None = None, warms_up: bool = False) -> tuple[HostMemory | None, list[str]]:
        """Return the host memory and a list of new warnings. The memory is None if it is too early to read it again.

        Args:
            epoch: The epoch of training; None outside of training.
            warms_up: True in the first steps of the run. Growing memory is normal there and gives no warning.
        """
        began = time.perf_counter()
        if began < self._next_s:
            return None, []
        now = self._read()
        findings = [*self._nearly_full(now), *(() if warms_up else self._growth(now, epoch))]
        warnings = [text for name, text in findings if self._is_new(name)]
        ended = time.perf_counter()
        self._next_s = ended + (ended - began) / self._share
        return now, warnings

    def _growth(self, now: HostMemory, epoch: int | None) -> Iterator[tuple[str, str]]:
        least = max(_LEAST_GROWTH, _LEAST_SHARE * now.total)
        n_workers = len(now.workers)
        begun = sum(self._first.setdefault(worker.pid, worker.unique) for worker in now.workers)
        growth = sum(worker.unique for worker in now.workers) - begun
        if growth > (self._grown[-1] if self._grown else 0):
            self._grown.append(growth)
        if growth > least and len(self._grown) >= _TIMES_GROWN:
            text = (
                f"Host memory of {n_workers} loader workers has grown by {format_size(growth)} since they started, to "
                f"{format_size(begun + growth)} that they share with nobody. Reading a Python object changes its "
                "reference count, so a worker copies the page on which it lies. Next: keep lists of objects in one "
                "NumPy array, tensor or Arrow table (pytorch/pytorch#13246), or use fewer workers."
            )
            yield "workers", text
        if epoch is not None:
            self._highest[epoch] = max(now.total, self._highest.get(epoch, 0))
            # The first epoch does what happens once; two more rises are no accident.
            *_, a, b, c = [0, 0, 0, *(size for of, size in sorted(self._highest.items()) if 0 < of < epoch)]
            if a and b - a > least / 3 and c - b > least / 3:
                text = (
                    f"Host memory of this process and its {n_workers} loader workers grows from epoch to epoch: "
                    f"{format_size(a)}, {format_size(b)}, {format_size(c)}. Something keeps what each epoch makes, "
                    "such as outputs in a list, a cache, or losses with their graphs."
                )
                yield "epochs", text

    def _nearly_full(self, now: HostMemory) -> Iterator[tuple[str, str]]:
        if now.used > _NEARLY_FULL * now.limit:
            text = (
                f"Host memory is nearly full: {now.describe()}. When it is full the kernel kills a process, often a "
                "loader worker. Next: fewer workers, a smaller prefetch_factor, pin_memory=False."
            )
            yield "full", text
