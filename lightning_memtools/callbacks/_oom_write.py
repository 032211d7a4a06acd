"""Makes an out-of-memory report and takes it wherever it goes: files, loggers, the console, the error itself."""

from __future__ import annotations

import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from lightning_memtools._lightning import training_step
from lightning_memtools.callbacks._oom_situation import processes_of, situation_of
from lightning_memtools.callbacks._oom_watch import Watch
from lightning_memtools.memory.allocator import write_snapshot
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.checks import Checks
from lightning_memtools.oom.culprit import Notice, NoticeBoard
from lightning_memtools.oom.deadline import Deadline
from lightning_memtools.oom.facts import Moment, line_of_user
from lightning_memtools.oom.page import Page
from lightning_memtools.reporting.loggers import log_text

# Of the ten seconds that a report may take; what runs when this is over is a trace's backward pass, or a plan's search.
CHECKS_S = 8.0
_TAG = "memtools/oom_report"


@dataclass(frozen=True, slots=True)
class Reporter:
    """Reports for one call of the Trainer.

    Attributes:
        directory: Where reports go; None where the run keeps no files.
        top: How many modules are listed.
        board: Where ranks tell each other; None with one rank.
    """

    directory: Path | None
    top: int
    board: NoticeBoard | None

    def report(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException, watch: Watch) -> None:
        """Report that memory ran out on this rank."""
        begin = time.monotonic()
        facts = watch.facts_of(exception)
        page = Page(
            facts=facts,
            error=str(exception),
            where=line_of_user(exception),
            modules=() if facts.split is None else facts.split.by_module,
            processes=processes_of(trainer.strategy.root_device, watch.virtual, facts),
            top=self.top,
        )
        notice = Notice(facts.moment.rank, page.headline)
        is_first = self.board is None or self.board.leave(notice)
        # What is known is safe before anything else is tried.
        page.path = self._write(_file_name(facts.moment), page.markdown())
        taken = None if watch.recording is None else watch.recording.take()
        page.snapshot = _write_snapshot(page.path, taken, watch)
        _check(trainer, pl_module, page, watch, taken, Deadline(CHECKS_S - (time.monotonic() - begin)))
        page.seconds = time.monotonic() - begin
        text = page.markdown()
        if page.path is not None:
            _written(page.path, text)
        log_text(trainer, _TAG, text, training_step(trainer))
        if self.board is not None and is_first:
            self.board.replace(replace(notice, report=str(page.path or "")))
        exception.add_note(page.note())
        lines = page.console() if is_first else f"{page.headline} Report: {page.path}"
        Console().print(lines, soft_wrap=True, markup=False, highlight=False)

    def report_other_rank(self, trainer: Trainer, exception: BaseException) -> None:
        """Say that another rank ran out of memory, if one did: this one saw no more than a closed connection."""
        notice = None if self.board is None else self.board.read()
        if notice is None:
            return
        report = f" Report: {notice.report}" if notice.report else ""
        exception.add_note(
            f"OOMReport: rank {notice.rank} ran out of memory, and this error is what came of it here. "
            f"{notice.headline}{report}"
        )
        try:
            text = Path(notice.report).read_text(encoding="utf-8") if notice.report else notice.headline
        except OSError:
            text = notice.headline
        log_text(trainer, _TAG, text, training_step(trainer))

    def _write(self, name: str, text: str) -> Path | None:
        """Write a report to its place, or else to a temporary directory."""
        if self.directory is not None and _written(self.directory / name, text):
            return self.directory / name
        try:
            path = Path(tempfile.mkdtemp(prefix="memtools-")) / name
        except OSError:
            return None
        return path if _written(path, text) else None


def _check(
    trainer: Trainer,
    pl_module: LightningModule,
    page: Page,
    watch: Watch,
    taken: dict[str, Any] | None,
    deadline: Deadline,
) -> None:
    try:
        situation = situation_of(
            trainer,
            pl_module,
            page.facts,
            virtual=watch.virtual,
            snapshot=taken,
            evaluation_began=watch.evaluation_began,
            on_device=watch.on_device,
        )
        checks = Checks(situation, deadline)
        with _apart_from(watch.virtual):
            checks.run()
    except Exception as error:  # noqa: BLE001, the facts are worth a report without advice
        page.notes = [f"Nothing could be checked: {type(error).__name__}: {error}"]
        return
    page.actions, page.notes = checks.actions, checks.notes
    page.request, page.expandable = checks.request, checks.expandable
    if not page.modules:
        page.modules, page.modules_traced = checks.modules, True


def _apart_from(virtual: VirtualDevice | None) -> AbstractContextManager[None]:
    return virtual.suspended() if virtual is not None and VirtualDevice.current() is virtual else nullcontext()


def _write_snapshot(report: Path | None, taken: dict[str, Any] | None, watch: Watch) -> Path | str:
    if taken is None:
        return "this device records none" if watch.snapshot else "it was not asked for (snapshot=False)"
    if report is None:
        return "no file can be written"
    path = report.with_name(f"{report.stem}-snapshot.pickle")
    try:
        write_snapshot(taken, path)
    except OSError as error:
        return f"it could not be written: {error}"
    return path


def _written(path: Path, text: str) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:
        return False
    return True


def _file_name(moment: Moment) -> str:
    stage = moment.stage.replace(" ", "-")
    rank = f"-rank{moment.rank}" if moment.world_size > 1 else ""
    return f"oom-{stage}-step{moment.step}{rank}.md"
