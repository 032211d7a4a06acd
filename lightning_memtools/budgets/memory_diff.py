"""The change from one peak to another: totals, categories, and the modules and lines that changed, largest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memtools.budgets.peak_memory import PeakMemory, by_pattern, without_number
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.tables import Table, markdown_table

_MOST_ROWS = 15


@dataclass(frozen=True, slots=True)
class Change:
    """The bytes of one category, module or line of code in each of two peaks; 0 in a peak that does not contain it.

    Attributes:
        name: A category, the path of a module, or a line of code.
        before: The bytes in the first peak.
        after: The bytes in the second peak.
    """

    name: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        """The bytes added from the first peak to the second; negative if there were fewer in the second."""
        return self.after - self.before

    @property
    def sign(self) -> str:
        """The difference as text with its sign, such as "+1.20 GiB"."""
        change = self.difference
        return f"{'+' if change > 0 else '-'}{format_size(abs(change))}" if change else "0"

    @property
    def sizes(self) -> str:
        """Both values as text, such as "180 MiB -> 204 MiB"."""
        return f"{format_size(self.before)} -> {format_size(self.after)}"

    @property
    def percent(self) -> str:
        """The difference as a percentage of the first value, such as "+12.5%"; "" if the first value is 0."""
        return f"{100 * self.difference / self.before:+.1f}%" if self.before and self.difference else ""


@dataclass(frozen=True, slots=True)
class MemoryDiff:
    """Two peaks and what changed from the first to the second.

    Attributes:
        before: The first peak.
        after: The second peak.
        names: The names of the two peaks.
    """

    before: PeakMemory
    after: PeakMemory
    names: tuple[str, str] = ("before", "after")

    @property
    def totals(self) -> list[Change]:
        """Two changes, which may be zero: of the peak of allocated memory, and of the peak of reserved memory."""
        return [
            Change("peak allocated", self.before.allocated, self.after.allocated),
            Change("peak reserved", self.before.reserved, self.after.reserved),
        ]

    @property
    def categories(self) -> list[Change]:
        """The categories that changed, largest change first."""
        return _changes(self.before.categories, self.after.categories)

    @property
    def modules(self) -> list[Change]:
        """The modules that changed, largest change first. Those that differ in a number are summed: "layers.*.norm"."""
        return _changes(by_pattern(self.before.modules), by_pattern(self.after.modules))

    @property
    def lines(self) -> list[Change]:
        """The lines of code whose bytes at the peak changed, largest change first. Line numbers are ignored."""
        changes = _changes(self.before.lines, self.after.lines, key=without_number)
        return [one for one in changes if one.name]

    @property
    def remarks(self) -> list[str]:
        """Sentences on why the two peaks are hard to compare, such as different GPUs or versions of torch."""
        pairs = ((name, getattr(self.before, name), getattr(self.after, name)) for name in ("engine", "torch", "gpu"))
        return [
            f"The two were not made alike: {name} {before or 'not known'} and {after or 'not known'}."
            for name, before, after in pairs
            if before != after and (name != "gpu" or (before and after))
        ]

    def tables(self) -> Iterator[Table]:
        """Yield a table of totals, then tables of the categories, of the modules, and of the lines that changed."""
        yield Table(("memory", *self.names, "change", ""), [(*_row(one), one.percent) for one in self.totals])
        for head, changes in (("at the peak", self.categories), ("module", self.modules), ("line", self.lines)):
            if changes:
                yield Table((head, *self.names, "change"), _rows(changes))

    def to_markdown(self) -> str:
        """Return the whole diff as markdown, for a report or a comment on a pull request."""
        return "\n\n".join([self.headline, *self.remarks, *map(markdown_table, self.tables()), *self.moments])

    @property
    def headline(self) -> str:
        """A sentence that says by how much the peak changed."""
        total = self.totals[0]
        if not total.difference:
            return f"The peak of allocated memory is the same: {format_size(total.after)}."
        word = "grew" if total.difference > 0 else "fell"
        return (
            f"The peak of allocated memory {word} by {format_size(abs(total.difference))} ({total.percent}): "
            f"{format_size(total.before)} to {format_size(total.after)}."
        )

    @property
    def moments(self) -> list[str]:
        """Sentences on when the two peaks occurred, as far as known."""
        moments = (self.before.peak_at, self.after.peak_at)
        if moments[0] == moments[1]:
            return [f"Both peaks are at {moments[0]}."] if moments[0] else []
        return [f"Peak of {name}: at {at}." for name, at in zip(self.names, moments, strict=True) if at]

    def as_json(self) -> dict[str, Any]:
        """Return the whole diff as dictionaries, lists, strings and numbers, ready for JSON."""
        parts = {"totals": self.totals, "categories": self.categories, "modules": self.modules, "lines": self.lines}
        changed = {
            name: [asdict(one) | {"difference": one.difference} for one in changes] for name, changes in parts.items()
        }
        sides = [
            side.as_json() | {"name": name} for side, name in zip((self.before, self.after), self.names, strict=True)
        ]
        return {"format": 1, "before": sides[0], "after": sides[1], **changed, "remarks": self.remarks}


def _changes(before: Mapping[str, int], after: Mapping[str, int], key: Callable[[str], str] = str) -> list[Change]:
    """Return the changes in bytes, largest first. Names for which `key` returns the same string are summed."""
    found: dict[str, Change] = {}
    for name, size in before.items():
        known = found.get(key(name), Change(name, 0, 0))
        found[key(name)] = Change(known.name, known.before + size, 0)
    for name, size in after.items():
        known = found.get(key(name), Change(name, 0, 0))
        found[key(name)] = Change(name if not known.after else known.name, known.before, known.after + size)
    changed = (one for one in found.values() if one.difference)
    return sorted(changed, key=lambda one: (-abs(one.difference), one.name))


def _row(one: Change) -> tuple[str, str, str, str]:
    return one.name or "(no module)", format_size(one.before), format_size(one.after), one.sign


def _rows(changes: Sequence[Change]) -> list[tuple[str, str, str, str]]:
    rest = changes[_MOST_ROWS:]
    rows = [_row(one) for one in changes[:_MOST_ROWS]]
    if rest:
        left = Change(f"{len(rest)} more", sum(one.before for one in rest), sum(one.after for one in rest))
        rows.append(_row(left))
    return rows
