"""Measures on fake tensors what each part of a model keeps and computes in one training step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools._torch import node_sequence_number, write_count
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import Chain, forward_of_class
from lightning_memtools.checkpointing.exact_recomputation import updates_statistics
from lightning_memtools.checkpointing.key_value_caches import caches_off, modules_with_caches
from lightning_memtools.checkpointing.loss_head import DeferredHead
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.reachable_variables import variables_of_hooks
from lightning_memtools.simulation.step_trace import StepCost, StepTrace, TracedStep, tracing

_OF_EVERY_MODULE = {*vars(nn.Module())}  # its registries, and its mode

Place = tuple[int, int]
"""The indices of a chain and of a layer in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A stretch of the forward pass between two layer boundaries. Sizes in bytes; each storage is counted once.

    Attributes:
        own_bytes: The bytes that the unit saves ("keeps") for backward, besides its input and output.
        in_kept: The bytes of its input that it keeps.
        out_kept: The bytes of its output that it keeps, without those in its input's storage.
        out_held: True if all of its output is kept, by this unit or earlier ones.
        out_bytes: The size of its output; 0 if that is its input's storage (a view, or changed in place).
        same_storage: True if its output and its input share a storage.
        may_start: True if a recomputed range may begin with it, because nothing overwrites its input.
        operations: The operations of its forward pass.
        again: Its operations up to the last tensor that it keeps, where recomputation stops. None if it keeps nothing.
        forward_bytes: The peak of its forward pass, above the bytes allocated when it began.
        forward_base: The bytes allocated when its forward pass begins, besides its input and what earlier units keep.
        backward_base: The bytes allocated when its backward pass begins, besides what it and earlier units keep.
        backward_need: The same at the peak of its backward pass; 0 if no gradient passes through the unit.
        shared: For each tensor that this unit and later ones keep: (index of the last such unit, bytes, True if it is
            this unit's input, True if it is this unit's output and the next unit keeps it).
    """

    own_bytes: int
    in_kept: int
    out_kept: int
    out_held: bool
    out_bytes: int
    same_storage: bool
    may_start: bool
    operations: int
    again: int | None
    forward_bytes: int
    forward_base: int
    backward_base: int
    backward_need: int
    shared: tuple[tuple[int, int, bool, bool], ...]

    def keep(self, *, input_held: bool) -> tuple[int, bool]:
        """Return the bytes that the unit adds by saving tensors for backward, and whether its output is then held."""
        added = self.own_bytes + self.out_kept + (0 if input_held else self.in_kept)
        return added, input_held or self.in_kept > 0 if self.same_storage else self.out_held


@dataclass(frozen=True, slots=True)
class StepUnits:
    """A training step as a sequence of units.

    Attributes:
        units: The units, in the order of the forward pass.
        plain: The memory and operations of the step without a plan.
        spans: For each layer's first call, the index of its first unit, and one past the index of its last.
        changed: For each layer that must not run twice because it changes an attribute or buffer, a phrase naming it.
    """

    units: tuple[Unit, ...]
    plain: StepCost
    spans: dict[Place, tuple[int, int]]
    changed: dict[Place, str]


def units_of_step(
    step: TracedStep, chains: Sequence[Chain], heads: Sequence[str] = (), plain: StepCost | None = None
) -> StepUnits:
    """Run a step on fake tensors, and measure each layer of the chains and the code between layers.

    The loss of `heads` is computed in chunks. `plain` is the cost of the step without a plan, if known.

    Raises:
        Exception: Whatever the step raises on fake tensors, for instance when it reads values.
    """
    with tracing(step) as trace, AppliedPlan(trace.model, (), heads=heads):
        trace.run()
        # Without a plan, a language model fills its cache of keys and values; the layers are measured without one.
        if plain is None and modules_with_caches(trace.model):
            plain = trace.run()
        with closing(_Recorder(trace, chains)) as recorder:
            with caches_off(trace.model):
                measured = trace.run(recorder.around_forward, recorder.begin_backward)
                recorder.leave_backward()
            changed = recorder.layers_that_changed(chains)
        return StepUnits(tuple(_units(recorder.records)), plain or measured, recorder.spans, changed)


@dataclass(slots=True)
class _Record:
    """The measurements of one unit. `input`, `output` and `saved` map the ids of memory blocks to their sizes."""

    allocated_before: int
    operations_before: int
    input: dict[int, int]
    output: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    operations_at_last_save: int | None = None
    operations: int = 0
    peak: int = 0
    overwrites: bool = False
    backward_before: int | None = None
    backward_peak: int = 0


class _Recorder:
    """Cuts a step into units where layers begin and end, and measures each unit's forward and backward pass.

    Attributes:
        records: The measurements of the units, in the order of the forward pass.
        spans: For each layer's first call, by chain and layer: the index of its first record, and one past its last.
    """

    def __init__(self, trace: StepTrace, chains: Sequence[Chain]) -> None:
        self.records: list[_Record] = []
        self.spans: dict[Place, tuple[int, int]] = {}
        self._trace = trace
        self._static: set[int] = set()
        self._open = _Record(0, 0, {})
        self._given: list[tuple[int, weakref.ref[Tensor], int]] = []
        self._backward: _Record | None = None
        self._hooks: list[Any] = []
        self._makers: dict[tuple[int, int], list[_Record]] = {}  # by autograd's node and the number of its output
        self._state_before: dict[tuple[int, str], Any] = {}
        self._state_after: dict[tuple[int, str], Any] = {}
        for index, chain in enumerate(chains):
            self._watch(index, chain)

    def around_forward(self) -> Any:
        self._state_before = _state_of(self._trace.model)
        self._static = {entry.block.id for entry in self._trace.device.blocks()}
        self._begin({})
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def begin_backward(self) -> None:
        """End the forward pass, and begin the backward pass of the unit that ran last."""
        self._state_after = _state_of(self._trace.model)
        self._cut((), begins=False)
        for given in self._given:
            self._note_writes(*given)
        if self.records:
            self._enter_backward(self.records[-1])

    def leave_backward(self) -> None:
        """Store the peak of the unit whose backward pass is over."""
        peak = self._trace.peak_since()
        if self._backward is not None:
            self._backward.backward_peak = peak

    def close(self) -> None:
        """Release the step's tensors and the hooks on them.

        A graph keeps its hooks alive, and the hooks refer to this recorder and the user's model. If the recorder held
        a tensor of the graph, that would be a reference cycle that Python's garbage collector cannot see or free.
        """
        for hook in self._hooks:
            hook.remove()
        self._state_before.clear()
        self._state_after.clear()

    def layers_that_changed(self, chains: Sequence[Chain]) -> dict[Place, str]:
        """Return the layers whose forward changed an existing attribute or buffer, each with a phrase naming it."""
        before, after = self._state_before, self._state_after
        names = [key for key, value in after.items() if key in before and not _is_same(before[key], value)]
        owners = dict(reversed(names))  # the first of each
        return {
            (index, at): f"it changes {path}{'.' if path else ''}{owners[id(part)]} when it runs"
            for index, chain in enumerate(chains if owners else ())
            for at, layer in enumerate(chain.layers)
            for path, part in self._trace.model.get_submodule(layer).named_modules()
            if id(part) in owners
        }

    def _watch(self, index: int, chain: Chain) -> None:
        """Make a chain of the fake model call its layers through this recorder."""
        module = self._trace.model.get_submodule(chain.name)
        if isinstance(vars(module).get("forward"), DeferredHead):
            return  # it is never recomputed
        if chain.is_module:
            plain = forward_of_class(module)
            vars(module)["forward"] = lambda *args, **kwargs: self._call((index, 0), plain, args, kwargs)
            return
        layers = [self._trace.model.get_submodule(name) for name in chain.layers]

        def forward(input: Any) -> Any:  # noqa: A002, Sequential's own name
            for at, layer in enumerate(layers):
                input = self._call((index, at), layer, (input,), {})  # noqa: A001, as above
            return input

        vars(module)["forward"] = forward

    def _call(self, place: Place, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._cut((args, kwargs), begins=True)
        start = len(self.records)
        given = [(start, weakref.ref(tensor), write_count(tensor)) for tensor in tensors_in((args, kwargs))]
        out = layer(*args, **kwargs)
        self._cut(out, begins=False)
        for each in given:  # now, while they are there, and again when the forward pass is over
            self._note_writes(*each)
        self._given += given
        self.spans.setdefault(place, (start, len(self.records)))
        return out

    def _note_writes(self, at: int, given: weakref.ref[Tensor], count: int) -> None:
        tensor = given()
        if at < len(self.records) and tensor is not None and write_count(tensor) != count:
            self.records[at].overwrites = True

    def _cut(self, value: Any, *, begins: bool) -> None:
        """Begin a new unit, because a layer takes or returns `value`. Record the last unit if anything ran in it."""
        record, keys = self._open, self._keys(value)
        record.operations = self._trace.counted.total
        has_run = record.operations_at_last_save is not None or record.operations > record.operations_before
        if has_run or not self.records:
            record.peak = self._trace.peak_since()
            record.output = keys
            self.records.append(record)
            self._note_makers(record, value)
        elif begins and self.records[-1].output.keys().isdisjoint(keys):
            # The next layer takes something else, as each of three projections takes the same tensor.
            self.records[-1].output = keys
        elif not begins:
            self.records[-1].output |= keys
        self._begin(keys)

    def _begin(self, keys: dict[int, int]) -> None:
        self._open = _Record(self._trace.allocated(), self._trace.counted.total, keys)
        self._trace.peak_since()

    def _note_makers(self, record: _Record, value: Any) -> None:
        """Hook a unit's output tensors: the unit's backward pass begins when the gradient of one of them is ready."""
        for tensor in tensors_in(value):
            if tensor.requires_grad and tensor.grad_fn is not None:
                key = node_sequence_number(tensor.grad_fn), tensor.output_nr
                if key not in self._makers:
                    makers = self._makers[key] = []
                    hook = tensor.register_hook(partial(self._enter_all, makers))  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)
                self._makers[key].append(record)

    def _enter_all(self, makers: list[_Record], gradient: Tensor) -> None:
        """Begin the backward pass of all units that returned the same tensor (one made it, later ones passed it on)."""
        del gradient
        for record in reversed(makers):
            self._enter_backward(record)

    def _enter_backward(self, record: _Record) -> None:
        if record.backward_before is None:
            self.leave_backward()
            record.backward_before = self._trace.allocated()
            self._backward = record

    def _pack(self, tensor: Tensor) -> Tensor:
        self._open.operations_at_last_save = self._trace.counted.total
        self._open.saved.update(self._keys(tensor))
        # Not the tensor itself: an operator that keeps its own output would keep itself alive. A leaf is no output.
        return tensor if tensor.is_leaf else tensor.detach()

    def _keys(self, value: Any) -> dict[int, int]:
        """Return the sizes, by id, of the memory blocks of tensors in `value`, without blocks older than the step."""
        entries = map(self._trace.device.block_of, tensors_in(value))
        blocks = [entry.block for entry in entries if entry is not None]
        return {block.id: block.size for block in blocks if block.id not in self._static}


def _units(records: Sequence[_Record]) -> Iterator[Unit]:
    """Turn measurements into units. A block that several units save for backward counts for the first of them."""
    may_start, overwritten = [True] * len(records), False
    for at in range(len(records) - 1, -1, -1):
        record = records[at]
        is_view = bool(record.output) and record.output.keys() <= record.input.keys()
        overwritten = record.overwrites or (is_view and overwritten)
        may_start[at] = not overwritten
    keepers: dict[int, list[int]] = {}
    for at, record in enumerate(records):
        for key in record.saved:
            keepers.setdefault(key, []).append(at)
    seen: set[int] = set()
    before: dict[int, int] = {}
    kept, held = 0, True
    for at, (record, may) in enumerate(zip(records, may_start, strict=True)):
        passed, saved = record.output, record.saved
        new = saved.keys() - seen - before.keys()
        seen |= saved.keys()
        # Above what is kept by the model's own count, so that its estimate of the plain step is exact.
        forward_base = record.allocated_before - kept - (0 if held else sum(before.values()))
        own_bytes = sum(saved[key] for key in new - passed.keys())
        in_kept = sum(size for key, size in before.items() if key in saved)
        out_kept = sum(saved[key] for key in new & passed.keys())
        out_held, same_storage = seen.issuperset(passed), bool(passed) and passed.keys() <= before.keys()
        kept += own_bytes + out_kept + (0 if held else in_kept)
        last = record.operations_at_last_save
        has_backward = record.backward_before is not None
        yield Unit(
            own_bytes=own_bytes,
            in_kept=in_kept,
            out_kept=out_kept,
            out_held=out_held,
            out_bytes=0 if passed.keys() == before.keys() else sum(passed.values()),
            same_storage=same_storage,
            may_start=may,
            operations=record.operations - record.operations_before,
            again=None if last is None else last - record.operations_before,
            forward_bytes=record.peak - record.allocated_before,
            forward_base=forward_base,
            backward_base=(record.backward_before or 0) - kept if has_backward else 0,
            backward_need=max(record.backward_peak - kept, 0) if has_backward else 0,
            shared=tuple(
                (keepers[key][-1], size, key in before, key in passed and keepers[key][1] == at + 1)
                for key, size in saved.items()
                if keepers[key][0] == at < keepers[key][-1]
            ),
        )
        held = held or in_kept > 0 if same_storage else out_held
        before = passed


def _state_of(model: nn.Module) -> dict[tuple[int, str], list[Any]]:
    """Return all attributes of modules that a forward pass could change: numbers, strings, tensors and lists.

    Running statistics are left out, because recomputation restores those (see exact_recomputation.py).
    """
    state: dict[tuple[int, str], list[Any]] = {}
    for part in model.modules():
        held = {name: value for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}
        held |= {f"{variable.name} (of a hook)": variable.value for variable in variables_of_hooks(part)}
        held |= {} if updates_statistics(part) else dict(part.named_buffers(recurse=False))
        for name, value in held.items():
            if isinstance(value, (list, dict, set, deque)):
                elements = value.values() if isinstance(value, dict) else value
                state[id(part), name] = [len(value), *map(_noted, elements)]
            elif isinstance(value, (int, float, str, Tensor)):
                state[id(part), name] = [_noted(value)]
    return state


def _noted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value, write_count(value)
    return repr(value) if isinstance(value, (int, float, str)) else type(value)


def _is_same(before: list[Any], after: list[Any]) -> bool:
    def is_same(old: Any, new: Any) -> bool:
        if isinstance(old, tuple) and isinstance(new, tuple):
            return old[0] is new[0] and old[1] == new[1]
        return bool(old == new)

    return len(before) == len(after) and all(map(is_same, before, after))
