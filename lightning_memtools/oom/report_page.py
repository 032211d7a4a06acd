"""The report: as markdown, as a few lines for the console, and as a note on the error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_memtools.memory.leaks.holdings import Holdings
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.processes import GpuProcess, in_words
from lightning_memtools.memory.sizes import format_share, format_size
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.oom.actions import Action, Outcome
from lightning_memtools.oom.failure_facts import FailureFacts
from lightning_memtools.reporting.files import NO_RUN, NotWritten
from lightning_memtools.reporting.held_words import holding_in_words
from lightning_memtools.reporting.phrases import first_of
from lightning_memtools.reporting.tables import Table, markdown_table

_SHORT = 3
_MOST_TENSORS = 12
_WORTH_A_LINE = 0.01
_MOST = 0.4  # of what is allocated, and that of the device
_CATEGORY_WORDS = {"optimizer": "optimizer state", "other": "other tensors"}


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
        modules: Bytes of activations by module in the traced step, largest first.
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
    processes: Sequence[GpuProcess] | str | None = None
    notes: list[str] = field(default_factory=list)
    top: int = 10
    file: Path | NotWritten = NO_RUN
    snapshot: Path | str = ""
    seconds: float | None = None

    # --- the short forms

    @property
    def headline(self) -> str:
        """A sentence that says what failed and where, and one that names the cause or what fills the device."""
        facts = self.facts
        what, request = "Out of memory", ""
        if facts.is_probable:
            what, request = "Probably out of memory", ": a library could not make its handle on a nearly full device"
        elif facts.requested is not None:
            request = f": tried to allocate {format_size(facts.requested)}"
            request += "" if facts.free is None else f" with {format_size(facts.free)} free"
        return f"{what} on {facts.device} ({facts.moment}){request}.{self._cause()}"

    def _cause(self) -> str:
        causes = [action.cause for action in self.actions if action.cause]
        if causes:
            return f" {causes[0]}."
        split = {} if self.facts.split is None else self.facts.split.by_category
        name, size = max(split.items(), key=lambda item: item[1], default=("", 0))
        total, limit = sum(split.values()), self.facts.fraction * (self.facts.stats.capacity or 0)
        if size <= _MOST * total or total < _MOST * limit:
            return ""
        words, verb = _CATEGORY_WORDS.get(name, name), "takes" if name == "optimizer" else "take"
        return f" {words[0].upper()}{words[1:]} {verb} {format_size(size)}."

    def console(self) -> str:
        """Return what failed, what to do first, and the path of the report; the whole of it where it has no file."""
        lines = [self.headline, *self._what_was_done()]
        helping = [action for action in self.actions if action.helps][:_SHORT]
        lines += [f"{number}. {action}" for number, action in enumerate(helping, 1)]
        unchecked = [action for action in self.actions if action.outcome is Outcome.UNCHECKED]
        if not helping and len(unchecked) < len(self.actions):
            lines.append("None of the checked changes helps.")
        if unchecked:
            reasons = list(dict.fromkeys(action.detail for action in unchecked))
            titles = "; ".join(f"{action.title[0].lower()}{action.title[1:]}" for action in unchecked)
            lines.append(f"These changes were not checked ({first_of(reasons, 1)}): {titles}.")
        if not isinstance(self.file, Path):
            lines.append(self.markdown())
        return "\n".join([*lines, self.file_line()])

    def _categories(self) -> list[tuple[str, int]]:
        split = {} if self.facts.split is None else self.facts.split.by_category
        return sorted(split.items(), key=lambda item: -item[1])

    def file_line(self) -> str:
        """Return the sentence that names the report's file, or says why there is none."""
        if isinstance(self.file, Path):
            return f"Report: {short_path(str(self.file))}"
        return f"The report {self.file.reason if self.file.is_failure else f'was {self.file.reason}'}."

    def note(self) -> str:
        """Return the note for the error: what failed and where the report is. The console has the rest already."""
        return f"OOMReport: {self.headline}\n{self.file_line()}"

    # --- the page

    def markdown(self) -> str:
        """Return the whole report."""
        sections = [
            [f"# {self.headline}", *self._what_was_done()],
            self._what_to_do(),
            self._what_happened(),
            self._what_filled_the_device(),
            self._holders(),
            self._modules(),
            self._fragmentation(),
            self._others(),
            self._files(),
        ]
        return "\n\n".join(part for section in sections for part in section) + "\n"

    def _what_was_done(self) -> list[str]:
        return [f"The run goes on. {self.done}"] if self.done else []

    def _what_to_do(self) -> list[str]:
        def listed(outcomes: Iterable[Outcome]) -> str:
            return "\n".join(f"- {action}" for action in self.actions if action.outcome in outcomes)

        parts = []
        helping = [action for action in self.actions if action.helps]
        if helping:
            parts.append("\n".join(f"{number}. {action}" for number, action in enumerate(helping, 1)))
            parts.append(
                "Each peak was found by tracing the step with that change on fake tensors. The available memory is the "
                "capacity of the device, less what other processes hold, and less what this process holds beside the "
                "step."
            )
        parts.append(listed({Outcome.UNCHECKED, Outcome.REQUEST_ONLY}))
        useless = listed({Outcome.USELESS})
        parts.append(useless and f"These changes were checked, but do not help:\n\n{useless}")
        parts += [note if note.endswith(".") else f"{note}." for note in self.notes]
        parts = [part for part in parts if part]
        return ["## What to do", *parts] if parts else []

    def _what_happened(self) -> list[str]:
        facts, stats = self.facts, self.facts.stats
        requested = format_size(facts.requested)
        if self.request not in {None, facts.requested}:
            requested += f" from the device, as a segment for a request of {format_size(self.request)}"
        rows = [
            ("when", str(facts.moment)),
            ("where", "; ".join(filter(None, [facts.module and f"module {facts.module}", self.where]))),
            ("batch", self._batch()),
            ("requested", requested),
            ("share this process may reserve", "" if facts.fraction >= 1 else f"{100 * facts.fraction:.1f}%"),
        ]
        sizes = (
            ("capacity", stats.capacity),
            ("reserved by PyTorch", stats.reserved),
            ("allocated to tensors", stats.allocated),
            ("reserved but unusable", facts.unusable),
            ("used outside of PyTorch, including the CUDA context", facts.used_by_others),
            ("free", facts.free),
        )
        rows += [(name, format_size(size)) for name, size in sizes if size is not None]
        rows.append(("allocation retries so far", str(stats.alloc_retries or "")))
        parts = ["## What happened", markdown_table(Table(("", ""), [row for row in rows if row[1]], align="ll"))]
        if facts.problem:
            parts.append(f"Some facts could not be read when memory ran out: {facts.problem}.")
        if self.error:
            # A quotation wraps where the page is shown; a block of code would not.
            parts.append("\n".join(f"> {line}" for line in self.error.splitlines()))
        return parts

    def _batch(self) -> str:
        """Return the number of samples, and the type, shape and size of each tensor."""
        facts = self.facts
        lines = [
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} ({format_size(tensor.nbytes)})"
            for tensor in tensors_in(facts.batch)
        ]
        if not lines:
            return ""
        size = "" if facts.samples is None else f"{facts.samples} samples: "
        first = "" if facts.is_own_batch else " (the first batch of the stage; the failing one is not known)"
        return f"{size}{first_of(lines, _MOST_TENSORS)}{first}"

    def _what_filled_the_device(self) -> list[str]:
        split, title = self.facts.split, "## What filled the device"
        if split is None:
            return [title, "Not known: the device keeps no statistics."]
        total = sum(split.by_category.values())
        rows = [(name, format_size(n), format_share(n, total)) for name, n in self._categories()]
        rows.append(("allocated", format_size(total), format_share(total, total)))
        parts = [title, markdown_table(Table(("category", "size", "share"), rows))]
        if split.buffers > _WORTH_A_LINE * total:
            parts.append(f'Of "other", {format_size(split.buffers)} are the model\'s buffers.')
        if split.older > _WORTH_A_LINE * total:
            parts.append(
                f"{format_size(split.older)} of this were allocated before the batch began and belong neither to the "
                "model nor to its optimizers or inputs."
            )
        parts.append(
            "Activations are everything that was allocated since the batch began and has no other owner, which "
            "includes temporary memory of the backward pass."
        )
        return parts

    def _holders(self) -> list[str]:
        split, least = self.facts.split, _WORTH_A_LINE * (self.facts.stats.allocated or 0)
        held = [holding for holding in self.held.found if holding.n_bytes > least][: self.top]
        lines = [f"- {holding_in_words(holding)}" for holding in held]
        if self.held.garbage_bytes > least:
            lines.append(f"- garbage that Python had not collected, {format_size(self.held.garbage_bytes)}")
        known = sum(holding.n_bytes for holding in self.held.found) + self.held.garbage_bytes
        rest = 0 if split is None else max(0, split.older - split.buffers - known)
        parts = ["\n".join(lines)] if lines else []
        if rest > least:
            parts.append(
                f"Of what was there before the batch, {format_size(rest)} were not found: autograd graphs, workspaces "
                "of libraries, buffers of the strategy and other threads can hold memory that no Python object shows."
            )
        return ["## Who holds the rest", *parts] if parts else []

    def _modules(self) -> list[str]:
        rows = [(f"`{name}`", format_size(n_bytes)) for name, n_bytes in self.modules if n_bytes][: self.top]
        if not rows:
            return []
        in_training = self.facts.moment.stage == "train"
        when = "keeps for the backward pass in" if in_training else "holds at the peak of"
        text = f"These are the activations that each module {when} the traced step."
        return ["## Modules with the most activations", text, markdown_table(Table(("module", "activations"), rows))]

    def _fragmentation(self) -> list[str]:
        unusable = self.facts.unusable
        if unusable is None:
            return []
        text = (
            f"{format_size(unusable)} ({format_share(unusable, self.facts.stats.reserved or 0)} of what is reserved) "
            "were free, but in pieces between blocks in use, so that they could neither serve the request nor be "
            "released to the device."
        )
        return ["## Fragmentation", text]

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
