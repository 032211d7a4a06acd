"""The verdict: what limits a run, with the evidence and the next thing to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from lightning_memtools.memory.sizes import format_share, format_size
from lightning_memtools.reporting.phrases import counted
from lightning_memtools.verdict.run_facts import RankFacts, RunFacts

Limit = Literal[
    "error", "unknown", "slow-rank", "input-bound", "validation-bound", "overhead-bound", "compute-bound"
]  # fmt: skip

THRESHOLDS = {
    "least steps": 8,
    "data": 0.25,
    "validation": 0.4,
    "rest": 0.4,
    "lead": 1.05,
    "behind": 0.5,
    "slow rank": 1.25,
    "slow rank's part": 0.1,
    "fuller rank": 1.25,
    "nearly full": 0.95,
    "usable": 0.9,
    "activations": 0.1,
}
"""docs/run.md says what each one decides."""
_MOST_PROBLEMS, _LONGEST = 4, 220


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict on a run: what limits its speed, and whether something is wrong.

    Attributes:
        limit: The factor that limits the run's speed, such as "input-bound".
        healthy: True if the run is limited by computation only, and nothing is wrong.
        lines: The verdict as text, at most ten lines: the limit and its evidence, what to try next, and measurements.
        largest_batch: The largest batch size that should fit, estimated from the bytes per sample; None if unknown.
    """

    limit: Limit
    healthy: bool
    lines: tuple[str, ...]
    largest_batch: int | None


class _Reason(NamedTuple):
    limit: Limit
    evidence: str
    next: str


def judge(facts: RunFacts) -> RunVerdict:
    """Return the verdict on a run, from the measurements of all its ranks."""
    reason, problems = _limit_of(facts), list(_problems_of(facts))
    healthy = reason.limit == "compute-bound" and not problems
    largest = largest_batch(facts.fullest)
    lines = [f"{'healthy, ' if healthy else ''}{reason.limit}: {reason.evidence}", f"Next: {reason.next}"]
    lines += [*_time_lines(facts.ranks[0]), *_memory_lines(facts, largest)]
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS - 1 :] = [f"{len(problems) - _MOST_PROBLEMS + 1} more, in summary.json."]
    checks = f" ({counted(facts.checks, 'check', 'checks')} of TrainingDoctor)" if facts.checks else ""
    lines += [f"Problem: {text[:_LONGEST]}" for text in problems] or [f"Health: nothing was found{checks}."]
    return RunVerdict(reason.limit, healthy, tuple(lines), largest)


def _limit_of(facts: RunFacts) -> _Reason:
    """Return what limits the run's speed, such as the data loader. Of several limits, the first checked is returned."""
    slow, steps, least = slow_rank(facts.ranks), facts.ranks[0].steps, THRESHOLDS["least steps"]
    if facts.error:
        return _Reason("error", facts.error, "read the error above, and the reports beside summary.json.")
    if steps < least:
        return _Reason("unknown", f"{counted(steps, 'step', 'steps')} measured.", f"train at least {least + 1} steps.")
    if slow is not None:
        waits = slow.host_s.get("data", 0.0) > slow.host_s.get("forward", 0.0)
        why = f"rank {slow.rank} takes {_time(_own_ms(slow))} until its backward, most of it "
        why += (
            f"{'the wait for its data' if waits else 'its forward'}; the others {_time(_others_ms(slow, facts.ranks))}."
        )
        work = "an equal share of data and disk" if waits else "equal work"
        return _Reason("slow-rank", why, f"give every rank {work}: the others wait for rank {slow.rank} in each step.")
    return _limit_by_shares(facts, facts.ranks[0])


def _limit_by_shares(facts: RunFacts, first: RankFacts) -> _Reason:
    lead = _lead(first)
    if first.share("data") >= THRESHOLDS["data"]:
        return _Reason("input-bound", f"{first.share('data'):.0%} of training waits for data.", _faster_loader(facts))
    if first.share("validation") >= THRESHOLDS["validation"]:
        why = f"{first.share('validation'):.0%} of the fit is validation."
        return _Reason("validation-bound", why, "check_val_every_n_epoch or limit_val_batches of the Trainer.")
    if lead is not None and lead < THRESHOLDS["lead"] and first.behind_share < THRESHOLDS["behind"]:
        why = f"the GPU takes {lead:.2f} times as long as the host takes to queue its work, so it waits for the host."
        larger = "larger operations: a larger batch, torch.compile, a fused optimizer."
        return _Reason(
            "overhead-bound", why, "end the waits for the GPU that are named below." if facts.waits else larger
        )
    if first.share("rest") >= THRESHOLDS["rest"]:
        why = f"{first.share('rest'):.0%} of training is spent outside of data, forward, backward and optimizer."
        return _Reason("overhead-bound", why, "a larger batch, cheaper callbacks, or a larger log_every_n_steps.")
    computes = sum(first.share(phase) for phase in ("forward", "backward", "optimizer"))
    why = f"{computes:.0%} of training is forward, backward and optimizer."
    return _Reason("compute-bound", why, "to go faster: bf16-mixed precision, torch.compile, or a faster device.")


def slow_rank(ranks: Sequence[RankFacts]) -> RankFacts | None:
    """Return the slowest rank, for which the others wait; None if no rank is much slower than the others.

    Only the time that the host spends on data and forward is compared, because ranks wait for each other in backward.
    """
    if len(ranks) == 1 or not all(rank.steps for rank in ranks):
        return None
    slowest = max(ranks, key=_own_ms)
    others_ms = _others_ms(slowest, ranks)
    is_slow = _own_ms(slowest) >= THRESHOLDS["slow rank"] * others_ms
    part = (_own_ms(slowest) - others_ms) / (slowest.step_ms or 1.0)
    return slowest if is_slow and part >= THRESHOLDS["slow rank's part"] else None


def _own_ms(rank: RankFacts) -> float:
    return 1000 * (rank.host_s.get("data", 0.0) + rank.host_s.get("forward", 0.0)) / max(1, rank.steps)


def _others_ms(slowest: RankFacts, ranks: Sequence[RankFacts]) -> float:
    return median(_own_ms(rank) for rank in ranks if rank is not slowest)


def _lead(rank: RankFacts) -> float | None:
    """Return the GPU time of forward and backward divided by the host time of these phases; None without a GPU."""
    if rank.device_s is None:
        return None
    device, host = (times.get("forward", 0.0) + times.get("backward", 0.0) for times in (rank.device_s, rank.host_s))
    return device / host if host else None


def _faster_loader(facts: RunFacts) -> str:
    if facts.num_workers == 0:
        return "DataLoader(num_workers=4, persistent_workers=True): with its num_workers=0, nothing is read ahead."
    workers = "workers" if facts.num_workers is None else f"workers than num_workers={facts.num_workers}"
    return f"more {workers}, persistent_workers=True, or less work in the dataset."


def largest_batch(rank: RankFacts) -> int | None:
    """Return the largest batch size that should fit, estimated from the bytes per sample at the peak of training.

    Return None if activations take only a small part of the peak, or if the necessary measurements are missing. The
    true maximum is somewhat larger, because not all of the bytes counted per sample grow with the batch.
    """
    composition = rank.composition_bytes or {}
    grows, peak = composition.get("activations", 0) + composition.get("inputs", 0), sum(composition.values())
    if not rank.capacity_bytes or not rank.batch_size or not peak or grows < THRESHOLDS["activations"] * peak:
        return None
    cached = max(0, (rank.reserved_bytes or 0) - (rank.peak_bytes or 0))
    room = THRESHOLDS["usable"] * rank.capacity_bytes - cached - (peak - grows)
    return max(0, int(room * rank.batch_size / grows))


def _problems_of(facts: RunFacts) -> Iterator[str]:
    if facts.leaks:
        yield "a leak: the warning of EmptyCache, or TrainingDoctor's, names what holds the tensors."
    if facts.skipped_steps:
        yield f"{counted(facts.skipped_steps, 'step was', 'steps were')} skipped for NaN or Inf."
    if facts.loss_spikes:
        yield f"{counted(facts.loss_spikes, 'spike', 'spikes')} of the loss or gradient norm."
    if facts.waits:
        yield f"training_step waits for the GPU at {', '.join(facts.waits[:3])} (seen in one step)."
    capacity, reserved = facts.fullest.capacity_bytes, facts.fullest.reserved_bytes
    if capacity and reserved and reserved >= THRESHOLDS["nearly full"] * capacity:
        yield f"memory is nearly full: {format_share(reserved, capacity)} of the device was reserved."
    yield from (*facts.findings, *facts.remarks)


def _time_lines(rank: RankFacts) -> Iterator[str]:
    if rank.step_ms is not None:
        phases = ("data", "forward", "backward", "optimizer", "rest")
        parts = ", ".join(f"{phase} {rank.share(phase):.0%}" for phase in phases)
        clock = "host's" if rank.device_s is None else "GPU's"
        yield (
            f"Time: {_time(rank.step_ms)} a step ({clock} time, {rank.steps} steps): {parts}; "
            f"validation {rank.share('validation'):.0%} of the fit."
        )


def _memory_lines(facts: RunFacts, largest: int | None) -> Iterator[str]:
    rank, whole = facts.fullest, facts.fullest.capacity_bytes
    if rank.peak_bytes is None or rank.reserved_bytes is None:
        yield f"Memory: {facts.device} keeps no peaks. See a GPU's with `memtools run --dry`."
        return
    text = f"Memory: peak {format_size(rank.peak_bytes)} allocated, {format_size(rank.reserved_bytes)} reserved"
    if whole:
        text += f" of {format_size(whole)}, headroom {format_size(max(0, whole - rank.reserved_bytes))}"
    parts = sorted((rank.composition_bytes or {}).items(), key=lambda part: -part[1])
    peak = sum(size for _, size in parts)
    yield f"{text}{''.join(f'; {name} {format_share(size, peak)}' for name, size in parts[:3] if size)}."
    if largest is not None and rank.batch_size and largest > rank.batch_size:
        yield (
            f"Batch: about {largest} would fit ({rank.batch_size} now), by a sample's bytes at the peak; not tried. "
            "BatchSizeTuner finds the largest."
        )
    peaks = {each.rank: each.peak_bytes for each in facts.ranks if each.peak_bytes}
    least = min(peaks, key=lambda number: peaks[number])
    if rank.peak_bytes >= THRESHOLDS["fuller rank"] * peaks[least]:
        yield f"Ranks: rank {rank.rank} is the fullest; rank {least} has a peak of {format_size(peaks[least])}."


def _time(ms: float) -> str:
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"  # noqa: PLR2004
