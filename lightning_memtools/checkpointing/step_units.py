"""Measures on fake tensors what each part of a model keeps and computes in one training step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools._torch import node_sequence_number, write_count_or_none
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import Chain, forward_of_class
from lightning_memtools.checkpointing.exact_recomputation import updates_statistics
from lightning_memtools.checkpointing.key_value_caches import caches_off, modules_with_caches
from lightning_memtools.checkpointing.loss_head import DeferredHead
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.reachable_variables import variables_of_hooks
from lightning_memtools.simulation.tracer import StepCost, StepRequest, StepTrace, tracing

_OF_EVERY_MODULE = {*vars(nn.Module())}  # its registries, and its mode

Place = tuple[int, int]
"""The indices of a chain and of a layer in it."""


@dataclass(slots=True)
class Unit:
    """A part of the forward pass between two places where a layer begins or ends.

    The mappings `input` and `saved` map ids of memory blocks to sizes in bytes. Peaks include all allocated memory.

    Attributes:
        input: The memory blocks of the unit's input tensors.
        allocated_before: The bytes allocated when the unit's forward pass begins.
        operations: The number of operations of the unit's forward pass.
        saved: The memory blocks that the unit saves for backward.
        again: The number of operations from the unit's start to its last saved tensor; None if it saves no tensor.
        forward_peak: The peak during the unit's forward pass.
        backward_before: The bytes allocated when the unit's backward pass begins; None if it has no backward pass.
        backward_peak: The peak during the unit's backward pass.
        may_start: True if recomputation may start at this unit, because nothing overwrites the unit's input.
    """

    input: dict[int, int]
    allocated_before: int
    operations: int = 0
    saved: dict[int, int] = field(default_factory=dict)
    again: int | None = None
    forward_peak: int = 0
    backward_before: int | None = None
    backward_peak: int = 0
    may_start: bool = True


@dataclass(frozen=True, slots=True)
class StepUnits:
    """A training step, cut into units: parts of the forward pass between boundaries of layers.

    Attributes:
        units: The units, in the order of the forward pass.
        plain: The memory and operations of the step without a plan.
        spans: For each layer, the start and the end (exclusive) of the units in its first call, as indices.
        changed: For each layer that must not run twice, a phrase that says what it changes or that it takes a gradient.
    """

    units: tuple[Unit, ...]
    plain: StepCost
    spans: dict[Place, tuple[int, int]]
    changed: dict[Place, str]


def units_of_step(
    step: StepRequest, chains: Sequence[Chain], heads: Sequence[str] = (), plain: StepCost | None = None
) -> StepUnits:
    """Run a step on fake tensors, and measure each layer of the chains and the code between layers.

    The loss of the linear layers `heads` is computed in chunks. `plain` is the cost without a plan, if known. Errors
    that the step raises on fake tensors are passed on.
    """
    with tracing(step) as trace, AppliedPlan(trace.model, (), heads=heads):
        trace.run()
        # Without a plan, a language model fills its cache of keys and values; the layers are measured without one.
        if plain is None and modules_with_caches(trace.model):
            plain = trace.run()
        with closing(_Recorder(trace, chains)) as recorder, caches_off(trace.model):
            measured = trace.run(recorder.around_forward, recorder.begin_backward)
            recorder.leave_backward()
        for unit, then in reversed(list(pairwise(recorder.units))):
            # If a unit returns its input, or a view of it, nothing may overwrite what the next one takes either.
            hands_on = bool(then.input) and then.input.keys() <= unit.input.keys()
            unit.may_start = unit.may_start and (then.may_start or not hands_on)
        return StepUnits(tuple(recorder.units), plain or measured, recorder.spans, recorder.changed)


class _Recorder:
    """Cuts a step into units where layers begin and end, and measures the forward and backward pass of each unit.

    For `units`, `spans` and `changed`, see StepUnits.
    """

    def __init__(self, trace: StepTrace, chains: Sequence[Chain]) -> None:
        self.units: list[Unit] = []
        self.spans: dict[Place, tuple[int, int]] = {}
        self.changed: dict[Place, str] = {}
        self._trace = trace
        self._static: set[int] = set()
        self._open = Unit({}, 0)
        self._operations_before = 0
        self._given: list[tuple[int, weakref.ref[Tensor], int]] = []
        self._n_unpacked = 0
        self._backward: Unit | None = None
        self._hooks: dict[tuple[int, int], Any] = {}  # by autograd's node and the number of its output
        for index, chain in enumerate(chains):
            self._watch(index, chain)

    def around_forward(self) -> Any:
        self._static = {entry.block.id for entry in self._trace.device.blocks()}
        self._begin(())
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def begin_backward(self) -> None:
        """End the forward pass, and begin the backward pass of the unit that ran last."""
        self._cut(())
        for given in self._given:
            self._note_writes(*given)
        if self.units:
            self._enter_backward(self.units[-1])

    def leave_backward(self) -> None:
        """End the backward pass of the current unit, and store its peak."""
        peak = self._trace.peak_since()
        if self._backward is not None:
            self._backward.backward_peak = peak

    def close(self) -> None:
        """Remove the hooks from the step's tensors, and drop references to tensors.

        The graph keeps its hooks alive, and these keep this recorder: the garbage collector does not see such a cycle.
        """
        for hook in self._hooks.values():
            hook.remove()

    def _watch(self, index: int, chain: Chain) -> None:
        """Replace the forward of a chain (a Sequential or module), so that this recorder sees each layer's call."""
        module = self._trace.model.get_submodule(chain.name)
        if isinstance(vars(module).get("forward"), DeferredHead):
            return  # it is never recomputed
        if chain.is_module:
            plain = forward_of_class(module)
            call = partial(self._call, (index, 0), module, plain)
            vars(module)["forward"] = wraps(plain)(lambda *args, **kwargs: call(args, kwargs))
            return
        layers = [self._trace.model.get_submodule(name) for name in chain.layers]

        def forward(input: Any) -> Any:  # noqa: A002, Sequential's own name
            for at, layer in enumerate(layers):
                input = self._call((index, at), layer, layer, (input,), {})  # noqa: A001, as above
            return input

        vars(module)["forward"] = forward

    def _call(self, place: Place, module: nn.Module, layer: Any, args: Any, kwargs: Any) -> Any:
        self._cut((args, kwargs))
        start = len(self.units)
        given = [(start, weakref.ref(tensor), write_count_or_none(tensor)) for tensor in tensors_in((args, kwargs))]
        n_unpacked, before = self._n_unpacked, _state_of(module)
        out = layer(*args, **kwargs)
        changed = [name for name, value in _state_of(module).items() if before.get(name, value) != value]
        if changed or self._n_unpacked > n_unpacked:
            what = f"changes {changed[0]}" if changed else "takes a gradient"
            self.changed[place] = f"it {what} when it runs"
        self._cut(out)
        for each in given:  # now, while they are there, and again when the forward pass is over
            self._note_writes(*each)
        self._given += given
        self.spans.setdefault(place, (start, len(self.units)))
        return out

    def _note_writes(self, at: int, given: weakref.ref[Tensor], count: int) -> None:
        tensor = given()
        if at < len(self.units) and tensor is not None and write_count_or_none(tensor) != count:
            self.units[at].may_start = False

    def _cut(self, value: Any) -> None:
        """End the current unit and begin another. `value` is what a layer takes or returns at this point."""
        unit = self._open
        unit.operations = self._trace.counted.total - self._operations_before
        if unit.again is not None or unit.operations or not self.units:
            unit.forward_peak = self._trace.peak_since()
            self.units.append(unit)
            self._hook_outputs(unit, value)
        self._begin(value)

    def _begin(self, value: Any) -> None:
        self._open = Unit(self._blocks(value), self._trace.allocated())
        self._operations_before = self._trace.counted.total
        self._trace.peak_since()

    def _hook_outputs(self, unit: Unit, value: Any) -> None:
        """Put hooks on a unit's output tensors. The first gradient shows that the unit's backward pass begins."""
        for tensor in tensors_in(value):
            if tensor.requires_grad and tensor.grad_fn is not None:
                key = node_sequence_number(tensor.grad_fn), tensor.output_nr
                if key not in self._hooks:  # otherwise an earlier unit made it, and this one hands it on
                    self._hooks[key] = tensor.register_hook(partial(self._enter_backward, unit))  # type: ignore[no-untyped-call]

    def _enter_backward(self, unit: Unit, _: Tensor | None = None) -> None:
        if unit.backward_before is None:
            self.leave_backward()
            unit.backward_before = self._trace.allocated()
            self._backward = unit

    def _pack(self, tensor: Tensor) -> Tensor:
        self._open.again = self._trace.counted.total - self._operations_before
        self._open.saved.update(self._blocks(tensor))
        # Not the tensor itself: an operator that keeps its own output would keep itself alive. A leaf is no output.
        return tensor if tensor.is_leaf else tensor.detach()

    def _unpack(self, tensor: Tensor) -> Tensor:
        self._n_unpacked += 1
        return tensor

    def _blocks(self, value: Any) -> dict[int, int]:
        """Return the ids and sizes of the memory blocks of tensors in `value`, except those older than the step."""
        entries = map(self._trace.device.block_of, tensors_in(value))
        blocks = [entry.block for entry in entries if entry is not None]
        return {block.id: block.size for block in blocks if block.id not in self._static}


def _state_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return the values of parameters, buffers, attributes and hooks' variables, to find out what a forward changes.

    Running statistics are left out. They may change, because recomputation restores them.
    """
    state: dict[str, list[Any]] = {}
    for path, part in module.named_modules():
        held = {name: value for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}
        held |= {f"{variable.name} (of a hook)": variable.value for variable in variables_of_hooks(part)}
        held |= {} if updates_statistics(part) else dict(part.named_buffers(recurse=False))
        for name, value in (*held.items(), *part.named_parameters(recurse=False)):
            # Hooks of transformers collect router logits in lists, which a context variable holds while a model runs.
            content = value.get(None) if isinstance(value, ContextVar) else value
            elements = content.values() if isinstance(content, dict) else content
            is_container = isinstance(content, (list, dict, set, deque))
            state[f"{path}.{name}".lstrip(".")] = [_noted(each) for each in (elements if is_container else [content])]
    return state


def _noted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), write_count_or_none(value), value  # it is held, so that its id stays its own
    if isinstance(value, list):
        return len(value)
    return repr(value) if isinstance(value, (int, float, str)) else type(value)
