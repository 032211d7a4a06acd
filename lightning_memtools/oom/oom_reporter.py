"""Makes an out-of-memory report, and delivers it: to a file, the console, and the error itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from lightning_memtools._torch import free_gathered_parameters
from lightning_memtools.memory.allocator import write_snapshot
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.leaks.holder_search import names_of_run
from lightning_memtools.memory.leaks.holdings import Holdings, find_holdings
from lightning_memtools.memory.memory_releaser import free_failed_backward
from lightning_memtools.memory.owned import KnowsItsTensors, cuda_address
from lightning_memtools.memory.release_failed_step import uncounted
from lightning_memtools.memory.user_code import user_line_of
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.advice_checks import advice_for
from lightning_memtools.oom.failed_step import FailedRun, failed_step, processes_of
from lightning_memtools.oom.failure_capture import FailureCapture
from lightning_memtools.oom.failure_facts import FailureFacts, FailureMoment
from lightning_memtools.oom.report_page import ReportPage
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NotWritten, write_file, write_report

T = TypeVar("T")

# A report may take ten seconds of the processor. When this time is over, what is running may still take a trace or a
# plan.
CHECKS_S = 8.0
HOLDERS_S = 3.0  # of processor time: after that no further holder is looked for


@dataclass(frozen=True, slots=True)
class OOMReporter:
    """Makes the out-of-memory reports for one fit, validate, test or predict call.

    Attributes:
        directory: The directory of the reports, or the reason why the run keeps no files.
        checks_s: The limit of CPU time for all checks, in seconds; None for the default.
    """

    directory: Path | NotWritten
    checks_s: float | None = None

    def report(
        self,
        facts: FailureFacts,
        capture: FailureCapture,
        read_run: Callable[[], FailedRun],
        *,
        error: BaseException | None = None,
        done: str = "",
    ) -> ReportPage:
        """Create the report, write it, print its first lines, and return it.

        `read_run` reads the properties of the run. If an error ends the run, pass it as `error`: a note that names the
        report is added to it. If the run goes on instead, `done` is a sentence on how the failure was handled.
        """
        end = time.thread_time() + (CHECKS_S if self.checks_s is None else self.checks_s)
        line = None if error is None else user_line_of(error)
        page = ReportPage(
            facts=facts,
            error="" if error is None else "\n".join([str(error), *getattr(error, "__notes__", ())]),
            done=done,
            where="" if line is None else f"{line} in {line.function}" + (f": {line.source}" if line.source else ""),
            processes=processes_of(capture, facts),
        )
        # The facts are written before anything else is tried.
        page.file = self._write(_file_name(facts.moment), page.markdown())
        take = (lambda: None) if capture.recording is None else capture.recording.take
        snapshot = _tried(page, "The allocator's history", take, None)
        page.snapshot = _write_snapshot(page, snapshot)
        _tried(page, "The failed step", lambda: _advise(page, capture, snapshot, read_run(), end), None)
        if isinstance(page.file, Path):
            write_report(page.file.parent, page.file.name, page.markdown())
        print_on_console(page.console(), soft_wrap=True)
        if error is not None:
            error.add_note(page.note())
        return page

    def _write(self, name: str, text: str) -> Path | NotWritten:
        """Write a report to the directory of reports. If that fails, write it to a temporary directory."""
        written = write_report(self.directory, name, text)
        if isinstance(written, Path):
            return written
        try:
            return write_report(Path(tempfile.mkdtemp(prefix="memtools-")), name, text)
        except OSError:
            return written


def _tried(page: ReportPage, what: str, make: Callable[[], T], otherwise: T) -> T:
    """Return `make()`. If that raises, note on the page that `what` could not be read, and return `otherwise`."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001, the user's objects are searched, and the user's step is traced
        page.notes.append(f"{what} could not be read: {in_one_line(error)}")
        return otherwise


def _advise(
    page: ReportPage, capture: FailureCapture, snapshot: dict[str, Any] | None, run: FailedRun, end: float
) -> None:
    """Add two things to the page: objects that hold memory, and changes that help. `end`: the deadline in CPU time."""
    free_gathered_parameters(run.model)  # what FSDP 2 gathered for the failed step goes with the step
    page.held = _tried(page, "Who holds memory", lambda: held_memory(run, capture, snapshot), Holdings())
    failed = failed_step(run, page.facts, capture, snapshot, page.held)
    virtual = capture.virtual
    with virtual.suspended() if virtual is not None and VirtualDevice.current() is virtual else nullcontext():
        page.advice = advice_for(failed, end - time.thread_time())


def _write_snapshot(page: ReportPage, snapshot: dict[str, Any] | None) -> Path | None:
    """Write the memory snapshot beside the report. Return its path; None if nothing was recorded or written."""
    if snapshot is None or isinstance(page.file, NotWritten):
        return None
    name = f"{page.file.stem}-snapshot.pickle"
    written = write_file(page.file.parent, name, partial(write_snapshot, snapshot))
    return written if isinstance(written, Path) else None


def _file_name(moment: FailureMoment) -> str:
    rank = f"-rank{moment.rank}" if moment.world_size > 1 else ""
    return f"oom-{moment.stage}-step{moment.step}{rank}.md"


def held_memory(run: FailedRun, capture: FailureCapture, snapshot: Mapping[str, Any] | None) -> Holdings:
    """Return the objects that hold device memory, apart from the model, its optimizers and the batch.

    Args:
        run: The failed run.
        capture: The FailureCapture that followed the run.
        snapshot: The memory snapshot; None if nothing was recorded.
    """
    if capture.reader is None:
        return Holdings()
    # Copies that a search makes of nothing are host memory, and so is what it frees for autograd.
    with uncounted():
        free_failed_backward()
    return find_holdings(
        capture.on_device,
        run.model,
        run.optimizers,
        capture.batch,
        names_of_run(run.model, [*run.others, run.trainer]),
        is_young=None if snapshot is None else _is_young(capture, snapshot),
        seconds=HOLDERS_S,
    )


def _is_young(capture: FailureCapture, snapshot: Mapping[str, Any]) -> Callable[[Tensor], bool]:
    """Return a function that tells from the snapshot whether a tensor was allocated in the current batch."""
    reader, began = capture.reader, capture.batch_began
    young = {
        entry["addr"]
        for entry in snapshot["device_traces"][capture.device.index or 0]
        if began is not None and entry["time_us"] >= began and entry["action"] == "alloc"
    }
    if isinstance(reader, KnowsItsTensors):
        return lambda tensor: reader.address_of(tensor) in young
    return lambda tensor: cuda_address(tensor) in young
