"""Compares a measured peak with its budget and with the recorded peak, and says what grew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lightning_memtools.budgets.current_test import CurrentTest, current_test
from lightning_memtools.budgets.memory_diff import MemoryDiff
from lightning_memtools.budgets.peak_memory import PeakMemory, read_recorded
from lightning_memtools.memory.sizes import format_size, parse_size

_MOST = 8


def parse_budget(at_most: object, *, what: str = "at_most") -> int:
    """Return a budget such as "8GiB" in bytes; `what` names it in error messages.

    Raises:
        ValueError: The budget is not a size with a unit, or is not positive.
    """
    __tracebackhide__ = True
    try:
        n_bytes = parse_size(at_most)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if n_bytes <= 0:
        raise ValueError(f"{what} is {at_most!r}: a budget has to be above zero.")
    return n_bytes


def judge(peak: PeakMemory, at_most: int | None) -> None:
    """Compare a peak with its budget. In a test, also compare it with the recorded peak, or record the new peak.

    Raises:
        AssertionError: The peak is over the budget, or above the recorded peak by more than the tolerance.
        ValueError: There is neither a budget nor a recorded peak.
    """
    __tracebackhide__ = True
    test = current_test()
    recorded: PeakMemory | None = None
    name = "" if test is None else test.next_name()
    if test is not None:
        recorded = read_recorded(test.settings.file).get(name)
        peak = peak.recorded_form(test.settings.root)
        test.peaks[name] = peak.as_json()
    if at_most is not None and peak.allocated > at_most:
        raise AssertionError(f"{name}: {over_budget(peak, at_most, recorded)}".removeprefix(": "))
    if test is not None and test.settings.records:
        return
    if test is not None and recorded is not None:
        _compare(test, name, recorded, peak)
    elif at_most is None:
        raise ValueError(
            f'{name or "This code"} has no budget, and no recorded peak. Give at_most, such as "8GiB", or record the '
            "peak of a test: pytest --memory-record."
        )


def _compare(test: CurrentTest, name: str, recorded: PeakMemory, peak: PeakMemory) -> None:
    __tracebackhide__ = True
    diff = MemoryDiff(recorded, peak, ("recorded", "now"))
    tolerance, again = test.settings.tolerance, "Record anew: pytest --memory-record."
    grown = [one for one in diff.totals if one.difference > tolerance * one.before]
    fallen = [one for one in diff.totals if -one.difference > tolerance * one.before]
    if diff.remarks:
        change = diff.totals[0]
        test.notes.append(
            f"{name}: {' '.join(diff.remarks)} The change of {change.sign} allocated ({change.percent}) is not held "
            f"against the test. {again}"
        )
    elif grown:
        figures = {one.name: f"{one.sizes}, {one.sign} ({one.percent or 'as recorded'})" for one in diff.totals}
        lines = [
            f"{name}: memory grew by more than {100 * tolerance:g}% over the recorded peak.",
            *_figures(peak, figures),
            *_grown(diff),
            "Next: free what grew; if it is meant to be there, record it: pytest --memory-record.",
        ]
        raise AssertionError("\n".join(lines))
    elif fallen:
        changes = ", ".join(f"{one.sign} {one.name.removeprefix('peak ')}" for one in fallen)
        test.notes.append(f"{name} takes less than recorded: {changes}. To keep it so: pytest --memory-record.")


def over_budget(peak: PeakMemory, at_most: int, recorded: PeakMemory | None = None) -> str:
    """Return the error message for a peak over its budget. It lists what grew since the peak was recorded."""
    over, size = format_size(peak.allocated - at_most), format_size(peak.allocated)
    lines = [
        f"the peak of allocated memory is {size}, {over} over the budget of {format_size(at_most)}.",
        *_figures(peak, {"peak reserved": format_size(peak.reserved)}),
    ]
    diff = None if recorded is None else MemoryDiff(recorded, peak, ("recorded", "now"))
    if diff is not None and not diff.remarks and diff.totals[0].difference > 0:
        lines += ["What grew over the recorded peak:", *_grown(diff)]
    else:
        for head, sizes in (("at the peak", peak.categories), ("by module", peak.modules), ("by line", peak.lines)):
            lines += _largest(head, sizes.items())
    return "\n".join(lines)


def _figures(peak: PeakMemory, rows: Mapping[str, str]) -> Iterator[str]:
    engine = {"cuda": "PyTorch's CUDA code", "simulation": "simulated"}.get(peak.engine, peak.engine)
    made = [engine, f"torch {peak.torch}" if peak.torch else "", f"for {peak.gpu}" if peak.gpu else ""]
    shown = {**rows, "reached at": peak.peak_at, "measured by": ", ".join(filter(None, made))}
    width = max(map(len, shown))
    yield from (f"  {head:<{width}}  {text}" for head, text in shown.items() if text)


def _grown(diff: MemoryDiff) -> Iterator[str]:
    for head, changes in (("at the peak", diff.categories), ("by module", diff.modules), ("by line", diff.lines)):
        if changes:
            yield f"{head}:"
            for one in changes[:_MOST]:
                yield f"{one.sign[:1]} {one.sign[1:]:>9}  {one.name or '(no module)'}  ({one.sizes})"
            if len(changes) > _MOST:
                yield f"  and {len(changes) - _MOST} more"


def _largest(head: str, sizes: Iterable[tuple[str, int]]) -> Iterator[str]:
    ranked = sorted(((name, size) for name, size in sizes if name), key=lambda one: -one[1])[:_MOST]
    if ranked:
        yield f"{head}:"
        yield from (f"  {format_size(size):>9}  {name}" for name, size in ranked)
