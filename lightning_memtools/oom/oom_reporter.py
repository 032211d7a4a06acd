"""Makes an out-of-memory report and delivers it: to a file, the console, the error itself, and the other ranks."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_memtools._torch import free_gathered_parameters
from lightning_memtools.memory.allocator import write_snapshot
from lightning_memtools.memory.host_memory import read_host_memory
from lightning_memtools.memory.shared_memory import kills_in_container, shared_memory_use
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.memory.user_code import user_line_of
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.advice_checks import AdviceChecks
from lightning_memtools.oom.deadline import Deadline
from lightning_memtools.oom.failed_step import FailedRun, failed_step, held_memory, processes_of
from lightning_memtools.oom.failure_capture import FailureCapture
from lightning_memtools.oom.failure_facts import FailureFacts, FailureMoment
from lightning_memtools.oom.fragmentation import pinned_segments
from lightning_memtools.oom.report_page import ReportPage
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NotWritten, write_report
from lightning_memtools.reporting.ranks import with_store

# A report may take ten seconds of the processor. When this time is over, what is running may still take a backward pass
# or a plan.
CHECKS_S = 8.0


@dataclass(frozen=True, slots=True)
class OOMNotice:
    """The message of the rank that ran out of memory first.

    Attributes:
        rank: The rank.
        headline: What failed, and where.
        report: The path of its report; "" where there is none.
    """

    rank: int
    headline: str
    report: str = ""


class NoticeBoard:
    """Lets the other ranks know which one ran out of memory: they only see a closed connection.

    There is one notice for a call of the Trainer: a file beside the reports, and an entry in the process group's store.
    The file is for ranks on one machine or with a shared file system, and outlives the process that holds the store.

    Args:
        directory: The directory of the reports. Where it cannot be written to, the system's temporary directory is
            used.
        token: Distinguishes this call of the Trainer from others; the same on every rank.
    """

    def __init__(self, directory: Path | None, token: str) -> None:
        name = f".oom-{token}.json"
        self._key = f"lightning_memtools/oom/{token}"
        paths = [] if directory is None else [directory / name]
        self._paths = [*paths, Path(tempfile.gettempdir()) / name]

    def leave(self, notice: OOMNotice) -> bool:
        """Leave a notice, and return True if this rank is the first to do so."""
        for path in self._paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError:  # among them FileExistsError, where a file has the directory's name
                continue
            try:
                with path.open("x", encoding="utf-8") as file:
                    json.dump(asdict(notice), file)
            except FileExistsError:
                return False
            except OSError:
                continue
            break
        with_store(lambda store: store.set(self._key, json.dumps(asdict(notice))))
        return True

    def read(self) -> OOMNotice | None:
        """Return the notice; None if no rank has left one."""
        for path in self._paths:
            try:
                return OOMNotice(**json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue
        text = with_store(lambda store: store.get(self._key) if store.check([self._key]) else None)
        try:
            return None if text is None else OOMNotice(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class OOMReporter:
    """Reports for one call of the Trainer.

    Attributes:
        directory: The directory of the reports, or the reason why the run keeps no files.
        top: The number of modules that are listed.
        board: The notices between ranks; None with one rank.
        checks_s: The processor's seconds for all checks; None for the usual ones.
    """

    directory: Path | NotWritten
    top: int
    board: NoticeBoard | None
    checks_s: float | None = None

    def report(
        self,
        exception: BaseException,
        facts: FailureFacts,
        capture: FailureCapture,
        read_run: Callable[[], FailedRun],
    ) -> ReportPage:
        """Report that memory ran out on this rank, and return the report.

        Args:
            exception: The error; it gets the first lines of the report as a note.
            facts: The facts captured when memory ran out.
            capture: The object that captured the facts.
            read_run: Reads the facts of the run that the checks need.
        """
        page = self._page(facts, exception, capture, read_run)
        exception.add_note(page.note())
        return page

    def report_recovered(
        self, facts: FailureFacts, capture: FailureCapture, read_run: Callable[[], FailedRun], done: str
    ) -> str:
        """Return a report on memory that ran out and what was done; the run goes on, so other ranks get no notice."""
        return self._page(facts, None, capture, read_run, done=done).markdown()

    def _page(
        self,
        facts: FailureFacts,
        exception: BaseException | None,
        capture: FailureCapture,
        read_run: Callable[[], FailedRun],
        *,
        done: str = "",
    ) -> ReportPage:
        """Make the page, write it and print its first lines."""
        begin, begin_cpu = time.monotonic(), time.thread_time()
        line = None if exception is None else user_line_of(exception)
        page = ReportPage(
            facts=facts,
            error="" if exception is None else "\n".join([str(exception), *getattr(exception, "__notes__", ())]),
            done=done,
            where="" if line is None else f"{line} in {line.function}" + (f": {line.source}" if line.source else ""),
            modules=() if facts.split is None else facts.split.by_module,
            processes=processes_of(capture.device, capture.virtual, facts),
            top=self.top,
        )
        # The facts are written before anything else is tried.
        page.file = self._write(_file_name(facts.moment), page.markdown())
        path = str(page.file) if isinstance(page.file, Path) else ""
        is_first = (
            bool(done) or self.board is None or self.board.leave(OOMNotice(facts.moment.rank, page.headline, path))
        )
        snapshot = None if capture.recording is None else capture.recording.take()
        page.snapshot = _write_snapshot(page.file, snapshot, capture)
        page.pinned = () if snapshot is None else pinned_segments(snapshot, capture.device.index or 0)
        checks_s = CHECKS_S if self.checks_s is None else self.checks_s
        _check(page, capture, snapshot, read_run, Deadline(checks_s - (time.thread_time() - begin_cpu)))
        page.seconds = time.monotonic() - begin
        text = page.markdown()
        if isinstance(page.file, Path):
            write_report(page.file.parent, page.file.name, text)
        lines = page.console() if is_first else f"{page.headline} {page.file_line()}"
        print_on_console(lines, soft_wrap=True)
        return page

    def report_worker(self, exception: BaseException, death: str, moment: FailureMoment) -> str:
        """Report that a loader worker died for lack of memory, and return the report as markdown."""
        text = killed_worker_page(death, moment)
        file = self._write(_file_name(moment).replace("oom-", "oom-worker-", 1), text)
        where = f"Report: {file}" if isinstance(file, Path) else f"The report {file.reason}."
        headline = f"OOMReport: {text.splitlines()[0].removeprefix('# ')}. {where}"
        exception.add_note(headline)
        print_on_console(headline, soft_wrap=True)
        return text

    def report_other_rank(self, exception: BaseException) -> str | None:
        """Note on an error that another rank ran out of memory, if one did: this rank only saw a closed connection.

        Returns:
            The other rank's report as markdown; None if no rank ran out of memory.
        """
        notice = None if self.board is None else self.board.read()
        if notice is None:
            return None
        report = f" Report: {notice.report}" if notice.report else ""
        exception.add_note(
            f"OOMReport: this error is a consequence of rank {notice.rank} running out of memory. "
            f"{notice.headline}{report}"
        )
        try:
            return Path(notice.report).read_text(encoding="utf-8") if notice.report else notice.headline
        except OSError:
            return notice.headline

    def _write(self, name: str, text: str) -> Path | NotWritten:
        """Write a report to the directory of the reports, or else to a temporary one: it cannot be made again."""
        written = write_report(self.directory, name, text)
        if isinstance(written, Path):
            return written
        try:
            return write_report(Path(tempfile.mkdtemp(prefix="memtools-")), name, text)
        except OSError:
            return written


def _check(
    page: ReportPage,
    capture: FailureCapture,
    snapshot: dict[str, Any] | None,
    read_run: Callable[[], FailedRun],
    deadline: Deadline,
) -> None:
    """Find who holds what, run the checks of what would have helped, and add their results to the page."""
    try:
        run = read_run()
        # What the failed step had gathered goes with the step.
        run = replace(run, is_sharded=free_gathered_parameters(run.model))
        page.held = held = held_memory(run, capture, snapshot)
        checks = AdviceChecks(failed_step(run, page.facts, capture, snapshot, held), deadline)
        virtual = capture.virtual
        with virtual.suspended() if virtual is not None and VirtualDevice.current() is virtual else nullcontext():
            checks.run()
    except Exception as error:  # noqa: BLE001, the facts are worth a report without advice
        page.notes = [f"Nothing could be checked: {type(error).__name__}: {error}"]
        return
    page.actions, page.notes = checks.actions, checks.notes
    page.request, page.expandable = checks.request, checks.expandable
    if not page.modules:
        page.modules, page.modules_traced = checks.modules, True


def _write_snapshot(report: Path | NotWritten, snapshot: dict[str, Any] | None, capture: FailureCapture) -> Path | str:
    if snapshot is None:
        return "this device records none" if capture.snapshot else "it was not asked for (snapshot=False)"
    if isinstance(report, NotWritten):
        return "no file can be written"
    path = report.with_name(f"{report.stem}-snapshot.pickle")
    try:
        write_snapshot(snapshot, path)
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return f"it could not be written: {error}"
    return path


def _file_name(moment: FailureMoment) -> str:
    stage = moment.stage.replace(" ", "-")
    rank = f"-rank{moment.rank}" if moment.world_size > 1 else ""
    return f"oom-{stage}-step{moment.step}{rank}.md"


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
