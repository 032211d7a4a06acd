"""Compares a measured peak with its budget and with the recorded peak, and says what grew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_memtools.budgets.current_test import CurrentTest, current_test
from lightning_memtools.budgets.memory_diff import Change, MemoryDiff
from lightning_memtools.budgets.peak_memory import PeakMemory, RecordedPeaksError
from lightning_memtools.memory.sizes import format_size, parse_size

_MOST = 8


def parse_budget(at_most: object, *, what: str = "at_most") -> int:
    """Return a budget in bytes.

    Raises:
        ValueError: It is no size with a unit, or not above zero.
    """
    __tracebackhide__ = True
    if not isinstance(at_most, str):
        raise ValueError(f'{named_test()}{what} is {at_most!r}: give a size with a unit, such as "8GiB".')  # noqa: TRY004
    try:
        n_bytes = parse_size(at_most)
    except ValueError as error:
        if at_most.strip().startswith("-"):
            raise ValueError(f"{named_test()}{what} is {at_most!r}: a budget has to be above zero.") from None
        raise ValueError(f"{named_test()}{what}: {error}") from None
    if n_bytes <= 0:
        raise ValueError(f"{named_test()}{what} is {at_most!r}: a budget has to be above zero.")
    return n_bytes


def named_test() -> str:
    """Return the start of a message: the name of the test that runs, or nothing."""
    test = current_test()
    return "" if test is None else f"{test.name}: "


def judge(peak: PeakMemory, at_most: int | None) -> None:
    """Compare a peak with its budget, and within a test with the recorded peak; or record it.

    Raises:
        AssertionError: It is over the budget, or more than the tolerance above the recorded peak.
        ValueError: There is neither a budget nor a recorded peak.
    """
    __tracebackhide__ = True
    test = current_test()
    if test is None:
        if at_most is None:
            raise ValueError(
                'at_most is missing: give a budget such as at_most="8GiB". Without one a peak is compared with the '
                "recorded one, which needs pytest and its plugin of lightning_memtools."
            )
        if peak.allocated > at_most:
            raise AssertionError(over_budget(peak, at_most))
        return
    name = test.next_name()
    peak = peak.named_from(test.settings.root)
    try:
        recorded = test.recorded.peaks.get(name)
    except RecordedPeaksError as error:
        raise RecordedPeaksError(f"{name}: {error}") from None
    test.peaks[name] = peak.shortened().as_json()
    if at_most is not None and peak.allocated > at_most:
        raise AssertionError(f"{name}: {over_budget(peak, at_most, recorded)}")
    if test.settings.records:
        return
    if recorded is None:
        if at_most is None:
            raise ValueError(
                f"{name} has no budget and no recorded peak in {test.settings.file.name}. Give a budget such as "
                '"8GiB", or record one: pytest --memory-record.'
            )
        return
    _compare(test, name, recorded, peak)


def _compare(test: CurrentTest, name: str, recorded: PeakMemory, peak: PeakMemory) -> None:
    __tracebackhide__ = True
    diff = MemoryDiff(recorded, peak.shortened(), ("recorded", "now"))
    allocated, reserved = diff.totals
    if diff.remarks:
        test.notes.append(
            f"{name}: {' '.join(diff.remarks)} The change of {allocated.sign} allocated ({allocated.percent}) is not "
            "held against the test. Record anew: pytest --memory-record."
        )
        return
    tolerance = test.settings.tolerance
    if any(one.difference > tolerance * one.before for one in diff.totals):
        file = test.settings.file.name
        lines = [
            f"{name}: memory grew by more than {100 * tolerance:g}% over the peak recorded in {file}.",
            *_figures(peak, [*_since(allocated), *_since(reserved)]),
            *_grown(diff),
            "Next: free what grew; if it is meant to be there, record it: pytest --memory-record.",
        ]
        raise AssertionError("\n".join(lines))
    if any(-one.difference > tolerance * one.before for one in diff.totals):
        changes = ", ".join(f"{one.sign} {one.name.removeprefix('peak ')}" for one in diff.totals if one.difference)
        test.notes.append(
            f"{name} takes less than recorded: {changes}. Record it to keep it so: pytest --memory-record."
        )


def over_budget(peak: PeakMemory, at_most: int, recorded: PeakMemory | None = None) -> str:
    """Say that a peak is over its budget, at which moment, and what grew since it was recorded, or what is there."""
    over, size = format_size(peak.allocated - at_most), format_size(peak.allocated)
    lines = [
        f"the peak of allocated memory is {size}, {over} over the budget of {format_size(at_most)}.",
        *_figures(peak, [("peak reserved", format_size(peak.reserved))]),
    ]
    diff = None if recorded is None else MemoryDiff(recorded, peak.shortened(), ("recorded", "now"))
    if diff is not None and not diff.remarks and diff.totals[0].difference > 0:
        lines += _figures(None, _since(diff.totals[0]))
        lines += _grown(diff)
        return "\n".join(lines)
    for head, sizes in (("at the peak", peak.categories), ("by module", peak.modules), ("by line", peak.lines)):
        lines += _largest(head, sizes.items())
    return "\n".join(lines)


def _figures(peak: PeakMemory | None, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    shown = list(rows)
    if peak is not None:
        engine = {"cuda": "PyTorch's CUDA code", "simulation": "simulated"}.get(peak.engine, peak.engine)
        made = [engine, f"torch {peak.torch}" if peak.torch else "", f"for {peak.gpu}" if peak.gpu else ""]
        shown += [("reached at", peak.peak_at)] if peak.peak_at else []
        shown.append(("measured by", ", ".join(filter(None, made))))
    width = max((len(head) for head, _ in shown), default=0)
    yield from (f"  {head:<{width}}  {text}" for head, text in shown)


def _since(change: Change) -> list[tuple[str, str]]:
    was, now = format_size(change.before), format_size(change.after)
    if not change.difference:
        return [(change.name, f"{now}, as recorded")]
    return [(change.name, f"{was} -> {now}, {change.sign} ({change.percent})")]


def _grown(diff: MemoryDiff) -> Iterator[str]:
    for head, changes in (("at the peak", diff.categories), ("by module", diff.modules), ("by line", diff.lines)):
        if changes:
            yield f"{head}:"
            for one in changes[:_MOST]:
                sizes = f"{format_size(one.before)} -> {format_size(one.after)}"
                yield f"{'+' if one.difference > 0 else '-'} {one.sign[1:]:>9}  {one.name or '(no module)'}  ({sizes})"
            if len(changes) > _MOST:
                yield f"  and {len(changes) - _MOST} more"


def _largest(head: str, sizes: Iterable[tuple[str, int]]) -> Iterator[str]:
    ranked = sorted(((name, size) for name, size in sizes if name), key=lambda one: -one[1])[:_MOST]
    if ranked:
        yield f"{head}:"
        yield from (f"  {format_size(size):>9}  {name}" for name, size in ranked)
