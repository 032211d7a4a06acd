"""The dynamic program finds plans as good as the best of all possible plans, under the same memory model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
from hypothesis import HealthCheck, assume, given, settings

from lightning_memtools.checkpointing.memory_model import (
    PART,
    Product,
    Range,
    Ranges,
    Unit,
    boundaries,
    estimate,
    last_saving,
    may_be_range,
)
from lightning_memtools.checkpointing.optimal_ranges import OptimalRanges, Row

MOST_PLANS = 50_000


def all_plans(
    units: Sequence[Unit],
    start: int,
    stop: int,
    whole: Ranges = (),
    rows: Sequence[Row] | None = None,
    *,
    outermost: bool = False,
) -> Iterator[Ranges]:
    """Every set of ranges within [start, stop), nested in every way, but for the range `whole` itself.

    Outermost ranges of a single layer keep every set of the products that may be kept.
    """
    if start >= stop:
        yield ()
        return
    yield from all_plans(units, start + 1, stop, rows=rows, outermost=outermost)
    for end in range(start + 1, stop + 1):
        here = Range(start, end)
        if rows is None:
            may = may_be_range(units, start, end)
        else:
            may = units[start].may_start and any({start, end} <= set(row) for row in rows)
        if may and here not in whole:
            for inner in all_plans(units, start, end, (here,), rows):
                for rest in all_plans(units, end, stop, rows=rows, outermost=outermost):
                    yield (Range(start, end, inner), *rest)
        if may and outermost:
            for kept in sets_of_products(units, start, end, rows):
                for rest in all_plans(units, end, stop, rows=rows, outermost=True):
                    yield (Range(start, end, (), kept), *rest)


def sets_of_products(
    units: Sequence[Unit], start: int, stop: int, rows: Sequence[Row] | None
) -> Iterator[tuple[int, ...]]:
    """Every set of products that run again in these units and are not overwritten, if these are a single layer."""
    if stop > start + 1 if rows is None else not any((start, stop) in itertools.pairwise(row) for row in rows):
        return
    end = last_saving(units, start, stop)
    every = [(at, one) for at in range(start, stop) for one in units[at].products]
    useful = [
        number for number, (at, one) in enumerate(every)
        if one.may_be_kept and (at < end or (at == end and not one.in_tail))
    ]  # fmt: skip
    for n in range(1, len(useful) + 1):
        yield from itertools.combinations(useful, n)


sizes = st.integers(0, 6)
products = st.builds(
    Product, sizes, st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from([True, True, False])
)


@st.composite
def chains(draw, least: int, most: int) -> list[Unit]:
    units: list[Unit] = []
    for at in range(draw(st.integers(least, most))):
        same = draw(st.integers(0, 4)) == 0
        before = boundaries(units)[-1]
        in_kept, out_bytes = draw(st.integers(0, before.n_bytes)), draw(sizes)
        if same:
            out_bytes = draw(st.integers(0, before.n_bytes))
        out_held = draw(st.integers(0, out_bytes or (before.n_bytes if same else 0)))
        inside = tuple(draw(st.lists(products, max_size=2))) if at % 4 == 1 else ()
        operations = draw(st.integers(0, 9)) + sum(one.operations for one in inside)
        base, forward = draw(sizes), draw(sizes)
        top = draw(st.one_of(st.none(), st.integers(base, base + 6)))
        units.append(
            Unit(
                own_bytes=draw(sizes),
                out_bytes=out_bytes,
                in_kept=in_kept,
                in_added=draw(st.integers(0, min(in_kept, before.missing(PART)))),
                out_kept=0 if same else draw(st.integers(0, out_held)),
                out_held=out_held,
                same_storage=same,
                may_start=draw(st.integers(0, 4)) > 0,
                pinned=draw(st.integers(0, 5)) == 0,
                chain=draw(st.sampled_from([None, 0, 0, 0, 1])),
                saves=draw(st.integers(0, 4)) > 0,
                operations=operations,
                tail_operations=draw(st.integers(0, operations)),
                forward_bytes=forward,
                stopped_bytes=draw(st.integers(0, forward)),
                dropping_bytes=draw(st.integers(0, forward)),
                forward_base=draw(sizes),
                backward_base=base,
                backward_peak=top,
                again_backward_peak=None if top is None else draw(st.integers(0, top)),
                freed_input_bytes=draw(st.integers(0, 3)),
                again_bytes=draw(sizes),
                products=inside,
                alongside=tuple(draw(st.lists(st.tuples(st.integers(0, at - 1), sizes), max_size=2)) if at else ()),
            )
        )
    return units


@st.composite
def trees(draw, least: int, most: int) -> tuple[list[Unit], list[Row]]:
    """Units, and rows of places among them that lie within one another or apart, as modules in modules do."""
    units = draw(chains(least, most))
    rows: list[Row] = []

    def split(start: int, stop: int, depth: int) -> None:
        inside = draw(st.sets(st.integers(start, stop), max_size=4))
        row = tuple(sorted(inside))
        if len(row) > 1:
            rows.append(row)
            if depth:
                for first, last in itertools.pairwise(row):
                    if last > first + 1:
                        split(first, last, depth - 1)

    split(0, len(units), 3)
    return units, rows


def least_by_brute_force(units: Sequence[Unit], rows: Sequence[Row] | None = None) -> dict[int, int]:
    """For every peak that some plan has, the least extra operations of all plans with that peak or a lower one."""
    found: dict[int, int] = {}
    for plan in all_plans(units, 0, len(units), rows=rows, outermost=True):
        one = estimate(units, plan)
        found[one.peak_bytes] = min(found.get(one.peak_bytes, 10**9), one.extra_operations)
    best, least = {}, 10**9
    for peak in sorted(found):
        least = min(least, found[peak])
        best[peak] = least
    return best


def assert_as_good_as_any(units: Sequence[Unit], rows: Sequence[Row] | None = None) -> None:
    best = least_by_brute_force(units, rows)
    limit = estimate(units, ()).peak_bytes
    planner = OptimalRanges(units, limit, resolution=max(limit, 1), rows=rows)
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


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains(7, 9))
def test_no_plan_recomputes_less_in_the_same_memory_on_chains_of_nine_layers(units):
    # A chain in which most layers may be anywhere in a range has millions of plans, which take minutes.
    plans = itertools.islice(all_plans(units, 0, len(units), outermost=True), MOST_PLANS + 1)
    assume(sum(1 for _ in plans) <= MOST_PLANS)
    assert_as_good_as_any(units)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees(2, 9))
def test_no_plan_recomputes_less_in_the_same_memory_on_trees_of_nine_units(tree):
    assert_as_good_as_any(*tree)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains(1, 6), st.integers(1, 40))
def test_every_point_of_the_frontier_is_found_again_by_its_own_peak(units, resolution):
    limit = estimate(units, ()).peak_bytes
    planner = OptimalRanges(units, limit, resolution=resolution)
    for peak, operations in planner.frontier():
        plan = planner.best(peak)
        assert plan is not None
        assert estimate(units, plan).extra_operations == operations


def long_chain(n: int) -> list[Unit]:
    """Blocks of five layers with tensors of several sizes, after a first layer and before a loss."""
    sizes_and_work = [(4096, 900), (4096, 40), (1024, 900), (1024, 30), (1024, 50)]
    blocks = [
        Unit(
            out_bytes=size,
            in_kept=0 if at == 3 else sizes_and_work[at - 1][0],
            in_added=0 if at in {2, 3} else sizes_and_work[at - 1][0],
            out_kept=size if at == 1 else 0,
            out_held=size if at == 1 else 0,
            own_bytes=256 if at == 3 else 0,
            chain=0,
            operations=operations,
            tail_operations=operations // 10,
            forward_bytes=size,
            stopped_bytes=size // 2,
            dropping_bytes=size,
            backward_base=512,
            backward_peak=512 + 2 * size,
        )
        for at, (size, operations) in enumerate(sizes_and_work)
    ]
    return [Unit(out_bytes=1024, operations=100), *(blocks[at % 5] for at in range(n)), Unit(saves=False)]


def test_a_long_chain_is_solved_coarsely_to_within_five_percent_of_the_exact_plan():
    units = long_chain(80)
    limit = estimate(units, ()).peak_bytes
    exact = OptimalRanges(units, limit)
    coarse = OptimalRanges(units, limit, most_transitions=60**3)
    for share in (0.2, 0.3, 0.5, 0.8):
        plan, best = coarse.best(share * limit), exact.best(share * limit)
        assert plan is not None
        assert best is not None
        mine, least = estimate(units, plan), estimate(units, best)
        assert mine.peak_bytes <= share * limit * 1.001
        work = 3 * sum(unit.operations for unit in units) + least.extra_operations
        # It can be lower by a little: sizes are rounded for each cell, here of two layers, and not for each layer.
        assert mine.extra_operations <= least.extra_operations + 0.05 * work


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains(4, 12), st.integers(1, 60), st.floats(0.1, 1))
def test_a_coarse_plan_keeps_to_its_memory_and_costs_what_the_frontier_says(units, transitions, share):
    limit = estimate(units, ()).peak_bytes
    planner = OptimalRanges(units, limit, resolution=max(limit, 1), most_transitions=transitions)
    plan = planner.best(share * limit)
    if plan is None:
        return
    mine, allowed = estimate(units, plan), share * limit + 1e-6
    assert mine.peak_bytes <= allowed
    for one in plan:
        assert may_be_range(units, one.start, one.stop)
    cheapest = [extra for peak, extra in planner.frontier() if peak <= allowed]
    assert mine.extra_operations <= min(cheapest)
