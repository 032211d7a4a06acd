"""Memory after every event of the traced steps, by what it is for, and its picture as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from lightning_memtools.memory.sizes import GIB, MIB, format_size
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.simulation.recording import WORKSPACE, Allocation, AllocationRecorder, is_passing

PARTS = ("parameters", "gradients", "optimizer", "activations", "inputs", "temporaries", "workspace", "other")
"""The categories of an estimate."""

_PART_OF = {
    Category.PARAMETER: "parameters",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER: "optimizer",
    Category.ACTIVATION: "activations",
    Category.INPUT: "inputs",
    WORKSPACE: "workspace",
}

WIDTH, HEIGHT = 960, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 72, 56
_COLUMNS = 480
# Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#56B4E9",
    "activations": "#009E73",
    "inputs": "#F0E442",
    "temporaries": "#D55E00",
    "workspace": "#CC79A7",
    "other": "#999999",
}
_SHORT = {"inputs": "", "setup": "", "outputs": "", "clip": "clip", "optimizer": "optim."}

_SIZE = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
_DASHED = 'stroke="black" stroke-width="1.5" stroke-dasharray="5 3"'


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """The history of a trace; an event is the allocation or the freeing of one block.

    Attributes:
        parts: For each of `PARTS`, its bytes after every event. They add up to ``allocated``.
        allocated: Bytes allocated after every event.
        reserved: Bytes reserved after every event.
        marks: The beginnings of phases: (event, step counted from 1, phase).
        peak: The first event at which ``allocated`` is highest.
    """

    parts: dict[str, list[int]]
    allocated: Sequence[int]
    reserved: Sequence[int]
    marks: Sequence[tuple[int, int, str]]
    peak: int

    def at(self, event: int) -> dict[str, int]:
        """Return the bytes of each part after an event."""
        return {name: sizes[event] for name, sizes in self.parts.items()}


def part_of(allocation: Allocation) -> str:
    """Return which of `PARTS` a block belongs to."""
    if is_passing(allocation):
        return "temporaries"
    return _PART_OF.get(allocation.kind, "other")


def timeline_of(recorder: AllocationRecorder) -> MemoryTimeline:
    """Return the timeline of a recorder's allocations."""
    n_events = len(recorder.allocated)
    changes = {name: [0] * (n_events + 1) for name in PARTS}
    for allocation in recorder.allocations.values():
        change = changes[part_of(allocation)]
        change[allocation.born] += allocation.size
        change[n_events if allocation.died is None else allocation.died] -= allocation.size
    parts = {}
    for name, change in changes.items():
        total, sizes = 0, []
        for delta in change[:n_events]:
            total += delta
            sizes.append(total)
        parts[name] = sizes
    peak = max(range(n_events), key=recorder.allocated.__getitem__) if n_events else 0
    marks = [(event, step + 1, phase) for event, step, phase in recorder.marks]
    return MemoryTimeline(parts, recorder.allocated, recorder.reserved, marks, peak)


def draw(timeline: MemoryTimeline, *, title: str, peak: str) -> str:
    """Draw a timeline as SVG.

    Args:
        timeline: The timeline. Of the events in one column of pixels the highest is drawn.
        title: The title of the picture.
        peak: The place of the peak, in words.
    """
    columns = list(_columns(timeline))
    top = max([*timeline.reserved, 1])
    scale = _Scale(n_columns=max(len(columns), 1), n_events=max(len(timeline.allocated), 1), top=top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {_SIZE} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
        *_grid(scale),
        *_areas(timeline, columns, scale),
        *_reserved(timeline, columns, scale),
        *_phases(timeline, scale),
        *_peak(timeline, scale, peak),
        *_legend(timeline),
        "</svg>",
    ]
    return "\n".join(parts)


class _Scale:
    """Maps events and sizes to positions in the picture."""

    def __init__(self, *, n_columns: int, n_events: int, top: int) -> None:
        self.n_columns, self.n_events, self.top = n_columns, n_events, top * 1.08
        self.bottom = HEIGHT - _BOTTOM

    def x(self, event: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * event / self.n_events

    def y(self, n_bytes: float) -> float:
        return self.bottom - (self.bottom - _TOP) * n_bytes / self.top


def _columns(timeline: MemoryTimeline) -> Iterator[int]:
    """Yield one event for each column: the one with most allocated, so that no peak is lost."""
    n_events = len(timeline.allocated)
    n_columns = min(_COLUMNS, n_events)
    for column in range(n_columns):
        first = column * n_events // n_columns
        last = max(first + 1, (column + 1) * n_events // n_columns)
        yield max(range(first, last), key=timeline.allocated.__getitem__)


def _areas(timeline: MemoryTimeline, columns: Sequence[int], scale: _Scale) -> Iterator[str]:
    floor = [0] * len(columns)
    for name in PARTS:
        ceiling = [below + timeline.parts[name][event] for below, event in zip(floor, columns, strict=True)]
        if ceiling != floor:
            upper = [f"{scale.x(event):.1f},{scale.y(size):.1f}" for event, size in zip(columns, ceiling, strict=True)]
            lower = [f"{scale.x(event):.1f},{scale.y(size):.1f}" for event, size in zip(columns, floor, strict=True)]
            points = " ".join([*upper, *reversed(lower)])
            yield f'<polygon points="{points}" fill="{_COLOURS[name]}"><title>{name}</title></polygon>'
        floor = ceiling


def _reserved(timeline: MemoryTimeline, columns: Sequence[int], scale: _Scale) -> Iterator[str]:
    points = " ".join(f"{scale.x(event):.1f},{scale.y(timeline.reserved[event]):.1f}" for event in columns)
    yield f'<polyline points="{points}" fill="none" {_DASHED}/>'


def _grid(scale: _Scale) -> Iterator[str]:
    unit, name = (GIB, "GiB") if scale.top >= 2 * GIB else (MIB, "MiB")
    spacing = _round_spacing(scale.top / unit / 5)
    number = 0
    while number * spacing * unit <= scale.top:
        y = scale.y(number * spacing * unit)
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * spacing:g} {name}</text>'
        number += 1


def _round_spacing(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least this much."""
    power = 10.0 ** len(str(int(least))) / 10 if least >= 1 else 10.0**-6
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10


def _phases(timeline: MemoryTimeline, scale: _Scale) -> Iterator[str]:
    ends = [*(event for event, _, _ in timeline.marks[1:]), scale.n_events]
    last_step = 0
    free_from = 0.0
    for (event, step, phase), end in zip(timeline.marks, ends, strict=True):
        x = scale.x(event)
        if step > last_step:
            last_step = step
            yield _vertical(x, scale.bottom + 30, 'stroke="#333"')
            yield f'<text x="{x + 4:.1f}" y="{scale.bottom + 32:.1f}" font-weight="bold">step {step}</text>'
        elif end > event:
            yield _vertical(x, scale.bottom, 'stroke="#999" stroke-dasharray="2 3"')
        word = _SHORT.get(phase, phase)
        # Only where there is room: 7 pixels a letter.
        if word and scale.x(end) - x > 7 * len(word) and x >= free_from:
            middle = (x + scale.x(end)) / 2
            yield f'<text x="{middle:.1f}" y="{scale.bottom + 16:.1f}" text-anchor="middle">{word}</text>'
            free_from = scale.x(end)


def _vertical(x: float, bottom: float, style: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" {style}/>'


def _peak(timeline: MemoryTimeline, scale: _Scale, words: str) -> Iterator[str]:
    if not timeline.allocated:
        return
    size = timeline.allocated[timeline.peak]
    x, y = scale.x(timeline.peak), scale.y(size)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="black" stroke-width="2"/>'
    text = escape(f"peak allocated {format_size(size)}: {words}")
    yield f'<text x="{_LEFT}" y="38">{text}</text>'


def _legend(timeline: MemoryTimeline) -> Iterator[str]:
    x = float(_LEFT)
    for name in (*PARTS, "reserved"):
        if name != "reserved" and not any(timeline.parts[name]):
            continue
        if name == "reserved":
            yield f'<line x1="{x}" x2="{x + 14}" y1="53" y2="53" {_DASHED}/>'
        else:
            yield f'<rect x="{x}" y="47" width="12" height="12" fill="{_COLOURS[name]}"/>'
        yield f'<text x="{x + 18}" y="57">{name}</text>'
        x += 34 + 7 * len(name)
