"""A root, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_memtools.nonfinite.batches import MAX_SAMPLES
from lightning_memtools.nonfinite.cause.slices import Origin, Root
from lightning_memtools.nonfinite.cause.trace import Event


def describe_root(root: Root, class_name: str, samples: Sequence[int], batch_idx: int) -> str:
    """The operation, its place and what went in, as a sentence."""
    event = root.event
    where = f"{_where(event, class_name)}"
    if root.leaf is not None:
        what = root.leaf.name if root.leaf.origin is Origin.CONSTANT else f"{root.leaf.origin} {root.leaf.name}"
        if root.leaf.origin is Origin.BATCH:
            what = root.leaf.name
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
    numbers = [f"the number {number:g}" for number in event.scalars if not number or math.isnan(number)]
    took = [*map(str, event.took), *(numbers if event.operation.endswith("div") else [])]
    return f", from {' and '.join(took)}" if took else ""


def _affected(samples: Sequence[int], batch_idx: int) -> str:
    return f"; it affects {list_samples(samples)} of batch {batch_idx}" if samples else ""


def list_samples(samples: Sequence[int]) -> str:
    """As "sample 3" or "samples 3, 4"."""
    more = ", ..." if len(samples) > MAX_SAMPLES else ""
    return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:MAX_SAMPLES]))}{more}"
