"""The batches of the steps whose verdict is still out, and whether they hold NaN or Inf themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memtools.nonfinite.detect import floats_of

MAX_SAMPLES = 8  # of the bad ones, how many are listed


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A batch of the present step.

    Attributes:
        index: Its batch index within the epoch.
        batch: The batch as training_step got it; None once it was let go, a copy on the host once it was moved there.
        losses: The losses that were sent backward for it, as 0-dim tensors, as training_step returned them.
        keep: Its loss is known to be bad: it is not let go.
        start: What it began with, if that is noted: a `rerun.start.Start`.
        steps_before: In manual optimization: how many updates had been made in this batch when this step began.
        resumed: Where there were such: what was there to begin with after the last of them.
        changed: Once it was moved to the host: the names of its tensors that had been written in place by then.
    """

    index: int
    batch: Any
    losses: list[Tensor] = field(default_factory=list)
    keep: bool = False
    start: Any = None
    steps_before: int = 0
    resumed: Any = None
    changed: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class BadInput:
    """A tensor of a batch that holds NaN or Inf.

    Attributes:
        name: Where it is in the batch, such as ``batch["x"]``.
        batch_idx: Which batch.
        n_nan: How many elements are NaN.
        n_inf: How many are Inf or -Inf.
        n_elements: How many there are.
        samples: The first positions along dimension 0 that are affected, one more than are listed.
        is_mask: It holds 0 and -inf only, as attention masks do.
    """

    name: str
    batch_idx: int
    n_nan: int
    n_inf: int
    n_elements: int
    samples: tuple[int, ...]
    is_mask: bool

    def __str__(self) -> str:
        kinds = " and ".join(f"{n} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n)
        where = f", in {list_samples(self.samples)}" if self.samples else ""
        return f"{in_batch(self.name, self.batch_idx)} holds {kinds} in {self.n_elements} elements{where}"


def in_batch(name: str, batch_idx: int) -> str:
    """A tensor of a batch, as text: "batch 5" where it is the batch itself."""
    return f"batch {batch_idx}" if name == "batch" else f"{name} of batch {batch_idx}"


def list_samples(samples: Sequence[int]) -> str:
    """As "sample 3" or "samples 3, 4"."""
    more = ", ..." if len(samples) > MAX_SAMPLES else ""
    return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:MAX_SAMPLES]))}{more}"


def named_tensors(collection: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings, sequences and dataclasses, each with the expression that leads to it."""
    if isinstance(collection, Tensor):
        yield name, collection
    elif isinstance(collection, Mapping):
        for key, value in collection.items():
            yield from named_tensors(value, f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]")
    elif isinstance(collection, tuple) and hasattr(collection, "_fields"):
        for key in collection._fields:
            yield from named_tensors(getattr(collection, key), f"{name}.{key}")
    elif isinstance(collection, Sequence) and not isinstance(collection, str | bytes):
        for index, value in enumerate(collection):
            yield from named_tensors(value, f"{name}[{index}]")
    elif dataclasses.is_dataclass(collection) and not isinstance(collection, type):
        for each in dataclasses.fields(collection):
            yield from named_tensors(getattr(collection, each.name), f"{name}.{each.name}")


def bad_inputs(micro: MicroBatch) -> list[BadInput]:
    """The tensors of the batch that hold NaN or Inf. Waits for the device: for use after a trip."""
    found = []
    for name, tensor in named_tensors(micro.batch, "batch"):
        floats = floats_of(tensor)
        if floats is None:
            continue
        bad = ~torch.isfinite(floats)
        if not bad.any():
            continue
        has_samples = floats.dim() > 0 and tensor.layout == torch.strided
        samples = bad.flatten(1).any(1) if has_samples and floats.dim() > 1 else bad
        positions = samples.nonzero()[: MAX_SAMPLES + 1, 0].tolist() if has_samples else []
        n_nan = int(floats.isnan().sum())
        found.append(
            BadInput(
                name=name,
                batch_idx=micro.index,
                n_nan=n_nan,
                n_inf=int(bad.sum()) - n_nan,
                n_elements=floats.numel(),
                samples=tuple(positions),
                is_mask=bool(((floats == 0) | (floats == -torch.inf)).all()),
            )
        )
    return found


def let_go(held: Sequence[MicroBatch], budget_bytes: int, move: Callable[[MicroBatch], object] | None = None) -> None:
    """Drop the oldest batches, or `move` them elsewhere. `held`: newest first.

    The newest is alive anyway. One more is kept, and of those before it what fits the budget.
    """
    spent = 0
    for micro in held[2:]:
        if micro.batch is None or micro.keep or micro.changed is not None:
            continue
        spent += sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(micro.batch, ""))
        if spent > budget_bytes and move is not None:
            move(micro)
        elif spent > budget_bytes:
            micro.batch = None
