"""The batches of undecided steps: what they began with, whether they hold NaN or Inf, and where they are held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import compress, islice
from operator import attrgetter, not_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_memtools._torch import WRITE_COUNT, is_in_memory, write_count_or_none
from lightning_memtools.memory.nested_tensors import map_tensors, named_tensors
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.nonfinite.finite_checks import floats_of
from lightning_memtools.state.random_state import (
    GENERATORS,
    NumpyStateReader,
    PythonStateReader,
    RandomState,
    generator_state,
    set_generator_state,
)

MAX_SAMPLES = 8  # of the bad ones, how many are listed


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A batch of the present step.

    Attributes:
        index: The batch index within the epoch.
        batch: The batch as training_step got it; None after it was released, a copy on the host after it was moved.
        losses: The losses that were sent backward for it, as 0-dim tensors, as training_step returned them.
        keep: Whether its loss is known to be bad, so that it is not released.
        start: The state that it began with; None where that is not recorded.
        steps_before: In manual optimization: the number of updates in this batch before this step began.
        resumed: The state after the last of those updates; None if there were none.
        changed: After it was moved to the host: the names of its tensors that had been written in place by then.
        fetched: Where training_step takes its batches from `dataloader_iter` itself, so that `batch` is a list of them.
    """

    index: int
    batch: Any
    losses: list[Tensor] = field(default_factory=list)
    keep: bool = False
    start: BatchStart | None = None
    steps_before: int = 0
    resumed: BatchStart | None = None
    changed: tuple[str, ...] | None = None
    fetched: list[FetchedBatch] | None = None

    def keep_if_bad(self) -> None:
        """Note whether its loss is bad, as far as that is known without waiting for a device."""
        self.keep = self.keep or any(each.is_cpu and not math.isfinite(each.item()) for each in self.losses)

    def written_in_place(self) -> tuple[str, ...]:
        """Return the names of the batch's tensors that were written since it was taken, as far as that is known."""
        if self.changed is not None:
            return self.changed
        if self.fetched is not None:
            return tuple(changed_in_place(self.batch, tuple(n for each in self.fetched for n in each.versions)))
        return tuple(changed_in_place(self.batch, self.start.versions)) if isinstance(self.start, BatchStart) else ()

    def note_fetched(self, batch: Any, index: int, loader_index: int) -> None:
        """Note a batch that training_step has just taken from its iterator."""
        if self.fetched is None:
            self.index, self.batch, self.fetched = index, [], []
        # Fetching may draw random numbers, and a rerun does not fetch.
        self.fetched.append(FetchedBatch(index, loader_index, RandomState.now(), versions_of(batch)))
        if isinstance(self.batch, list):  # else it was released
            self.batch.append(batch)


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """The place of a batch that training_step took from its iterator.

    Attributes:
        index: The batch index within the epoch.
        loader_index: The index of the data loader.
        random: The states of the random number generators when it had been fetched.
        versions: As in `BatchStart`.
    """

    index: int
    loader_index: int
    random: RandomState
    versions: tuple[int, ...] = ()


class FetchedAgain(Iterator[Any]):
    """Gives training_step the batches that it took from its iterator; stands for Lightning's iterator in a rerun.

    Args:
        batches: The batches.
        fetched: Their places.
    """

    done = False

    def __init__(self, batches: Sequence[Any], fetched: Sequence[FetchedBatch]) -> None:
        self._left = list(zip(batches, fetched, strict=True))
        self.fetched, self.length = 0, None

    def __next__(self) -> tuple[Any, int, int]:
        if not self._left:
            raise StopIteration
        batch, place = self._left.pop(0)
        self.fetched += 1
        place.random.restore()
        return batch, place.index, place.loader_index


@dataclass(frozen=True, slots=True)
class BadInput:
    """A tensor of a batch that holds NaN or Inf.

    Attributes:
        name: Its place in the batch, such as ``batch["x"]``.
        batch_idx: The index of the batch.
        n_nan: The number of elements that are NaN.
        n_inf: The number of elements that are Inf or -Inf.
        n_elements: The number of all elements.
        samples: The first positions along dimension 0 that are affected, one more than are listed.
        is_mask: Whether it holds 0 and -inf only, as attention masks do.
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


SIMPLE = frozenset({bool, int, float, str, type(None)})


# torch sets the first ones on every module and restores `training` apart; Lightning sets the others.
_NOT_OF_USERS = {*vars(Module()), "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"}

Attributes = dict[str, dict[str, Any]]


@dataclass(slots=True)  # not frozen: a step begins with one, and to make a frozen one takes three times as long
class BatchStart:
    """The state that a batch began with.

    Attributes:
        random: The states of the random number generators.
        attributes: The attributes of simple types of each module that the user wrote, by the module's name.
        versions: How often each tensor of the batch had been written in place, in the order of `named_tensors`.
        frozen: The names of the parameters that did not require gradients; None where that was not recorded. A GAN
            toggles them within its step.
        generators: The states of the module's own random generators, as `attributes`.
    """

    random: RandomState
    attributes: Attributes
    versions: tuple[int, ...]
    frozen: frozenset[str] | None = None
    generators: Attributes = field(default_factory=dict)

    def restore(self, module: Module) -> None:
        """Put all of it back in the module; parts of it that no longer exist are left out."""
        restore_attributes(module, self.attributes)
        restore_frozen(module, self.frozen)
        parts = dict(module.named_modules())
        for name, states in self.generators.items():
            held = vars(parts[name]) if name in parts else {}
            for key, state in states.items():
                if generator_state(held.get(key)) is not None:
                    set_generator_state(held[key], state)
        self.random.restore()


_REQUIRES_GRAD = attrgetter("requires_grad")
_NONE: frozenset[str] = frozenset()


class BatchStartRecorder:
    """Records the state at the start of each batch.

    It waits for no device, and takes some 20 microseconds, and one more for each module that the user wrote.

    Args:
        module: The module that is trained.
    """

    def __init__(self, module: Module) -> None:
        named = dict(module.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self._read_numpy, self._read_python = NumpyStateReader(), PythonStateReader()
        # torch's own modules keep no attribute that a step changes.
        self._written_by_users = [
            _AttributeReader(name, vars(part))
            for name, part in module.named_modules()
            if not type(part).__module__.startswith("torch.")
        ]

    def record(self, batch: Any) -> BatchStart:
        """Return the present state."""
        attributes, generators = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        for each in self._written_by_users:
            attributes[each.name] = each.simple()
            if each.generators:
                generators[each.name] = {key: generator_state(each.held.get(key)) for key in each.generators}
        required = list(map(_REQUIRES_GRAD, self._parameters))
        frozen = _NONE if all(required) else frozenset(compress(self._names, map(not_, required)))
        random = RandomState.now(self._read_numpy, self._read_python)
        return BatchStart(random, attributes, versions_of(batch), frozen, generators)


class _AttributeReader:
    """Reads a module's attributes of simple types; quickly as long as none of its attributes changes.

    Args:
        name: The module's name.
        held: Its attributes.

    Attributes:
        name: The same.
        held: The same.
        generators: The names of its random generators when `simple` was called.
    """

    def __init__(self, name: str, held: dict[str, Any]) -> None:
        self.name, self.held = name, held
        self.generators: list[str] = []
        self._names: list[str] = []
        self._values: list[int] = []
        self._known: dict[str, Any] = {}

    def simple(self) -> dict[str, Any]:
        """Return the attributes of simple types: name to value."""
        # By identity, so that no value must be asked for its equal. Those that are returned are held in `_known`, so
        # that no other value can take the place of one in memory.
        names, values = list(self.held), list(map(id, self.held.values()))
        if names != self._names or values != self._values:
            self._names, self._values = names, values
            self._known = simple_items(self.held, skip=_n_of_every_module(self.held))
            self.generators = [
                key
                for key, value in self.held.items()
                if type(value).__name__ in GENERATORS and generator_state(value) is not None
            ]
        return self._known


def simple_items(held: dict[str, Any], skip: int = 0) -> dict[str, Any]:
    """Return the attributes of simple types (numbers, texts, None). `skip`: the number of leading ones to leave out."""
    return {
        key: value
        for key, value in islice(held.items(), skip, None)
        if type(value) in SIMPLE and key not in _NOT_OF_USERS
    }


def _n_of_every_module(held: dict[str, Any]) -> int:
    """Return how many of the leading attributes are those that torch gives to every module: most of them."""
    names = list(vars(Module()))
    return len(names) if list(islice(held, len(names))) == names else 0


def restore_attributes(module: Module, attributes: Attributes) -> None:
    """Set the attributes as they were recorded; modules that no longer exist are left out."""
    parts = dict(module.named_modules())
    for name, values in attributes.items():
        if name in parts:
            parts[name].__dict__.update(values)


def restore_frozen(module: Module, frozen: frozenset[str] | None) -> None:
    """Set which parameters require gradients, as it was recorded; None leaves them as they are."""
    if frozen is None:
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)


def versions_of(batch: Any) -> tuple[int, ...]:
    """Return how often each tensor of a batch was written in place; -1 where it is not counted."""
    parts = (batch,) if type(batch) is Tensor else batch
    if type(parts) in {tuple, list} and set(map(type, parts)) == {Tensor} and not any(map(Tensor.is_inference, parts)):
        return tuple(map(WRITE_COUNT, parts))
    return tuple(write_count_or_none(tensor) for _, tensor in named_tensors(batch, "batch"))


def changed_in_place(batch: Any, versions: tuple[int, ...]) -> Iterator[str]:
    """Yield the names of the batch's tensors that were written since their versions were recorded."""
    named: list[tuple[str, Tensor]] = list(named_tensors(batch, "batch"))
    if len(named) != len(versions):
        yield "batch (tensors were added or removed)"
        return
    for (name, _), now, before in zip(named, versions_of(batch), versions, strict=True):
        if now != before:
            yield name


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
