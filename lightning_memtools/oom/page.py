"""The report: as markdown, as the few lines of a console, and as the note that the error takes along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_memtools.memory.processes import GpuProcess
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.oom.actions import Action
from lightning_memtools.oom.facts import Facts, describe_batch, listed
from lightning_memtools.oom.fragmentation import Verdict
from lightning_memtools.reporting.tables import Table, markdown_table

_SHORT = 3
_WORTH_A_LINE = 0.01
_STANDS_FOR = {
    "(backward)": "`(backward)` stands for gradients on their way through the model.",
    "(outside)": "`(outside)` stands for what was made outside of modules, such as the loss.",
}


@dataclass(slots=True, kw_only=True)
class Page:
    """All that a report says.

    Attributes:
        facts: What was known when memory ran out.
        error: The error's own text.
        where: The user's line of code; "" where it is not known.
        request: What the program asked for, in bytes, where that is known: the device is asked for whole segments.
        actions: What can be done, in the order of its worth.
        modules: Activations by module, largest first.
        modules_traced: Whether those are of a traced step; else they are what the device held.
        expandable: What expandable segments would have done; None where that was not looked at.
        processes: Other processes on the device, or why they are not known; None where there is no real device.
        notes: What else is to be known.
        top: How many modules are listed.
        path: Where the report lies; None where it could not be written.
        snapshot: Where the memory snapshot lies, or why there is none.
        seconds: How long making it took.
    """

    facts: Facts
    error: str = ""
    where: str = ""
    request: int | None = None
    actions: Sequence[Action] = ()
    modules: Sequence[tuple[str, int]] = ()
    modules_traced: bool = False
    expandable: Verdict | None = None
    processes: Sequence[GpuProcess] | str | None = None
    notes: Sequence[str] = field(default_factory=list)
    top: int = 10
    path: Path | None = None
    snapshot: Path | str = ""
    seconds: float | None = None

    @property
    def headline(self) -> str:
        """What failed where, in a sentence."""
        facts = self.facts
        asked = "" if facts.requested is None else f": {format_size(facts.requested)} were asked for"
        free = "" if facts.free is None or not asked else f", {format_size(facts.free)} were free"
        return f"Out of memory on {facts.device} ({facts.moment}){asked}{free}."

    def markdown(self) -> str:
        """The whole report."""
        parts = [f"# {self.headline}", *self._what_to_do(), *self._facts()]
        parts += [*self._split(), *self._modules(), *self._fragmentation(), *self._others(), *self._files()]
        return "\n\n".join(parts) + "\n"

    def console(self) -> str:
        """The short form: what failed, what filled the device, what to do first, and where the rest stands."""
        lines = [self.headline]
        if self.facts.split is not None:
            lines.append(f"It held {_in_words(self.facts.split.by_category)}.")
        # "(backward)" and the like are no modules.
        first = next(((name, size) for name, size in self.modules if size and not _stands_for(name)), None)
        if first is not None and first[1] > _WORTH_A_LINE * (self.facts.stats.allocated or 0):
            lines.append(f"Most activations: {first[0]}, {format_size(first[1])}.")
        helping = [action for action in self.actions if action.checked and not action.is_useless][:_SHORT]
        lines += [f"{number}. {action}" for number, action in enumerate(helping, 1)]
        if not helping and any(action.checked for action in self.actions):
            lines.append("Nothing that was checked helps.")
        unchecked = [action for action in self.actions if not action.checked]
        if unchecked:
            reasons = list(dict.fromkeys(action.detail for action in unchecked))
            why = f": {reasons[0]}" if len(reasons) == 1 else ", for reasons that the report names"
            lines.append(f"Not checked{why}: {', '.join(_begin_small(action.title) for action in unchecked)}.")
        lines.append(f"Report: {self.path}" if self.path else "The report could not be written to a file.")
        return "\n".join(lines)

    def note(self) -> str:
        """What the error says from now on: the console's lines."""
        return f"OOMReport: {self.console()}"

    def _what_to_do(self) -> list[str]:
        parts = ["## What to do"]
        helping = [action for action in self.actions if action.checked and not action.is_useless]
        if helping:
            parts.append("\n".join(f"{number}. {action}" for number, action in enumerate(helping, 1)))
            parts.append(
                "Every peak is that of a step traced on fake tensors. It is held against what is left for the step: "
                "the device's capacity without what other processes hold, and without what this one holds beside it."
            )
        rest = [action for action in self.actions if not action.checked]
        if rest:
            parts.append("\n".join(f"- {action}" for action in rest))
        useless = [action for action in self.actions if action.is_useless]
        if useless:
            parts.append("\n".join(["Checked, and of no help:", "", *(f"- {action}" for action in useless)]))
        parts += [note if note.endswith(".") else f"{note}." for note in self.notes]
        return parts if len(parts) > 1 else []

    def _facts(self) -> list[str]:
        facts, stats = self.facts, self.facts.stats
        rows = [("when", str(facts.moment)), ("where", _joined(facts.module and f"module {facts.module}", self.where))]
        lines = describe_batch(facts.batch)
        if lines:
            size = f"{facts.samples} samples: " if facts.samples is not None else ""
            first = "" if facts.is_own_batch else " (of the stage's first batch; this one was not there yet)"
            rows.append(("batch", f"{size}{', '.join(lines)}{first}"))
        rows.append(("asked for", _size(facts.requested) + self._for_a_request()))
        sizes = (
            ("capacity", stats.capacity),
            ("share this process may reserve", None if facts.fraction >= 1 else f"{100 * facts.fraction:.1f}%"),
            ("reserved by PyTorch", stats.reserved),
            ("allocated to tensors", stats.allocated),
            ("reserved but unusable", facts.unusable),
            ("used by others, the CUDA context among them", facts.used_by_others),
            ("free", facts.free),
        )
        rows += [(name, size if isinstance(size, str) else _size(size)) for name, size in sizes if size is not None]
        if stats.alloc_retries:
            rows.append(("allocation retries before", str(stats.alloc_retries)))
        parts = ["## What happened", markdown_table(Table(("", ""), [row for row in rows if row[1]]))]
        if facts.problem:
            parts.append(f"Not all could be read when memory ran out: {facts.problem}.")
        if self.error:
            parts.append(f"```\n{self.error}\n```")
        return parts

    def _for_a_request(self) -> str:
        if self.request is None or self.request == self.facts.requested:
            return ""
        return f", the segment for a request of {format_size(self.request)}"

    def _split(self) -> list[str]:
        split = self.facts.split
        if split is None:
            return ["## What filled the device", "Not known: the device keeps no statistics."]
        total = sum(split.by_category.values())
        rows = [
            (name, format_size(n_bytes), _share(n_bytes, total))
            for name, n_bytes in sorted(split.by_category.items(), key=lambda item: -item[1])
        ]
        rows.append(("allocated", format_size(total), _share(total, total)))
        parts = ["## What filled the device", markdown_table(Table(("category", "size", "share"), rows))]
        if split.buffers > _WORTH_A_LINE * total:
            parts.append(f"Of other, {format_size(split.buffers)} are the model's buffers.")
        if split.older > _WORTH_A_LINE * total:
            parts.append(
                f"{format_size(split.older)} of all this were there before the batch and belong to neither model, "
                "optimizers nor inputs: what hooks, callbacks and your own lists hold, what the optimizer or the "
                "strategy keeps apart, libraries' workspaces."
            )
        if not split.exact:
            parts.append("Activations are what came with the batch and has no other owner, backward's temporaries too.")
        return parts

    def _modules(self) -> list[str]:
        shown = [(name, n_bytes) for name, n_bytes in self.modules if n_bytes][: self.top]
        if not shown:
            return []
        if not self.modules_traced:
            whose = "held at that moment"
        elif self.facts.moment.stage == "train":
            whose = "kept by the traced step when its forward pass has ended"
        else:
            whose = "held at the peak of the traced step"
        table = Table(("module", "activations"), [(f"`{name}`", format_size(n_bytes)) for name, n_bytes in shown])
        text = [f"Activations {whose}.", *(_stands_for(name) for name, _ in shown)]
        return ["## Modules with most activations", " ".join(filter(None, text)), markdown_table(table)]

    def _fragmentation(self) -> list[str]:
        unusable = self.facts.unusable
        if unusable is None:
            return []
        reserved = self.facts.stats.reserved or 0
        text = (
            f"{format_size(unusable)} ({_share(unusable, reserved)} of what is reserved) were free, but in pieces "
            "between blocks in use, so that they could neither serve the request nor go back to the device."
        )
        setting = "`expandable_segments:True`"
        if self.expandable is None:
            verdict = f"Whether {setting} would have helped is not known: no history was recorded."
        elif self.expandable.served is None:
            verdict = f"Whether {setting} would have helped is not known: {self.expandable.why}."
        elif self.expandable.served:
            verdict = f"With {setting} this request would have been served, as a replay of the recorded history shows."
        else:
            verdict = f"{setting} would not have helped: {self.expandable.why}."
        return ["## Fragmentation", f"{text} {verdict}"]

    def _others(self) -> list[str]:
        if self.processes is None:
            return []
        text = self.processes if isinstance(self.processes, str) else listed(self.processes) or "none"
        return ["## Other processes on the device", f"{text[0].upper()}{text[1:]}."]

    def _files(self) -> list[str]:
        parts = []
        if isinstance(self.snapshot, Path):
            parts.append(
                f"Memory snapshot: `{self.snapshot}`. Drop it on https://pytorch.org/memory_viz to see every block."
            )
        elif self.snapshot:
            parts.append(f"No memory snapshot: {self.snapshot}.")
        if self.seconds is not None:
            parts.append(f"This report took {self.seconds:.1f} s.")
        return ["## Files", *parts] if parts else []


def _stands_for(name: str) -> str:
    return _STANDS_FOR.get(name, "")


def _in_words(split: Mapping[str, int]) -> str:
    parts = [
        f"{format_size(n_bytes)} of {name}" for name, n_bytes in sorted(split.items(), key=lambda i: -i[1]) if n_bytes
    ]
    return ", ".join(parts) or "nothing"


def _begin_small(title: str) -> str:
    return f"{title[0].lower()}{title[1:]}"


def _size(n_bytes: int | None) -> str:
    return "not known" if n_bytes is None else format_size(n_bytes)


def _share(n_bytes: int, whole: int) -> str:
    return f"{100 * n_bytes / whole:.1f}%" if whole else ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
