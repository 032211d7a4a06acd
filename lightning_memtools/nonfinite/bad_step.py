"""A step and its batches until it is decided, what is known of a bad one, and how the outcome of a rerun can differ."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memtools._torch import is_in_memory
from lightning_memtools.memory.nested_tensors import map_tensors, named_tensors
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.nonfinite.finite_checks import BadTensor, find_bad, floats_of, is_mask, rows_with
from lightning_memtools.reporting.phrases import first_of
from lightning_memtools.state.starts import BatchStart, UpdateStart, changed_in_place, simple_items

MAX_SAMPLES = 8  # of the bad ones, how many are listed


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A batch of the present step."""

    index: int  # the batch index within the epoch
    batch: Any  # the batch as training_step got it; None after it was released, a copy on the host after it was moved
    # the losses that were sent backward for it, as 0-dim tensors, as training_step returned them
    losses: list[Tensor] = field(default_factory=list)
    keep: bool = False  # whether its loss is known to be bad, so that it is not released
    start: BatchStart | None = None  # the state that it began with; None where that is not recorded
    steps_before: int = 0  # in manual optimization: the number of updates in this batch before this step began
    resumed: BatchStart | None = None  # the state after the last of those updates; None if there were none
    # after it was moved to the host: the names of its tensors that had been written in place by then
    changed: tuple[str, ...] | None = None

    def keep_if_bad(self) -> None:
        """Note whether its loss is bad, as far as that is known without waiting for a device."""
        self.keep = self.keep or any(each.is_cpu and not math.isfinite(each.item()) for each in self.losses)

    def written_in_place(self) -> tuple[str, ...]:
        """Return the names of the batch's tensors that were written since it was taken, as far as that is known."""
        if self.changed is not None:
            return self.changed
        return tuple(changed_in_place(self.batch, self.start.versions)) if isinstance(self.start, BatchStart) else ()


@dataclass(frozen=True, slots=True)
class BadInput:
    """A tensor of a batch that holds NaN or Inf."""

    name: str  # its place in the batch, such as ``batch["x"]``
    batch_idx: int  # the index of the batch
    n_nan: int  # the number of elements that are NaN
    n_inf: int  # the number of elements that are Inf or -Inf
    n_elements: int  # the number of all elements
    samples: tuple[int, ...]  # the first positions along dimension 0 that are affected, one more than are listed
    is_mask: bool  # whether it holds 0 and -inf only, as attention masks do

    def __str__(self) -> str:
        kinds = " and ".join(f"{n} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n)
        where = f", in {list_samples(self.samples)}" if self.samples else ""
        return f"{in_batch(self.name, self.batch_idx)} holds {kinds} in {self.n_elements} elements{where}"


def in_batch(name: str, batch_idx: int) -> str:
    """Return the name of a tensor of a batch: "batch 5" where it is the batch itself."""
    return f"batch {batch_idx}" if name == "batch" else f"{name} of batch {batch_idx}"


def list_samples(samples: Sequence[int]) -> str:
    """Return text such as "sample 3" or "samples 3, 4"."""
    more = ", ..." if len(samples) > MAX_SAMPLES else ""
    return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:MAX_SAMPLES]))}{more}"


def bad_inputs(micro: MicroBatch) -> list[BadInput]:
    """Return the tensors of the batch that hold NaN or Inf. Waits for the device; for use after a bad step."""
    found = []
    for name, tensor in named_tensors(micro.batch, "batch"):
        floats = floats_of(tensor)
        if floats is None:
            continue
        bad = ~torch.isfinite(floats)
        if not bad.any():
            continue
        has_samples = floats.dim() > 0 and tensor.layout == torch.strided
        n_nan = int(floats.isnan().sum())
        found.append(
            BadInput(
                name=name,
                batch_idx=micro.index,
                n_nan=n_nan,
                n_inf=int(bad.sum()) - n_nan,
                n_elements=floats.numel(),
                samples=tuple(rows_with(bad, MAX_SAMPLES + 1)) if has_samples else (),
                is_mask=is_mask(floats),
            )
        )
    return found


def release_batches(
    held: Sequence[MicroBatch], budget_bytes: int, move: Callable[[MicroBatch], object] | None = None
) -> None:
    """Drop the oldest batches, or `move` them elsewhere.

    The newest batch is alive anyway. One more is kept, and older ones for as long as they fit into the budget.

    Args:
        held: The batches, newest first.
        budget_bytes: The memory that the older ones may take.
        move: Called with each batch that does not fit; when left out, such batches are dropped.
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


def move_to_host(micro: MicroBatch) -> None:
    """Replace the batch's tensors by copies on the host. On a GPU the copy is queued, and the host does not wait."""
    micro.changed = micro.written_in_place()
    micro.batch = map_tensors(micro.batch, _on_host)


def _on_host(tensor: Tensor) -> Tensor:
    device = VirtualDevice.current()
    if (tensor.device.type == "cpu" and device is None) or not is_in_memory(tensor):
        return tensor  # it is already on the host
    with torch.no_grad(), nullcontext() if device is None else device.host():
        # With its strides: they choose the kernel that computes, and so the last bits.
        is_pinned = tensor.device.type == "cuda"
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=is_pinned)
        if 0 in tensor.stride():
            return tensor.detach().to("cpu", non_blocking=True)  # an expanded tensor cannot be written
        copied.copy_(tensor, non_blocking=True)
    return copied.requires_grad_(tensor.requires_grad)


# The attributes that a step may ask its Trainer for, and that plain values can answer.
TRAINER_FACTS = (
    "current_epoch", "global_step", "global_rank", "local_rank", "node_rank", "world_size", "num_devices", "num_nodes",
    "max_epochs", "max_steps", "min_epochs", "min_steps", "num_training_batches", "estimated_stepping_batches",
    "accumulate_grad_batches", "gradient_clip_val", "is_global_zero", "is_last_batch", "fast_dev_run",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConditions:
    """The conditions under which a step ran. Plain values."""

    divided_by: int = 1  # the number that the loss is divided by for an accumulation
    scale: float | None = None  # the number that the gradient scaler multiplies the loss by; None without one
    device_type: str = "cpu"  # the type of the module's device
    # the type that autocast computes in during training_step, such as ``"bfloat16"``; None without it
    autocast: str | None = None
    autocast_cache: bool = True  # whether autocast keeps the weights it converted
    default_dtype: str = "float32"  # the type of new tensors during training_step, such as ``"float32"``
    trainer: Mapping[str, Any] = field(default_factory=dict)  # attributes of the Trainer: name to plain value

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Set autocast and the default type as they are in training_step."""
        default = torch.get_default_dtype()
        casting: Any = nullcontext()
        if self.autocast is not None:
            dtype = getattr(torch, self.autocast)
            casting = torch.autocast(self.device_type, dtype=dtype, cache_enabled=self.autocast_cache)
        torch.set_default_dtype(getattr(torch, self.default_dtype))
        try:
            with casting:
                yield
        finally:
            torch.set_default_dtype(default)


def plain_facts(trainer: object) -> dict[str, Any]:
    """Return what a Trainer reports about itself, as far as it is plain values: name to value."""
    facts = {}
    for name in TRAINER_FACTS:
        with contextlib.suppress(Exception):  # such as an estimate of steps without a data loader
            facts[name] = getattr(trainer, name)
    return simple_items(facts)


def precision_now(device_type: str) -> dict[str, Any]:
    """Return the conditions that the code around this call has set: autocast and the default type."""
    casts = torch.is_autocast_enabled(device_type)
    return {
        "device_type": device_type,
        "autocast": str(torch.get_autocast_dtype(device_type)).removeprefix("torch.") if casts else None,
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def doubts_about(micro: Sequence[MicroBatch], unrestored: Sequence[str]) -> list[str]:
    """Return what is known to be missing for an exact rerun of the step, one sentence each."""
    doubts = []
    gone = [str(each.index) for each in micro if each.batch is None]
    if gone:
        doubts.append(f"Batch {', '.join(gone)} of the accumulation was no longer held: the rerun leaves it out.")
    for each in micro:
        if each.batch is None:
            continue
        doubts += [
            f"{in_batch(name, each.index)} was changed in place by the step: a rerun begins with the changed values."
            for name in each.written_in_place()
        ]
    if unrestored:
        doubts.append(f"{', '.join(unrestored)} could not be restored to its values before the step.")
    return doubts


def digest_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bits, its dtype and shape."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return digest_of(tensor.indices()) + digest_of(tensor.values())
    if not is_in_memory(tensor):
        floats = floats_of(tensor)
        # A kind of tensor whose values cannot be read differs from others by its kind alone.
        return sha256(f"{type(tensor)} {tensor.dtype}".encode()).hexdigest() if floats is None else digest_of(floats)
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + bits).hexdigest()


def digests_of(gradients: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each gradient."""
    return {name: digest_of(gradient) for name, gradient in gradients.items()}


def is_same_number(one: float, other: float) -> bool:
    """Return whether two losses are the same in every bit; any NaN equals any other."""
    return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)


def mismatches(losses: Sequence[float], digests: Mapping[str, str], again: StepOutcome) -> list[str]:
    """Return how a rerun differs from the step, one sentence each; empty if all bits are the same."""
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
        found.append(f"Of {len(digests)} gradients {len(different)} differ: {first_of(different)}.")
    return found


@dataclass(slots=True)
class StepOutcome:
    """The losses and gradients of a step."""

    # the loss of each micro-batch (in manual optimization: of each backward pass), as 0-dim tensors
    losses: list[Tensor]
    graph: Tensor | None  # the last loss, with its graph
    gradients: dict[str, Tensor]  # name of the parameter to its gradient, unscaled

    @property
    def is_finite(self) -> bool:
        """True if all losses and gradients are finite."""
        return all(math.isfinite(float(loss)) for loss in self.losses) and not find_bad(self.gradients.items())


_MOST_NODES = 10_000

UPDATE_OVERFLOWED = "the update itself overflowed"
"""Says in `BadStep.update` that neither a setting nor a hook is to blame, but the size of the update."""


@dataclass(slots=True, eq=False)
class GuardedStep:
    """One optimizer step, from its first micro-batch to the update."""

    number: int  # the training step, counted as the x axis of the logs counts
    # puts the caller's counters back to the start of this step; None while that is not known yet
    restore_loop: Callable[[], None] | None
    micro: list[MicroBatch] = field(default_factory=list)  # its micro-batches, oldest first
    optimizer: Optimizer | None = None  # the optimizer that makes the update, once that is known
    parameters: Sequence[Tensor] = ()  # the parameters with a gradient
    start: UpdateStart | None = None  # what its update began with; only where the step is decided late
    # the parameters and attributes that its forward passes wrote, and that cannot be restored
    written: tuple[str, ...] = ()
    copies: UpdateStart | None = None  # the same with copies, to undo the update; None where none are kept
    shared_loss: Tensor | None = None  # the largest of all ranks' mean losses; None where nobody asks for it

    def measured(self) -> list[Tensor]:
        """Return the losses to read: this rank's and the shared one."""
        return self.losses() if self.shared_loss is None else [*self.losses(), self.shared_loss]

    def losses(self) -> list[Tensor]:
        """Return the losses of all micro-batches."""
        return [loss for micro in self.micro for loss in micro.losses]


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step whose update must not be made."""

    step: GuardedStep  # the step, with those of its batches that are still held
    losses: tuple[float, ...]  # its losses on this rank, in the order of `step.losses()`
    norm: float  # the norm over all its gradients
    gradients: tuple[BadTensor, ...]  # the bad gradients
    late: bool  # whether the update was held back on the device and the host learned of it afterwards
    scaler: str = ""  # says what the gradient scaler did, where that is the reason; else empty
    # the steps that were held back after it, because the host did not know of it yet
    later: tuple[GuardedStep, ...] = ()
    update: str = ""  # says what made the update bad although losses and gradients were finite; else empty
    applied: bool = False  # whether the update was made before it was found to be bad

    @property
    def is_lost(self) -> bool:
        """True if the update was made and cannot be undone."""
        return self.applied and self.step.copies is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts that one rank knows about a bad step. Plain values: they are sent to the other ranks."""

    rank: int
    step: int
    batches: tuple[int, ...]  # the batch indices of its micro-batches
    losses: tuple[tuple[int, float], ...]  # (batch index, loss) for each loss of the step
    norm: float  # the norm over all gradients
    gradients: tuple[BadTensor, ...]  # the bad gradients
    parameters: tuple[BadTensor, ...]  # parameters that were bad before the step, and buffers that held NaN
    inputs: tuple[BadInput, ...]  # tensors of the batches that hold NaN or Inf
    unseen: tuple[int, ...]  # the indices of the batches that were no longer held
    learning_rates: tuple[float, ...]  # the learning rates of the parameter groups
    weight_norm: float  # the L2 norm of the parameters that have a gradient
    plain_sgd: bool  # whether an update is the learning rate times the gradient
    float16: bool  # whether float16 values take part
    scaler: str = ""  # says what the gradient scaler did, where that is the reason
    late: bool = False  # whether the step was decided late
    unrestored: tuple[str, ...] = ()  # the names of buffers, parameters and attributes that could not be restored
    carried: bool = False  # whether the gradients were made NaN to tell the other ranks of this rank's bad loss
    update: str = ""  # says what made the update bad although losses and gradients were finite; else empty
    is_lost: bool = False  # whether that update was made, and could not be undone


@dataclass(frozen=True, slots=True)
class PastStep:
    """A step in the history."""

    step: int
    loss: float  # the mean of the step's losses on this rank; NaN if it had none
    norm: float  # the L2 norm of all gradients, before clipping


def growth(values: Sequence[float]) -> float | None:
    """Return the last finite value divided by the median of the first half; None for fewer than two finite values."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    if len(finite) < 2:  # noqa: PLR2004, growth takes two values
        return None
    start = median(finite[: len(finite) // 2])
    return finite[-1] / start if start > 0 else None


def depends_on_weights(loss: Tensor) -> bool:
    """Return whether a parameter is among the leaves of a loss's graph. Quick where one is: it goes down first."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "variable", None), Parameter):
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return bool(waiting)


def undivided_loss(loss: Tensor, divided_by: int, scale: Tensor | None) -> Tensor:
    """Return a loss as training_step returned it, 0-dim.

    Args:
        loss: The loss as it goes backward: divided for an accumulation, and multiplied by a gradient scaler.
        divided_by: The number it was divided by.
        scale: The number it was multiplied by; None without a scaler.
    """
    value = loss.detach()
    if divided_by == 1 and scale is None and value.dtype == torch.float32 and value.dim() == 0:
        return value
    # A float64 loss may be finite beyond float32's range.
    value = (value if value.dtype == torch.float64 else value.float()) * divided_by
    if scale is not None:
        value = value / scale
    return value if value.dim() == 0 else value.mean()
