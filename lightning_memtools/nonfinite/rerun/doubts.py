"""Why a step that is run again may differ from the step itself."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from lightning_memtools.nonfinite.batches import MicroBatch, in_batch
from lightning_memtools.nonfinite.rerun.rerun import Outcome
from lightning_memtools.nonfinite.rerun.start import Start, changed_in_place


def doubts_about(micro: Sequence[MicroBatch], unkept: Sequence[str]) -> list[str]:
    """What is known to be missing for running the step again exactly, one sentence each."""
    doubts = []
    gone = [str(each.index) for each in micro if each.batch is None]
    if gone:
        doubts.append(f"Batch {', '.join(gone)} of the accumulation was no longer held: it takes no part.")
    for each in micro:
        if each.batch is None or not isinstance(each.start, Start):
            continue
        doubts += [
            f"{in_batch(name, each.index)} was changed in place by the step: a replay begins with what was left."
            for name in (changed_in_place(each.batch, each.start.versions) if each.changed is None else each.changed)
        ]
    if unkept:
        doubts.append(f"Buffer {', '.join(unkept)} could not be put back to before the step.")
    return doubts


def digest_of(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bits, its dtype and shape."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return digest_of(tensor.indices()) + digest_of(tensor.values())
    bits = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + bits).hexdigest()


def digests_of(gradients: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each gradient."""
    return {name: digest_of(gradient) for name, gradient in gradients.items()}


def is_same_number(one: float, other: float) -> bool:
    """Whether two losses are the same in every bit; NaN is NaN."""
    return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)


def mismatches(losses: Sequence[float], digests: Mapping[str, str], again: Outcome) -> list[str]:
    """What a step run again gave otherwise than the step itself, one sentence each; empty if all bits are the same."""
    now = [float(loss) for loss in again.losses]
    found = []
    if len(now) != len(losses):
        found.append(f"It gave {len(now)} losses, the step {len(losses)}.")
    for position, (before, after) in enumerate(zip(losses, now, strict=False)):
        if not is_same_number(before, after):
            found.append(f"Loss {position} is {after!r}, in the step it was {before!r}.")
    different = [name for name, digest in digests_of(again.gradients).items() if digests.get(name, digest) != digest]
    different += [name for name in digests if name not in again.gradients]
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""  # noqa: PLR2004, names enough
        found.append(f"Of {len(digests)} gradients {len(different)} differ: {', '.join(different[:3])}{more}.")
    return found
