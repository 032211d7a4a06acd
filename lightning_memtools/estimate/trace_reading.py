"""Turns a trace into an estimate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn

from lightning_memtools._torch import uncompiled
from lightning_memtools.estimate.memory_estimate import MemoryEstimate, ModuleMemory, PeakPlace
from lightning_memtools.memory.nested_tensors import batch_size_in
from lightning_memtools.memory.peak_holders import PeakHolder, gathered, held_by
from lightning_memtools.memory.user_code import CodeLine
from lightning_memtools.memory.virtual import Category
from lightning_memtools.memory.virtual.module_scopes import BACKWARD, OPTIMIZER, OUTSIDE
from lightning_memtools.simulation.recording import WORKSPACE, Allocation, AllocationRecorder, is_passing
from lightning_memtools.simulation.tracer import StepRequest, Traced

_PARTS = ("parameters", "gradients", "optimizer", "activations", "inputs", "temporaries", "workspace", "other")
_PART_OF = {
    Category.PARAMETER: "parameters",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER: "optimizer",
    Category.ACTIVATION: "activations",
    Category.INPUT: "inputs",
    WORKSPACE: "workspace",
}


def read_estimate(traced: Traced, request: StepRequest, retrace: Callable[[int], MemoryEstimate]) -> MemoryEstimate:
    """Return the estimate for a traced step. `retrace` is a function that estimates it at another batch size."""
    model, recorder, peak = uncompiled(request.model), traced.recorder, traced.recorder.peak
    holders = holders_at(recorder, peak, type(model).__name__)
    at_peak = held_by(holders, "category")
    stats = traced.device.stats()
    assert stats.peak_allocated is not None
    assert traced.device.trace is not None
    assert stats.peak_reserved is not None
    return MemoryEstimate(
        peak_allocated=stats.peak_allocated,
        peak_reserved=stats.peak_reserved,
        peak_at=place_at(recorder, peak, type(model).__name__),
        composition={name: at_peak.get(name, 0) for name in _PARTS},
        parameter_count=traced.n_parameters,
        gradient_count=traced.n_gradients,
        parameter_bytes=traced.parameter_bytes,
        modules=_modules(traced, model, holders),
        holders=holders,
        begin=next((event for event, _, phase in recorder.marks if phase == "inputs"), 0),
        batch_size=batch_size_in(request.batch),
        notes=traced.notes,
        capacity=request.capacity,
        _simulation=traced.device.allocator,
        trace=traced.device.trace,
        _retrace=retrace,
    )


def place_at(recorder: AllocationRecorder, event: int, model: str) -> PeakPlace:
    """Return the point of the step at which an allocator event happened; `model` is the name of the model's class."""
    born = next((one for one in recorder.allocations.values() if one.born == event), None)
    if born is None:
        return PeakPlace(0, "setup", "", "")
    module = born.module
    if module == BACKWARD or (born.phase == "backward" and born.node_number is not None):
        module = recorder.place_of_node(born.node_number) or ""
    module = _path(module, model)
    return PeakPlace(born.step + 1, born.phase, module, _name(born))


def _name(allocation: Allocation) -> str:
    operation = allocation.operation
    return "" if operation is None else str(getattr(operation, "overloadpacket", operation))


def _path(module: str, model: str) -> str:
    """Return a module's path without the leading class name of the model. Return "" for memory outside of modules."""
    if module == model:
        return "(model)"
    if module in {OUTSIDE, OPTIMIZER, "workspace"}:
        return ""
    return module.removeprefix(f"{model}.")


def _modules(traced: Traced, model: nn.Module, holders: Iterable[PeakHolder]) -> tuple[ModuleMemory, ...]:
    saved, root = _saved_bytes(traced.recorder), type(model).__name__
    at_peak = held_by((one for one in holders if one.category == "activations"), "module")
    return tuple(
        ModuleMemory(
            name=name,
            kind=type(module).__name__,
            output_shapes=traced.shapes.get(name, ()),
            n_parameters=sum(parameter.numel() for parameter in module.parameters()),
            saved_bytes=saved.get(f"{root}.{name}" if name else root, 0),
            at_peak_bytes=at_peak.get(name or "(model)", 0),
        )
        for name, module in model.named_modules()
    )


def _saved_bytes(recorder: AllocationRecorder) -> dict[str, int]:
    """Return the bytes of activations that are still allocated at the end of the last forward, by module."""
    last = max((step for _, step, phase in recorder.marks if phase == "forward"), default=0)
    begins = [event for event, step, phase in recorder.marks if (step, phase) == (last, "forward")]
    if not begins:
        return {}
    begin = begins[0]
    marks = (event for event, step, phase in recorder.marks if event >= begin and (step, phase) == (last, "backward"))
    end = next(marks, len(recorder.allocated))
    found: Counter[str] = Counter()
    for one in recorder.allocations.values():
        if begin <= one.born and one.lives_at(end - 1) and _part_of(one) == "activations":
            found[one.module] += one.size
    return found


def _part_of(allocation: Allocation) -> str:
    """Return the category of a memory block, one of `_PARTS`."""
    return "temporaries" if is_passing(allocation) else _PART_OF.get(allocation.kind, "other")


def holders_at(recorder: AllocationRecorder, event: int, model: str) -> tuple[PeakHolder, ...]:
    """Return the memory that is in use right after an allocator event, by category, module and line of code."""
    return gathered(
        PeakHolder(_part_of(one), _holding_module(one.module, model), _line_of(one), one.size)
        for one in recorder.allocations.values()
        if one.lives_at(event)
    )


def _holding_module(module: str, model: str) -> str:
    return module if module in {BACKWARD, OPTIMIZER} else _path(module, model)


def _line_of(one: Allocation) -> str:
    # What is there before the first step was put there by us, and workspaces belong to whichever step comes first.
    if one.step < 0 or one.kind == WORKSPACE or one.line is None:
        return ""
    return one.line.described if isinstance(one.line, CodeLine) else one.line
