"""The dynamic program finds plans as good as the best of all possible plans, under the same memory model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from lightning_memtools.checkpointing.memory_model import (
    Product,
    Range,
    Ranges,
    Unit,
    boundaries,
    estimate,
    ranges_with_products,
)
from lightning_memtools.checkpointing.optimal_ranges import OptimalRanges


def may_be_range(units: Sequence[Unit], start: int, stop: int) -> bool:
    """One chain, nothing pinned, and an input that is not overwritten."""
    chain = units[start].chain
    inside = all(unit.chain == chain and not unit.pinned for unit in units[start:stop])
    return chain is not None and units[start].may_start and inside


def all_plans(
    units: Sequence[Unit], start: int, stop: int, whole: Ranges = (), *, outermost: bool = False
) -> Iterator[Ranges]:
    """Every set of ranges within [start, stop), nested in every way, but for the range `whole` itself.

    Outermost ranges of a single layer keep products too.
    """
    if start >= stop:
        yield ()
        return
    yield from all_plans(units, start + 1, stop, outermost=outermost)
    for end in range(start + 1, stop + 1):
        here = Range(start, end)
        if not may_be_range(units, start, end) or here in whole:
            continue
        found = [Range(start, end, inner) for inner in all_plans(units, start, end, (here,))]
        if outermost and end == start + 1:
            found += ranges_with_products(units, start, end)
        for one in found:
            for rest in all_plans(units, end, stop, outermost=outermost):
                yield (one, *rest)


sizes = st.integers(0, 6)
products = st.builds(
    Product, sizes, st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from([True, True, False])
)


@st.composite
def chains(draw, least: int, most: int) -> list[Unit]:
    units: list[Unit] = []
    for at in range(draw(st.integers(least, most))):
        same = draw(st.integers(0, 4)) == 0
        before, out_bytes = boundaries(units)[-1], draw(sizes)
        inside = tuple(draw(st.lists(products, max_size=2))) if at % 4 == 1 else ()
        operations = draw(st.integers(0, 9)) + sum(one.operations for one in inside)
        forward, base = draw(sizes), draw(sizes)
        top = draw(st.one_of(st.none(), st.integers(base, base + 6)))
        units.append(
            Unit(
                own_bytes=draw(sizes),
                in_kept=draw(st.integers(0, before)),
                out_kept=0 if same else draw(st.integers(0, out_bytes)),
                out_held=draw(st.booleans()),
                out_bytes=0 if same else out_bytes,
                same_storage=same,
                may_start=draw(st.integers(0, 4)) > 0,
                pinned=draw(st.integers(0, 5)) == 0,
                chain=draw(st.sampled_from([None, 0, 0, 0, 1])),
                saves=draw(st.integers(0, 4)) > 0,
                operations=operations,
                tail_operations=draw(st.integers(0, operations)),
                forward_bytes=forward,
                dropping_bytes=draw(st.integers(0, forward)),
                forward_base=draw(sizes),
                backward_base=base,
                backward_peak=top,
                again_backward_peak=None if top is None else draw(st.integers(0, top)),
                freed_input_bytes=draw(st.integers(0, 3)),
                products=inside,
            )
        )
    return units


def least_by_brute_force(units: Sequence[Unit]) -> dict[int, int]:
    """For every peak that some plan has, the least extra operations of all plans with that peak or a lower one."""
    found: dict[int, int] = {}
    for plan in all_plans(units, 0, len(units), outermost=True):
        one = estimate(units, plan)
        found[one.peak_bytes] = min(found.get(one.peak_bytes, 10**9), one.extra_operations)
    best, least = {}, 10**9
    for peak in sorted(found):
        least = min(least, found[peak])
        best[peak] = least
    return best


def assert_as_good_as_any(units: Sequence[Unit]) -> None:
    best = least_by_brute_force(units)
    limit = estimate(units, ()).peak_bytes
    planner = OptimalRanges(units, limit, resolution=max(limit, 1))
    for peak in range(limit + 1):
        plan = planner.best(peak)
        reachable = [cost for known, cost in best.items() if known <= peak]
        assert (plan is None) == (not reachable), peak
        if plan is not None:
            mine = estimate(units, plan)
            assert mine.peak_bytes <= peak
            assert mine.extra_operations == min(reachable)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains(1, 6))
def test_no_plan_recomputes_less_in_the_same_memory(units):
    assert_as_good_as_any(units)


def long_chain(n: int) -> list[Unit]:
    """Blocks of five layers with tensors of several sizes, after a first layer and before a loss."""
    sizes_and_work = [(4096, 900), (4096, 40), (1024, 900), (1024, 30), (1024, 50)]
    blocks = [
        Unit(
            out_bytes=size,
            in_kept=0 if at == 3 else sizes_and_work[at - 1][0],
            out_kept=size if at == 1 else 0,
            out_held=at == 1,
            own_bytes=256 if at == 3 else 0,
            chain=0,
            operations=operations,
            tail_operations=operations // 10,
            forward_bytes=size,
            dropping_bytes=size,
            backward_base=512,
            backward_peak=512 + 2 * size,
        )
        for at, (size, operations) in enumerate(sizes_and_work)
    ]
    return [Unit(out_bytes=1024, operations=100), *(blocks[at % 5] for at in range(n)), Unit(saves=False)]


def test_chains_of_any_length_are_solved():
    units = long_chain(500)
    limit = estimate(units, ()).peak_bytes
    plan = OptimalRanges(units, limit).best(0.2 * limit)
    assert plan is not None
    assert estimate(units, plan).peak_bytes <= 0.23 * limit
