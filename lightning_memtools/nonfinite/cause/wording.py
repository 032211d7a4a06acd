"""A root, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_memtools.nonfinite.batches import list_samples
from lightning_memtools.nonfinite.cause.slices import Origin, Root
from lightning_memtools.nonfinite.cause.trace import Event


def describe_root(root: Root, class_name: str, samples: Sequence[int], batch_idx: int) -> str:
    """The operation, its place and what went in, as a sentence."""
    event = root.event
    where = f"{_where(event, class_name)}"
    if root.leaf is not None:
        what = root.leaf.name if root.leaf.origin is Origin.ELSEWHERE else f"{root.leaf.origin} {root.leaf.name}"
        if root.leaf.origin is Origin.BATCH:
            what = "the batch" if root.leaf.name == "batch" else root.leaf.name
        return f"The first bad value was in {what}, first used by {event.operation} in {where}."
    by = event.operation
    if event.backward:
        by = f"{event.operation} in the backward of {event.of_forward}" if event.of_forward else f"{by} in backward"
    return f"The first bad value was made by {by} in {where}{_took(event)}{_affected(samples, batch_idx)}."


def _where(event: Event, class_name: str) -> str:
    function = f".{event.place.function}" if event.place is not None and not event.place.caller else ""
    module = event.module or f"{class_name}{function}"
    return module if event.place is None else f"{module} ({event.place})"


def _took(event: Event) -> str:
    divides = event.operation.rstrip("_").endswith("div")
    told = [n for n in event.scalars if not math.isfinite(n) or (divides and not n)]
    took = [*map(str, event.took), *(f"the number {number:g}" for number in told)]
    return f", from {' and '.join(took)}" if took else ""


def _affected(samples: Sequence[int], batch_idx: int) -> str:
    return f"; it affects {list_samples(samples)} of batch {batch_idx}" if samples else ""
