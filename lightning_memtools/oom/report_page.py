"""The report and its suggested actions: as markdown, as a few lines for the console, and as a note on the error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from lightning_memtools.memory.leaks.holdings import Holdings
from lightning_memtools.memory.processes import GpuProcess, in_words
from lightning_memtools.memory.sizes import format_share, format_size
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.oom.failure_facts import FailureFacts, describe_batch
from lightning_memtools.oom.fragmentation import IN_PIECES, PinnedSegment
from lightning_memtools.oom.recorded_history import ReplayVerdict
from lightning_memtools.reporting.files import NO_RUN, NotWritten
from lightning_memtools.reporting.held_words import holding_in_words
from lightning_memtools.reporting.phrases import counted, in_series
from lightning_memtools.reporting.tables import Table, markdown_table

_SHORT = 3
_WORTH_A_LINE = 0.01
# As a share of what is allocated, and that of the device.
_MOST = 0.4
_CATEGORY_WORDS = {"optimizer": "optimizer state", "other": "other tensors"}
_STANDS_FOR = {
    "(backward)": "`(backward)` stands for gradients that backward passes from module to module.",
    "(outside)": "`(outside)` stands for tensors made outside of modules, such as the loss.",
}


class ActionKind(IntEnum):
    """The change that an action makes, the least intrusive first."""

    HOLDER = 0
    GARBAGE = 1
    GROWTH = 2
    RARE_BATCH = 3
    EXPANDABLE_SEGMENTS = 4
    EMPTY_CACHE = 5
    STOP_PROCESS = 6
    PREDICTIONS = 7
    LOSS = 8
    CHECKPOINTING = 9
    OFFLOAD = 10
    ACCUMULATION = 11
    BATCH_SIZE = 12
    PRECISION = 13
    OPTIMIZER = 14
    COMBINATION = 15
    LARGER_GPU = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One suggested change.

    Attributes:
        kind: The kind of change.
        title: The change in a few words.
        detail: The result of the check in sentences, without the last period; where it was not checked, the reason.
        checked: True if the change was tried, by tracing the step or by replaying the recorded history.
        fits: True if it is enough by itself; None where that is not known.
        saved: The bytes by which it lowers the peak of a step.
        code: The code to write in the program.
        is_partial: True if it was replayed up to the failure only: what comes after it may fail too.
        is_cause: True if it takes away what made memory run out, rather than making room for it.
        cause: That cause in a sentence, without the period; "" where it is none.
        peak: The step's peak with the change in bytes; None where no step was traced.
        price: The computation that it costs, in words; "" for none.
    """

    kind: ActionKind
    title: str
    detail: str = ""
    checked: bool = False
    fits: bool | None = None
    saved: int = 0
    code: str = ""
    is_partial: bool = False
    is_cause: bool = False
    cause: str = ""
    peak: int | None = None
    price: str = ""

    @property
    def helps(self) -> bool:
        """True if it was checked for the whole step, and helps."""
        return self.checked and not self.is_useless and not self.is_partial

    @property
    def is_useless(self) -> bool:
        """True if it was checked and does not help."""
        return self.checked and not self.fits and self.saved <= 0

    def __str__(self) -> str:
        code = f" (`{self.code}`)" if self.code else ""
        if not self.checked:
            why = f": {self.detail}" if self.detail else ""
            return f"{self.title}{code}. This was not checked{why}."
        return f"{self.title}{code}. {self.detail}."


def ranked(actions: Iterable[Action]) -> list[Action]:
    """Return the actions in the order of their worth.

    Those that take away the cause come first; then those that are enough, the least intrusive before others; then those
    that help, by how much; then those that were not checked, and those that were replayed up to the failure only; last
    those that were checked and do not help.
    """

    def rank(one: Action) -> tuple[bool, bool, bool, bool, bool, int, int]:
        by_size = 0 if one.fits else -one.saved
        return one.is_useless, one.is_partial, not one.checked, not one.is_cause, not one.fits, by_size, one.kind

    return sorted(actions, key=rank)


@dataclass(slots=True, kw_only=True)
class ReportPage:
    """The content of a report.

    Attributes:
        facts: The facts captured when memory ran out.
        error: The error's own text.
        done: What was done about it, where the run goes on.
        where: The user's line of code; "" where it is not known.
        request: The bytes that the program requested, where they are known: the device is asked for whole segments.
        held: Who holds what the step does not need.
        actions: The suggested actions, the best first.
        modules: Bytes of activations by module, largest first.
        modules_traced: True if these are from a traced step, False if the device reported them.
        expandable: Whether expandable segments would have helped; None where no history was recorded.
        pinned: Segments that are half empty and cannot be released.
        processes: Other processes on the device, or the reason why they are not known; None where there is no GPU.
        notes: Further remarks.
        top: The number of modules that are listed.
        file: The path of the report, or the reason why there is none.
        snapshot: The path of the memory snapshot, or the reason why there is none.
        seconds: The time that making the report took.
    """

    facts: FailureFacts
    error: str = ""
    done: str = ""
    where: str = ""
    request: int | None = None
    held: Holdings = field(default_factory=Holdings)
    actions: Sequence[Action] = ()
    modules: Sequence[tuple[str, int]] = ()
    modules_traced: bool = False
    expandable: ReplayVerdict | None = None
    pinned: Sequence[PinnedSegment] = ()
    processes: Sequence[GpuProcess] | str | None = None
    notes: Sequence[str] = field(default_factory=list)
    top: int = 10
    file: Path | NotWritten = NO_RUN
    snapshot: Path | str = ""
    seconds: float | None = None

    @property
    def headline(self) -> str:
        """A sentence that says what failed and where, and one that names the cause or what fills the device."""
        causes = [action.cause for action in self.actions if action.is_cause]
        if causes:
            return f"{self._failure} {causes[0]}."
        split = {} if self.facts.split is None else self.facts.split.by_category
        name, size = max(split.items(), key=lambda item: item[1], default=("", 0))
        total = sum(split.values())
        limit = self.facts.fraction * (self.facts.stats.capacity or 0)
        if size <= _MOST * total or total < _MOST * limit:
            return self._failure
        words = _CATEGORY_WORDS.get(name, name)
        verb = "takes" if name == "optimizer" else "take"
        return f"{self._failure} {words[0].upper()}{words[1:]} {verb} {format_size(size)}."

    @property
    def _failure(self) -> str:
        facts = self.facts
        request = "" if facts.requested is None else f": tried to allocate {format_size(facts.requested)}"
        free = "" if facts.free is None or not request else f" with {format_size(facts.free)} free"
        if facts.is_probable:
            request = ": a library could not make its handle, and the device was nearly full"
        what = "Probably out of memory" if facts.is_probable else "Out of memory"
        return f"{what} on {facts.device} ({facts.moment}){request}{free}."

    def markdown(self) -> str:
        """Return the whole report."""
        parts = [f"# {self.headline}", *self._what_was_done(), *self._what_to_do(), *self._facts()]
        parts += [
            *self._split(),
            *self._holders(),
            *self._modules(),
            *self._fragmentation(),
            *self._others(),
            *self._files(),
        ]
        return "\n\n".join(parts) + "\n"

    def console(self) -> str:
        """Return the short form: what failed, what to do first, what filled the device, and the path of the report."""
        lines = [self.headline, *self._what_was_done()]
        helping = [action for action in self.actions if action.helps][:_SHORT]
        lines += [f"{number}. {action}" for number, action in enumerate(helping, 1)]
        if not helping and any(action.checked for action in self.actions):
            lines.append("None of the checked changes helps.")
        unchecked = [action for action in self.actions if not action.checked]
        if unchecked:
            reasons = list(dict.fromkeys(action.detail for action in unchecked))
            why = f" ({reasons[0]})" if len(reasons) == 1 else ", for reasons given in the report"
            titles = "; ".join(_lower_first(action.title) for action in unchecked)
            lines.append(f"These changes were not checked{why}: {titles}.")
        if self.facts.split is not None:
            lines.append(f"The device held {_in_words(self.facts.split.by_category)}.")
        # "(backward)" and "(outside)" are no modules.
        modules = [(name, size) for name, size in self.modules if size and not _stands_for(name)]
        if modules and modules[0][1] > _WORTH_A_LINE * (self.facts.stats.allocated or 0):
            name, size = modules[0]
            ties = sum(other == size for _, other in modules) - 1
            others = (
                f" and {counted(ties, 'other module', 'other modules')}, with {format_size(size)} each"
                if ties
                else f", with {format_size(size)}"
            )
            lines.append(f"The largest activations belong to {name}{others}.")
        lines.append(self.file_line())
        return "\n".join(lines)

    def file_line(self) -> str:
        """Return the sentence that names the report's file, or says why there is none."""
        if isinstance(self.file, Path):
            return f"Report: {short_path(str(self.file))}"
        return f"The report {self.file.reason if self.file.is_failure else f'was {self.file.reason}'}."

    def note(self) -> str:
        """Return the note for the error: what failed and where the report is. The console has the rest already."""
        return f"OOMReport: {self.headline}\n{self.file_line()}"

    def _what_was_done(self) -> list[str]:
        return [f"The run goes on. {self.done}"] if self.done else []

    def _what_to_do(self) -> list[str]:
        parts = ["## What to do"]
        helping = [action for action in self.actions if action.helps]
        if helping:
            parts.append("\n".join(f"{number}. {action}" for number, action in enumerate(helping, 1)))
            parts.append(
                "Each peak was found by tracing the step with that change on fake tensors. The available memory is the "
                "capacity of the device, less what other processes hold, and less what this process holds beside the "
                "step."
            )
        rest = [
            action for action in self.actions if not action.checked or (action.is_partial and not action.is_useless)
        ]
        if rest:
            parts.append("\n".join(f"- {action}" for action in rest))
        useless = [action for action in self.actions if action.is_useless]
        if useless:
            parts.append(
                "\n".join(["These changes were checked, but do not help:", "", *(f"- {action}" for action in useless)])
            )
        parts += [note if note.endswith(".") else f"{note}." for note in self.notes]
        return parts if len(parts) > 1 else []

    def _facts(self) -> list[str]:
        facts, stats = self.facts, self.facts.stats
        rows = [("when", str(facts.moment)), ("where", _joined(facts.module and f"module {facts.module}", self.where))]
        lines = describe_batch(facts.batch)
        if lines:
            size = f"{facts.samples} samples: " if facts.samples is not None else ""
            first = "" if facts.is_own_batch else " (the first batch of the stage; the failing one is not known)"
            rows.append(("batch", f"{size}{', '.join(lines)}{first}"))
        rows.append(("requested", format_size(facts.requested) + self._for_a_request()))
        sizes = (
            ("capacity", stats.capacity),
            ("share this process may reserve", None if facts.fraction >= 1 else f"{100 * facts.fraction:.1f}%"),
            ("reserved by PyTorch", stats.reserved),
            ("allocated to tensors", stats.allocated),
            ("reserved but unusable", facts.unusable),
            ("used outside of PyTorch, including the CUDA context", facts.used_by_others),
            ("free", facts.free),
        )
        rows += [
            (name, size if isinstance(size, str) else format_size(size)) for name, size in sizes if size is not None
        ]
        if stats.alloc_retries:
            rows.append(("allocation retries so far", str(stats.alloc_retries)))
        parts = ["## What happened", markdown_table(Table(("", ""), [row for row in rows if row[1]], align="ll"))]
        if facts.problem:
            parts.append(f"Some facts could not be read when memory ran out: {facts.problem}.")
        if self.error:
            # A quotation wraps where the page is shown; a block of code would not.
            parts.append("\n".join(f"> {line}" for line in self.error.splitlines()))
        return parts

    def _for_a_request(self) -> str:
        if self.request is None or self.request == self.facts.requested:
            return ""
        return f" from the device, as a segment for a request of {format_size(self.request)}"

    def _split(self) -> list[str]:
        split = self.facts.split
        if split is None:
            return ["## What filled the device", "Not known: the device keeps no statistics."]
        total = sum(split.by_category.values())
        rows = [
            (name, format_size(n_bytes), format_share(n_bytes, total))
            for name, n_bytes in sorted(split.by_category.items(), key=lambda item: -item[1])
        ]
        rows.append(("allocated", format_size(total), format_share(total, total)))
        parts = ["## What filled the device", markdown_table(Table(("category", "size", "share"), rows))]
        if split.buffers > _WORTH_A_LINE * total:
            parts.append(f'Of "other", {format_size(split.buffers)} are the model\'s buffers.')
        if split.older > _WORTH_A_LINE * total:
            parts.append(
                f"{format_size(split.older)} of this were allocated before the batch began and belong neither to the "
                "model nor to its optimizers or inputs."
            )
        if not split.exact:
            parts.append(
                "Activations are everything that was allocated since the batch began and has no other owner, which "
                "includes temporary memory of the backward pass."
            )
        return parts

    def _holders(self) -> list[str]:
        facts, split = self.facts, self.facts.split
        total = facts.stats.allocated or 0
        found = [one for one in self.held.found if one.n_bytes > _WORTH_A_LINE * total][: self.top]
        lines = [f"- {holding_in_words(one)}" for one in found]
        if self.held.garbage_bytes > _WORTH_A_LINE * total:
            lines.append(f"- garbage that Python had not collected, {format_size(self.held.garbage_bytes)}")
        found_bytes = sum(one.n_bytes for one in self.held.found) + self.held.garbage_bytes
        rest = 0 if split is None else max(0, split.older - split.buffers - found_bytes)
        parts = ["\n".join(lines)] if lines else []
        if rest > _WORTH_A_LINE * total:
            parts.append(
                f"Of what was there before the batch, {format_size(rest)} were not found: autograd graphs, workspaces "
                "of libraries, buffers of the strategy and other threads can hold memory that no Python object shows."
            )
        return ["## Who holds the rest", *parts] if parts else []

    def _modules(self) -> list[str]:
        shown = [(name, n_bytes) for name, n_bytes in self.modules if n_bytes][: self.top]
        if not shown:
            return []
        if not self.modules_traced:
            whose = "held when memory ran out"
        elif self.facts.moment.stage == "train":
            whose = "keeps for the backward pass in the traced step"
        else:
            whose = "holds at the peak of the traced step"
        table = Table(("module", "activations"), [(f"`{name}`", format_size(n_bytes)) for name, n_bytes in shown])
        text = [f"These are the activations that each module {whose}.", *(_stands_for(name) for name, _ in shown)]
        return ["## Modules with the most activations", " ".join(filter(None, text)), markdown_table(table)]

    def _fragmentation(self) -> list[str]:
        unusable = self.facts.unusable
        if unusable is None:
            return []
        reserved = self.facts.stats.reserved or 0
        text = (
            f"{format_size(unusable)} ({format_share(unusable, reserved)} of what is reserved) were free, but in "
            "pieces between blocks in use, so that they could neither serve the request nor be released to the device."
        )
        setting = "`expandable_segments:True`"
        if self.expandable is None:
            verdict = f"Whether {setting} would have helped is not known: no history of allocations was recorded."
        elif self.expandable.served is None:
            verdict = f"Whether {setting} would have helped is not known: {self.expandable.why}."
        elif self.expandable.served:
            verdict = (
                f"With {setting} this request would have been served, as a replay of the recorded allocations shows."
            )
        else:
            verdict = f"{setting} would not have helped: {self.expandable.why}."
        pins = "\n".join(f"- {one}" for one in self.pinned if unusable > IN_PIECES * reserved)
        pinned = (
            ["These segments are half empty or more, and are held by the blocks in use in them:", pins] if pins else []
        )
        return ["## Fragmentation", f"{text} {verdict}", *pinned]

    def _others(self) -> list[str]:
        if self.processes is None:
            return []
        text = in_words(self.processes)
        return ["## Other processes on the device", f"{text[0].upper()}{text[1:]}."]

    def _files(self) -> list[str]:
        parts = []
        if isinstance(self.snapshot, Path):
            parts.append(
                f"Memory snapshot: `{short_path(str(self.snapshot))}`. `memtools snapshot` makes a page from it that "
                "shows every block; https://pytorch.org/memory_viz can show it too."
            )
        elif self.snapshot:
            parts.append(f"No memory snapshot: {self.snapshot}.")
        if self.seconds is not None:
            parts.append(f"This report took {self.seconds:.1f} s.")
        return ["## Files", *parts] if parts else []


def _stands_for(name: str) -> str:
    return _STANDS_FOR.get(name, "")


def _in_words(split: Mapping[str, int]) -> str:
    """Return the categories that hold more than next to nothing, the largest first."""
    least = _WORTH_A_LINE * sum(split.values())
    parts = [
        f"{format_size(n_bytes)} of {_CATEGORY_WORDS.get(name, name)}"
        for name, n_bytes in sorted(split.items(), key=lambda i: -i[1])
        if n_bytes > least
    ]
    return in_series(parts) or "nothing"


def _lower_first(title: str) -> str:
    return f"{title[0].lower()}{title[1:]}"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
