"""Measures on fake tensors what each layer keeps, needs and computes in one training step, and traces planned steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools._torch import write_count
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import Chain
from lightning_memtools.checkpointing.exact_recomputation import statistics_untouched, updates_statistics
from lightning_memtools.checkpointing.memory_model import ChainPlan, Unit
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.simulation.step_trace import StepCost, StepTrace, TracedStep, tracing


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A training step as a row of units.

    Attributes:
        units: The layers of the chains and the code between them, in the order of the forward pass.
        places: The indices of each unit's chain and layer; None between chains.
        plain: The memory and operations of the step without a plan.
        outside: Why layers may not be recomputed, as far as only running them shows; by indices of chain and layer.
    """

    units: tuple[Unit, ...]
    places: tuple[tuple[int, int] | None, ...]
    plain: StepCost
    outside: dict[tuple[int, int], str]


@dataclass(slots=True)
class _Record:
    """The measurements of one unit."""

    place: tuple[int, int] | None
    allocated_before: int = 0
    peak: int = 0
    operations: int = 0
    operations_before: int = 0
    operations_at_last_save: int = 0
    peak_at_last_save: int = 0
    dropping: int | None = None
    saves: bool = False
    saved: dict[int, int] = field(default_factory=dict)
    input: dict[int, int] = field(default_factory=dict)
    output: dict[int, int] = field(default_factory=dict)
    overwrites: bool = False
    backward_before: int | None = None
    backward_peak: int | None = None


def profile_step(step: TracedStep, chains: Sequence[Chain]) -> StepProfile:
    """Run one step on fake tensors, and return what each layer of the chains and the code between them needs.

    Raises:
        Exception: Whatever the step raises on fake tensors, for instance when it reads values.
    """
    with tracing(step) as trace:
        recorder = _Recorder(trace)
        outside: dict[tuple[int, int], str] = {}
        watched = [_watch(trace.model, index, chain, recorder, outside) for index, chain in enumerate(chains)]
        plain = trace.run(recorder.around_forward, recorder.begin_backward)
        recorder.finish()
        del watched
        return _profile_of(recorder.records, chains, plain, outside)


def predict(step: TracedStep, plans: Sequence[ChainPlan]) -> StepCost:
    """StepTrace a step under a plan, and return its peak and operations; without plans, those of the plain step."""
    with tracing(step) as trace, AppliedPlan(trace.model, plans):
        return trace.run()


class _Recorder:
    """Measures the units of a step one after the other, forward and backward."""

    def __init__(self, trace: StepTrace) -> None:
        self.records: list[_Record] = []
        self.static: set[int] = set()
        self._trace = trace
        self._open: _Record | None = None
        self._backward: _Record | None = None
        self._inside = False

    def around_forward(self) -> Any:
        self.static = {entry.serial for entry in self._trace.device.blocks()}
        self._begin(None, ())
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def begin_backward(self) -> None:
        """Note that the forward pass is over. The unit that ran last is the first to go backward."""
        self._end(())
        self._enter_backward(self.records[-1])

    def finish(self) -> None:
        """Note that the step is over."""
        self._leave_backward()

    def call_layer(
        self, place: tuple[int, int], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], again: Any = None
    ) -> Any:
        """Run a layer as a unit of its own, unless it is called from within one, and return its output.

        `again` then runs it once more to measure what it needs if nothing is kept; None leaves that out.
        """
        if self._inside:
            return layer(*args, **kwargs)
        if self._open is not None and self._is_worth_a_unit(self._open):  # the code since the last layer
            self._end(args)
        self._begin(place, args)
        self._inside = True
        versions = [write_count(one) for one in tensors_in(args)]
        try:
            out = layer(*args, **kwargs)
        finally:
            self._inside = False
        record = self._open
        assert record is not None
        record.overwrites = versions != [write_count(one) for one in tensors_in(args)]
        self._end(out)
        if again is not None and not record.overwrites:
            record.dropping = self._needed_keeping_nothing(again, args, kwargs)
        self._begin(None, out)
        return out

    def _needed_keeping_nothing(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Returns the peak of a layer if nothing is kept for backward: it then frees most tensors before it ends."""
        self._inside = True
        try:
            with (
                self._trace.aside() as found,
                torch.autograd.graph.saved_tensors_hooks(_forget, _forget),
            ):
                layer(*args, **kwargs)
        finally:
            self._inside = False
        return found[0]

    def _is_worth_a_unit(self, record: _Record) -> bool:
        return not self.records or record.saves or self._trace.counted.total > record.operations_before

    def _begin(self, place: tuple[int, int] | None, value: Any) -> None:
        record = _Record(place, self._trace.allocated(), operations_before=self._trace.counted.total)
        record.operations_at_last_save = record.operations_before
        record.input = self._keys(value)
        self._trace.peak_since()
        self._open = record

    def _end(self, value: Any) -> None:
        record = self._open
        assert record is not None
        record.peak = self._trace.peak_since()
        record.operations = self._trace.counted.total
        record.output = self._keys(value)
        self._open = None
        self.records.append(record)
        for one in tensors_in(value):
            if one.requires_grad and one.grad_fn is not None:
                # When the gradient of its output is ready, this unit's backward pass begins.
                one.register_hook(  # type: ignore[no-untyped-call]
                    lambda _, record=record: self._enter_backward(record)
                )
                break

    def _enter_backward(self, record: _Record) -> None:
        if record.backward_before is None:
            self._leave_backward()
            record.backward_before = self._trace.allocated()
            self._backward = record

    def _leave_backward(self) -> None:
        peak = self._trace.peak_since()
        if self._backward is not None:
            self._backward.backward_peak = max(self._backward.backward_peak or 0, peak)

    def _pack(self, tensor: Tensor) -> Tensor:
        record = self._open
        if record is not None:
            record.saves = True
            record.operations_at_last_save = self._trace.counted.total
            record.peak_at_last_save = self._trace.peak_so_far()
            record.saved.update(self._keys(tensor))
        # Not the tensor itself: an operator that keeps its own output would keep itself alive. A leaf is no output.
        return tensor if tensor.is_leaf else tensor.detach()

    def _keys(self, value: Any) -> dict[int, int]:
        found: dict[int, int] = {}
        for one in tensors_in(value):
            entry = self._trace.device.block_of(one)
            if entry is not None and entry.serial not in self.static:
                found[entry.serial] = entry.block.size
        return found


def _forget(_: Any) -> Any:
    """Stands for packing and unpacking a tensor that is not kept."""


def _watch(
    model: nn.Module, index: int, chain: Chain, recorder: _Recorder, outside: dict[tuple[int, int], str]
) -> nn.Module:
    """Have a chain of a fake model call its layers through the recorder, and return the chain."""
    module = model.get_submodule(chain.name)
    layers = [model.get_submodule(name) for name in chain.layers]

    def call(place: tuple[int, int], layer: Any, at: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _buffer_versions(at)
        modules = [part for part in at.modules() if updates_statistics(part)]

        def again(*args: Any, **kwargs: Any) -> None:
            # Compared over the second run: what only the first one sets is a cache, and not a count.
            seen = _plain_attributes(at)
            with statistics_untouched(modules):
                layer(*args, **kwargs)
            now = _plain_attributes(at)
            counted = next((name for name, value in now.items() if seen.get(name) != value), None)
            if counted is not None:
                outside[place] = f"it changes {counted} when it runs"

        out = recorder.call_layer(place, layer, args, kwargs, None if place[1] in chain.outside else again)
        changed = _changed_buffer(at, before)
        if changed is not None:
            outside[place] = f"it changes {changed} when it runs"
        return out

    if chain.forced:
        plain = type(module).forward
        vars(module)["forward"] = lambda *args, **kwargs: call(
            (index, 0), lambda *a, **k: plain(module, *a, **k), module, *args, **kwargs
        )
    else:

        def forward(input: Any) -> Any:  # noqa: A002, Sequential's own name
            for at, layer in enumerate(layers):
                input = call((index, at), layer, layer, input)  # noqa: A001, as above
            return input

        vars(module)["forward"] = forward
    return module


def _buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    # exact_recomputation.py takes care of running statistics, but of no other buffer that a forward pass changes.
    return {
        f"{path}.{name}" if path else name: (id(tensor), write_count(tensor))
        for path, part in module.named_modules()
        if not updates_statistics(part)
        for name, tensor in part.named_buffers(recurse=False, remove_duplicate=False)
    }


def _changed_buffer(module: nn.Module, before: dict[str, tuple[int, int]]) -> str | None:
    return next((name for name, seen in _buffer_versions(module).items() if before.get(name) != seen), None)


def _plain_attributes(module: nn.Module) -> dict[str, str]:
    """Returns what a module and its parts hold in plain Python: numbers and strings, and the lengths of collections."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, (int, float, str)):
                found[f"{path}.{name}" if path else name] = repr(value)
            elif isinstance(value, (list, dict, set, deque)):
                found[f"{path}.{name}" if path else name] = str(len(value))
    return found


def _profile_of(
    records: Sequence[_Record], chains: Sequence[Chain], plain: StepCost, outside: dict[tuple[int, int], str]
) -> StepProfile:
    units: list[Unit] = []
    held: dict[int, int] = {}
    for record in records:
        held_before = sum(held.values())
        new = {key: size for key, size in record.saved.items() if key not in held}
        boundary = record.input.keys() | record.output.keys()
        same = bool(record.output) and record.output.keys() <= record.input.keys()
        in_bytes = sum(size for key, size in record.input.items() if key not in held)
        base = record.allocated_before - held_before - in_bytes
        held.update(new)
        kept = sum(held.values())
        chain = None if record.place is None else chains[record.place[0]]
        layer = -1 if record.place is None else record.place[1]
        units.append(
            Unit(
                own_bytes=sum(size for key, size in new.items() if key not in boundary),
                out_bytes=0 if same else sum(record.output.values()),
                keeps_input=bool(record.saved.keys() & record.input.keys()),
                keeps_output=bool(record.saved.keys() & record.output.keys()),
                same_storage=same,
                pinned=chain is None or layer in chain.outside or record.place in outside,
                chain=None if record.place is None else record.place[0],
                saves=record.saves,
                operations=record.operations - record.operations_before,
                tail_operations=record.operations - record.operations_at_last_save,
                forward_bytes=record.peak - record.allocated_before,
                stopped_bytes=max(record.peak_at_last_save - record.allocated_before, 0),
                dropping_bytes=record.peak - record.allocated_before if record.dropping is None else record.dropping,
                forward_base=base,
                backward_base=0 if record.backward_before is None else record.backward_before - kept,
                backward_peak=None if record.backward_peak is None else record.backward_peak - kept,
            )
        )
    return StepProfile(tuple(_with_starts(units, records)), tuple(one.place for one in records), plain, outside)


def _with_starts(units: list[Unit], records: Sequence[_Record]) -> list[Unit]:
    """Returns the units; no range may begin with those whose input is overwritten, by them or through a view of it."""
    overwritten = False
    marked: list[Unit] = []
    for unit, record in zip(reversed(units), reversed(records), strict=True):
        overwritten = record.overwrites or (unit.same_storage and overwritten)
        marked.append(replace(unit, may_start=not overwritten))
    return marked[::-1]
