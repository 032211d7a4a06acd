"""The report on a loader worker that died for lack of host memory or of shared memory."""

from __future__ import annotations

from lightning_memtools.memory.host_memory import read_host_memory
from lightning_memtools.memory.shared_memory import kills_in_container, shared_memory_use
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.oom.failure_facts import FailureMoment


def killed_worker_page(text: str, moment: FailureMoment) -> str:
    """Return the report as markdown, its first line a headline.

    Args:
        text: The words with which DataLoader tells of the worker's end.
        moment: The place in the run.
    """
    in_shared_memory = "Bus error" in text
    where = "the shared memory of loader workers (/dev/shm)" if in_shared_memory else "host memory"
    signal = "Bus error (SIGBUS)" if in_shared_memory else "Killed (SIGKILL)"
    return "\n".join((
        f"# A loader worker died: {where} ran out",
        "",
        f"A worker of a DataLoader ended with {signal} ({moment}). The memory of the GPU is not the cause.",
        "",
        "## What was found",
        *(f"- {line}" for line in _evidence(in_shared_memory=in_shared_memory)),
        "",
        "## What to do",
        *(f"{n}. {line}" for n, line in enumerate(_actions(in_shared_memory=in_shared_memory), 1)),
        "",
        "## The error",
        *(f"> {line}" for line in text.splitlines()),  # which wraps, as a block of code does not
        "",
    ))  # fmt: skip


def _evidence(*, in_shared_memory: bool) -> list[str]:
    # The worker's memory is free again by now, so this is what was left beside it.
    lines = [f"Host memory now, after the worker's end: {read_host_memory().describe()}."]
    shared = shared_memory_use()
    if in_shared_memory and shared is not None:
        lines.append(
            f"Shared memory (/dev/shm) has {format_size(shared[1])}, of which {format_size(shared[0])} are used now."
        )
    kills = kills_in_container()
    if not in_shared_memory and kills is not None:
        found = f"{kills} processes" if kills else "no process"
        otherwise = "" if kills else ", so that something else sent the signal"
        lines.append(f"Since this container began, the kernel has killed {found} in it for lack of memory{otherwise}.")
    return lines


def _actions(*, in_shared_memory: bool) -> list[str]:
    fewer = "Use fewer workers (`num_workers`) or a smaller `prefetch_factor`, so that fewer batches wait at a time."
    if in_shared_memory:
        return [
            "Make /dev/shm larger: `docker run --shm-size=8g`, `--ipc=host`, or in Kubernetes an emptyDir.",
            fewer,
            'Pass batches through files: `torch.multiprocessing.set_sharing_strategy("file_system")`.',
        ]
    return [
        fewer,
        "Keep the data in one NumPy array, tensor or Arrow table: workers come to hold copies of Python objects.",
        "Raise the memory limit of the container.",
    ]
