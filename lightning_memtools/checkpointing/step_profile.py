"""Measures on fake tensors what each layer keeps, needs and computes in one training step, and traces planned steps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools._torch import node_sequence_number, write_count, written_arguments
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import Chain, ancestors, forward_of_class
from lightning_memtools.checkpointing.exact_recomputation import statistics_untouched, updates_statistics
from lightning_memtools.checkpointing.kept_products import is_product
from lightning_memtools.checkpointing.key_value_caches import caches_off, configs_with_caches
from lightning_memtools.checkpointing.loss_head import DeferredHead
from lightning_memtools.checkpointing.memory_model import ChainPlan, Unit
from lightning_memtools.checkpointing.unit_records import ProductRecord, UnitRecord, units_of
from lightning_memtools.memory.allocator import Block
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.reachable_variables import variables_of_hooks
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.ledger import DeviceListener
from lightning_memtools.simulation.step_trace import StepCost, StepTrace, TracedStep, tracing


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A training step as a row of units.

    Attributes:
        units: The layers of the chains and the code between them, in the order of the forward pass.
        places: The indices of each unit's chain and layer; None between chains.
        plain: The memory and operations of the step without a plan.
        outside: Why layers may not be recomputed, as far as only running them shows; by indices of chain and layer.
        spans: The first unit of each layer in its first call, and the index after its last; by chain and layer.
    """

    units: tuple[Unit, ...]
    places: tuple[tuple[int, int] | None, ...]
    plain: StepCost
    outside: dict[tuple[int, int], str]
    spans: dict[tuple[int, int], tuple[int, int]]

    @property
    def calls_layers_again(self) -> bool:
        """True if a layer runs after its first call has ended."""
        return any(place is not None and at >= self.spans[place][1] for at, place in enumerate(self.places))


def profile_step(
    step: TracedStep, chains: Sequence[Chain], heads: Sequence[str] = (), plain: StepCost | None = None
) -> StepProfile:
    """Run one step on fake tensors, and return what each layer of the chains and the code between them needs.

    The loss of `heads` is computed in chunks; no chain holds one of them. `plain` is the cost of the step without a
    plan where it is known.

    A layer that contains another chain is a row of units: the layers of that chain, and its own code between them. The
    forward pass then runs a second time: what a layer changes in it (what only the first pass sets is a cache) keeps it
    from being recomputed.

    Raises:
        Exception: Whatever the step raises on fake tensors, for instance when it reads values.
    """
    with tracing(step) as trace, AppliedPlan(trace.model, (), heads=heads):
        trace.run()
        # Without a plan, a language model fills its cache of keys and values; the layers are measured without one.
        if plain is None and configs_with_caches(trace.model):
            plain = trace.run()
        with caches_off(trace.model):
            recorder = _Recorder(trace, chains)
            measured = recorder.measure()
            again = _Recorder(trace, chains, releases=True)
            again.measure()
            if again.spans == recorder.spans:
                for one, other in zip(recorder.records, again.records, strict=True):
                    one.again_backward_peaks = other.backward_peaks
            dropping = _Recorder(trace, chains, keeps=False)
            outside = _what_changed(trace.model, chains, dropping, _run_again(trace, dropping))
            if dropping.spans == recorder.spans:
                for one, other in zip(recorder.records, dropping.records, strict=False):  # without the code at the end
                    one.dropping = other.peak - other.allocated_before
            return _profile_of(recorder, chains, plain or measured, outside)


def predict(step: TracedStep, plans: Sequence[ChainPlan], heads: Sequence[str] = ()) -> StepCost:
    """Trace a step under a plan, and return its memory and operations; without plans, those of the plain step.

    The loss of `heads` is computed in chunks.
    """
    with tracing(step) as trace, AppliedPlan(trace.model, plans, heads=heads):
        trace.run()
        return trace.run()


class _Recorder:
    """Measures the units of a step one after the other, forward and backward.

    Attributes:
        records: The units, in the order of the forward pass.
        spans: The first record of each layer in its first call, and the index after its last; by chain and layer.
        calls: The layers that are running, the innermost last.
        failed: What the second forward pass raised, which then ended in these layers; "" if nothing.
    """

    def __init__(
        self, trace: StepTrace, chains: Sequence[Chain], *, keeps: bool = True, releases: bool = False
    ) -> None:
        self.records: list[UnitRecord] = []
        self.spans: dict[tuple[int, int], tuple[int, int]] = {}
        self.calls: list[tuple[int, int]] = []
        self.failed = ""
        self.static: set[int] = set()
        self._trace = trace
        self._open: UnitRecord | None = None
        self._backward: UnitRecord | None = None
        self._peaks = _BackwardPeaks(trace.device)
        self._inside = False
        self._keeps, self._releases = keeps, releases
        self._products: dict[int, ProductRecord] = {}
        self._makers: dict[tuple[int, int], list[UnitRecord]] = {}  # by autograd's node and the number of its output
        self._taken: dict[int, int] = {}  # by layers that hold chains, since the last unit
        for index, chain in enumerate(chains):
            _watch(trace.model, index, chain, self)
        # A layer that holds another chain is no unit of its own: the layers of that chain are, and the code between.
        holding = {chain.name for chain in chains if not chain.is_module}
        for chain in chains:
            holding |= ancestors(chain.name)
        self._holding = {
            (index, at)
            for index, chain in enumerate(chains)
            for at, layer in enumerate(chain.layers)
            if layer in holding
        }

    def around_forward(self) -> Any:
        self.static = {entry.block.id for entry in self._trace.device.blocks()}
        self._trace.counted.listener = self._note_operator
        # From now on, since training_step itself may run backward passes.
        self._trace.device.listen(self._peaks)
        self._begin(None, ())
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def begin_backward(self) -> None:
        """Note that the forward pass is over. The unit that ran last is the first to go backward."""
        self._end(())
        self._trace.counted.listener = None
        for record in self.records:
            record.overwrites |= _was_written(record.given)
        self._enter_backward(self.records[-1])

    def measure(self) -> StepCost:
        """Run the step, and measure its units."""
        cost = self._trace.run(self.around_forward, self.begin_backward)
        self._leave_backward()
        return cost

    def call_layer(self, place: tuple[int, int], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer as a unit of its own, or as several if it holds other chains, and return its output."""
        if self._inside:  # within a unit
            return layer(*args, **kwargs)
        if self._open is not None and self._is_worth_a_unit(self._open):  # the code since the last layer
            self._end((args, kwargs))
        holding = place in self._holding
        start = len(self.records)
        self._begin(None if holding else place, (args, kwargs))
        first = self._open
        assert first is not None
        if holding:
            self._taken |= first.input
        given = first.given = [(weakref.ref(one), write_count(one)) for one in tensors_in((args, kwargs))]
        self._inside = not holding
        self.calls.append(place)
        try:
            out = layer(*args, **kwargs)
        finally:
            if not holding:
                self._inside = False
        record = self._open
        assert record is not None
        self.calls.pop()
        first.overwrites |= _was_written(given)
        if not holding or len(self.records) == start or self._is_worth_a_unit(record):
            self._end(out)
        else:  # what it hands on besides the output of the last layer in it
            self.records[-1].output |= self._keys(out)
        self.spans.setdefault(place, (start, len(self.records)))
        self._begin(None, out)
        return out

    def release_input(self, out: Any) -> None:
        """Note that a Sequential no longer refers to the input of the layer that returned `out`."""
        if not self._inside:
            self._begin(None, out)

    def _is_worth_a_unit(self, record: UnitRecord) -> bool:
        return not self.records or record.saves or self._trace.counted.total > record.operations_before

    def _begin(self, place: tuple[int, int] | None, value: Any) -> None:
        record = UnitRecord(place, self._trace.allocated(), operations_before=self._trace.counted.total)
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
        record.taken, self._taken = self._taken | record.input, {}
        self._open = None
        self.records.append(record)
        for one in tensors_in(value) if self._keeps else ():
            if one.requires_grad and one.grad_fn is not None:
                # When the gradient of an output is ready, this unit's backward pass begins.
                key = node_sequence_number(one.grad_fn), one.output_nr
                if key not in self._makers:
                    makers = self._makers[key] = []
                    one.register_hook(partial(self._enter_all, makers))  # type: ignore[no-untyped-call]
                self._makers[key].append(record)

    def _enter_all(self, makers: list[UnitRecord], gradient: Tensor) -> None:
        """Enter the units that returned one tensor, the last one first: all but the first had nothing to do for it."""
        del gradient
        for record in reversed(makers):
            self._enter_backward(record)

    def _enter_backward(self, record: UnitRecord) -> None:
        if record.backward_before is None:
            self._leave_backward()
            record.backward_before = self._trace.allocated()
            self._backward, self._peaks.inputs = record, record.input

    def _leave_backward(self) -> None:
        # Not the trace's own peak: that one is over when the step ends, before the last unit's is asked for.
        peaks = self._peaks.since_last()
        self._trace.peak_since()
        if self._backward is not None:
            self._backward.backward_peaks = peaks

    def _note_operator(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, operations: int
    ) -> None:
        if self._open is not None and is_product(operator, args, kwargs):
            found = ProductRecord(operations, self._trace.counted.total, self._keys(out))
            self._open.products.append(found)
            self._products.update(dict.fromkeys(found.results, found))
        elif self._products:
            for key in self._keys(written_arguments(operator, args, kwargs)):
                if key in self._products:
                    self._products[key].overwritten = True

    def _pack(self, tensor: Tensor) -> list[Callable[[], Tensor]]:
        record = self._open
        if record is not None:
            record.saves = True
            record.operations_at_last_save = self._trace.counted.total
            record.saved.update(self._keys(tensor))
        if not self._keeps:
            return []
        # Not the tensor itself: an operator that keeps its own output would keep itself alive. A leaf is no output.
        given = tensor if tensor.is_leaf else tensor.detach()
        return [lambda: given]

    def _unpack(self, saved: list[Callable[[], Tensor]]) -> Tensor:
        """Return a saved tensor. Nothing holds it any more if this recorder releases; asked again, it is a new one."""
        tensor = saved[0]()
        if self._releases:
            saved[0] = partial(torch.empty, tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return tensor

    def _keys(self, value: Any) -> dict[int, int]:
        found: dict[int, int] = {}
        for one in tensors_in(value):
            entry = self._trace.device.block_of(one)
            if entry is not None and entry.block.id not in self.static:
                found[entry.block.id] = entry.block.size
        return found


class _BackwardPeaks(DeviceListener):
    """The peaks of a unit's backward pass: as it is, and as if its input stayed.

    Attributes:
        inputs: The blocks of the unit's input, with their sizes.
    """

    def __init__(self, device: VirtualDevice) -> None:
        self.inputs: dict[int, int] = {}
        self._device = device
        self._freed = 0
        self._peaks = (0, 0)

    def since_last(self) -> tuple[int, int]:
        """Return the peaks since the last call of this function."""
        now, found = self._device.allocator.allocated, self._peaks
        self._peaks, self._freed = (now, now), 0
        return found

    def on_allocation(self, block: Block, category: Category | None, module: str) -> None:
        del block, category, module
        now = self._device.allocator.allocated
        self._peaks = max(self._peaks[0], now), max(self._peaks[1], now + self._freed)

    def on_free(self, block_id: int, category: Category | None, module: str) -> None:
        del category, module
        self._freed += self.inputs.get(block_id, 0)


def _was_written(given: list[tuple[weakref.ref[Tensor], int]]) -> bool:
    return any((one := ref()) is not None and write_count(one) != count for ref, count in given)


def _watch(model: nn.Module, index: int, chain: Chain, recorder: _Recorder) -> None:
    """Have a chain of a fake model call its layers through the recorder."""
    module = model.get_submodule(chain.name)
    if isinstance(vars(module).get("forward"), DeferredHead):
        return  # it is never recomputed
    if chain.is_module:
        plain = forward_of_class(module)
        vars(module)["forward"] = lambda *args, **kwargs: recorder.call_layer((index, 0), plain, args, kwargs)
        return
    layers = [model.get_submodule(name) for name in chain.layers]

    def forward(input: Any) -> Any:  # noqa: A002, Sequential's own name
        for at, layer in enumerate(layers):
            input = recorder.call_layer((index, at), layer, (input,), {})  # noqa: A001, as above
            recorder.release_input(input)
        return input

    vars(module)["forward"] = forward


def _run_again(trace: StepTrace, recorder: _Recorder) -> dict[tuple[int, str], str]:
    """Run the forward pass again without keeping anything, and return what it changes in the model.

    By the id of the module and the name of the attribute or buffer.
    """
    norms = [part for part in trace.model.modules() if updates_statistics(part)]
    with trace.aside(), statistics_untouched(norms):
        trace.renew_batch()
        seen = _state_of(trace.model)
        try:
            with recorder.around_forward():
                trace.run_forward()
        except Exception as error:  # noqa: BLE001, what the user's model raises when it runs twice
            recorder.failed = type(error).__name__
        trace.counted.listener = None
        now = _state_of(trace.model)
    return {key: value for key, value in now.items() if key in seen and not _is_same(seen[key], value)}


def _what_changed(model: nn.Module, chains: Sequence[Chain], recorder: _Recorder, changed: Any) -> dict[Any, str]:
    """Return the layers that hold what running changes, with the name of it; by chain and layer."""
    found: dict[Any, str] = {}
    owners = {owner for owner, _ in changed}
    for index, chain in enumerate(chains):
        for at, layer in enumerate(chain.layers):
            for path, part in model.get_submodule(layer).named_modules() if owners else ():
                name = next((name for owner, name in changed if owner == id(part)), None)
                if name is not None:
                    found[index, at] = f"it changes {path}{'.' if path else ''}{name} when it runs"
                    break
    if recorder.failed:
        found |= dict.fromkeys(recorder.calls, f"it raises {recorder.failed} when it runs a second time")
    return found


def _state_of(model: nn.Module) -> dict[tuple[int, str], Any]:
    """Return what modules hold that a forward pass could change: numbers, strings, lengths, tensors and buffers.

    Running statistics are left out: exact_recomputation.py takes care of these, but of no other buffer.
    """
    found: dict[tuple[int, str], Any] = {}
    for part in model.modules():
        for name, value in vars(part).items():
            if isinstance(value, (list, dict, set, deque)):
                found[id(part), name] = str(len(value))
            else:
                _note(found, (id(part), name), value)
        for variable in variables_of_hooks(part):
            name, value = f"{variable.name} (of a hook)", variable.value
            if isinstance(value, (list, dict, set, deque)):
                # The elements too: a list of what was seen may be emptied at the beginning of each step.
                found[id(part), name] = tuple(value.values() if isinstance(value, dict) else value)
            else:
                _note(found, (id(part), name), value)
        for name, tensor in () if updates_statistics(part) else part.named_buffers(recurse=False):
            found[id(part), name] = tensor, write_count(tensor)
    return found


def _note(found: dict[tuple[int, str], Any], key: tuple[int, str], value: Any) -> None:
    if isinstance(value, (int, float, str)):
        found[key] = repr(value)
    elif isinstance(value, Tensor):
        found[key] = value, write_count(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same_element, one, other))
    return bool(one == other)


def _is_same_element(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, str)) and one == other)


def _profile_of(
    recorder: _Recorder, chains: Sequence[Chain], plain: StepCost, outside: dict[tuple[int, int], str]
) -> StepProfile:
    left_out = {(index, at) for index, chain in enumerate(chains) for at in chain.outside}
    places = tuple(one.place for one in recorder.records)
    return StepProfile(units_of(recorder.records, left_out.union(outside)), places, plain, outside, recorder.spans)
