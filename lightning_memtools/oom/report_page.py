"""The report: as markdown, as a few lines for the console, and as a note on the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_memtools.memory.leaks.holdings import Holdings
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.processes import GpuProcess, in_words
from lightning_memtools.memory.sizes import format_share, format_size
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.oom.advice_checks import Advice
from lightning_memtools.oom.failure_facts import FailureFacts
from lightning_memtools.reporting.files import NO_RUN, NotWritten
from lightning_memtools.reporting.held_words import holding_in_words
from lightning_memtools.reporting.phrases import first_of
from lightning_memtools.reporting.tables import Table, markdown_table

_SHORT = 3
_MOST_TENSORS = 12
_MOST_ROWS = 10  # of modules, holders, variables and lines
_WORTH_A_LINE = 0.01
_MOST = 0.4  # of what is allocated, and that of the device


@dataclass(slots=True, kw_only=True)
class ReportPage:
    """The content of an out-of-memory report.

    Attributes:
        facts: The facts captured when memory ran out.
        error: The error's message and notes.
        done: If the run goes on, a sentence on how the error was handled.
        where: The user's line of code that failed; "" if unknown.
        held: The objects that hold device memory that the step does not need.
        advice: The changes that were tried, with their results.
        processes: Other processes on the device, or the reason why they are not known; None if there is no GPU.
        notes: Further remarks.
        file: The path of the report, or the reason why there is none.
        snapshot: The path of the memory snapshot; None if there is none.
    """

    facts: FailureFacts
    error: str = ""
    done: str = ""
    where: str = ""
    held: Holdings = field(default_factory=Holdings)
    advice: Advice = field(default_factory=Advice)
    processes: Sequence[GpuProcess] | str | None = None
    notes: list[str] = field(default_factory=list)
    file: Path | NotWritten = NO_RUN
    snapshot: Path | None = None

    # --- the short forms

    @property
    def headline(self) -> str:
        """Two sentences: what failed and where; and the cause or, if unknown, the largest category of memory."""
        facts, request = self.facts, ""
        if facts.requested is not None:
            request = f": tried to allocate {format_size(facts.requested)}"
            request += "" if facts.free is None else f" with {format_size(facts.free)} free"
        cause = next((action.cause for action in self.advice.actions if action.cause), "") or self._largest_category()
        return f"Out of memory on {facts.device} ({facts.moment}){request}.{cause and f' {cause}.'}"

    def _largest_category(self) -> str:
        """Return a sentence that names the category with the most allocated memory; "" if there is none."""
        name, size = next(iter(self._categories()), ("", 0))
        total, limit = self.facts.stats.allocated or 0, self.facts.fraction * (self.facts.stats.capacity or 0)
        if size <= _MOST * total or total < _MOST * limit:
            return ""
        words = {"optimizer": "Optimizer state takes", "other": "Other tensors take"}.get(name)
        return f"{words or f'{name.capitalize()} take'} {format_size(size)}"

    def _categories(self) -> list[tuple[str, int]]:
        """Return the allocated bytes by category, the largest first."""
        return sorted((self.facts.split or {}).items(), key=lambda item: -item[1])

    def console(self) -> str:
        """Return the text to print: what failed, what helps, the report path. Without a file, add the whole report."""
        helping = self._helping(_SHORT) or ("None of the checked changes helps." if self.advice.actions else "")
        lines = [self.headline, self._what_was_done(), helping, *self.advice.unchecked]
        if not isinstance(self.file, Path):
            lines.append(self.markdown())
        return "\n".join(line for line in [*lines, self.file_line()] if line)

    def file_line(self) -> str:
        """Return a line that gives the path of the report, or says why there is no file."""
        if isinstance(self.file, Path):
            return f"Report: {short_path(str(self.file))}"
        return f"The report {self.file.reason if self.file.is_failure else f'was {self.file.reason}'}."

    def note(self) -> str:
        """Return the note to add to the error: what failed, and the path of the report."""
        return f"OOMReport: {self.headline}\n{self.file_line()}"

    # --- the page

    def markdown(self) -> str:
        """Return the whole report as markdown."""
        sections = {
            f"# {self.headline}": [self._what_was_done()],
            "## What to do": self._what_to_do(),
            "## What happened": self._what_happened(),
            "## What filled the device": self._what_filled_the_device(),
            "## Who holds the rest": self._holders(),
            "## Modules with the most activations": self._modules(),
            "## Tensors outside of modules": self._outside(),
            "## Other processes on the device": self._others(),
            "## Files": self._files(),
        }
        parts: list[str] = []
        for title, section in sections.items():
            shown = [part for part in section if part]
            parts += [title, *shown] if shown or not parts else []
        return "\n\n".join(parts) + "\n"

    def _what_was_done(self) -> str:
        return f"The run goes on. {self.done}" if self.done else ""

    def _helping(self, most: int | None = None) -> str:
        helping = [action for action in self.advice.actions if action.helps][:most]
        return "\n".join(f"{number}. {action}" for number, action in enumerate(helping, 1))

    def _what_to_do(self) -> list[str]:
        helping = self._helping()
        useless = "\n".join(f"- {action}" for action in self.advice.actions if not action.helps)
        how = (
            "Each peak was found by tracing the step with that change on fake tensors. The available memory is the "
            "capacity of the device, less what other processes hold, and less what this process holds beside the step."
        )
        notes = [note if note.endswith(".") else f"{note}." for note in (*self.notes, *self.advice.notes)]
        useless = useless and f"These changes were checked, but do not help:\n\n{useless}"
        return [helping, helping and how, *self.advice.unchecked, useless, *notes]

    def _what_happened(self) -> list[str]:
        facts, stats = self.facts, self.facts.stats
        sizes = {
            "requested": facts.requested,
            "capacity": stats.capacity,
            "reserved by PyTorch": stats.reserved,
            "allocated to tensors": stats.allocated,
            "reserved, but free in pieces (fragmentation)": facts.unusable,
            "used outside of PyTorch, including the CUDA context": facts.used_by_others,
            "free": facts.free,
        }
        rows = [("when", str(facts.moment)), ("where", self.where), ("batch", self._batch())]
        rows += [(name, format_size(size)) for name, size in sizes.items() if size is not None]
        # A quotation wraps where the page is shown; a block of code would not.
        quotation = "\n".join(f"> {line}" for line in self.error.splitlines())
        return [markdown_table(Table(("", ""), [row for row in rows if row[1]], align="ll")), quotation]

    def _batch(self) -> str:
        """Return a description of the batch: its number of samples, and the type, shape and size of each tensor."""
        lines = [
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} ({format_size(tensor.nbytes)})"
            for tensor in tensors_in(self.facts.batch)
        ]
        samples = "" if self.facts.samples is None else f"{self.facts.samples} samples: "
        return f"{samples}{first_of(lines, _MOST_TENSORS)}" if lines else ""

    def _what_filled_the_device(self) -> list[str]:
        split = self.facts.split
        if split is None:
            return ["Not known: the device keeps no statistics."]
        total = sum(split.values())
        rows = [
            (name, format_size(n), format_share(n, total)) for name, n in [*self._categories(), ("allocated", total)]
        ]
        what = (
            "Activations are everything that was allocated since the batch began and has no other owner, which "
            "includes temporary memory of the backward pass. What is left of earlier, without an owner, is other."
        )
        return [markdown_table(Table(("category", "size", "share"), rows)), what]

    def _holders(self) -> list[str]:
        least = _WORTH_A_LINE * (self.facts.stats.allocated or 0)
        held = [holding for holding in self.held.found if holding.n_bytes > least][:_MOST_ROWS]
        lines = [f"- {holding_in_words(holding)}" for holding in held]
        if self.held.garbage_bytes > least:
            lines.append(f"- garbage that Python had not collected, {format_size(self.held.garbage_bytes)}")
        return ["\n".join(lines)]

    def _modules(self) -> list[str]:
        rows = [(f"`{name}`", format_size(n_bytes)) for name, n_bytes in self.advice.modules if n_bytes][:_MOST_ROWS]
        in_training = self.facts.moment.stage == "train"
        when = "keeps for the backward pass in" if in_training else "holds at the peak of"
        text = f"These are the activations that each module {when} the traced step."
        return [text, markdown_table(Table(("module", "activations"), rows))] if rows else []

    def _outside(self) -> list[str]:
        least = _WORTH_A_LINE * (self.facts.stats.allocated or 0)
        lines = [(line, format_size(n)) for line, n in self.advice.lines if n > least][:_MOST_ROWS]
        large = [variable for variable in self.facts.variables if variable.n_bytes > least][:_MOST_ROWS]
        variables = [(variable.where, variable.tensors, format_size(variable.n_bytes)) for variable in large]
        of_variables = Table(("variable when memory ran out", "tensor", "size"), variables, "llr")
        of_lines = Table(("line, at the peak of the traced step", "size"), lines)
        return [markdown_table(table) for table in (of_variables, of_lines) if table.rows]

    def _others(self) -> list[str]:
        text = "" if self.processes is None else in_words(self.processes)
        return [f"{text[0].upper()}{text[1:]}."] if text else []

    def _files(self) -> list[str]:
        path = "" if self.snapshot is None else short_path(str(self.snapshot))
        viewers = "`memtools snapshot` draws it; https://pytorch.org/memory_viz shows every block."
        return [path and f"Memory snapshot: `{path}`. {viewers}"]
