"""Records each operation of a step whose outputs hold NaN or Inf: its name, module, line of code and inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memtools._torch import (
    LOCAL_SCALAR,
    DispatchMode,
    autograd_sequence_number,
    has_readable_values,
    in_backward,
    is_in_memory,
    node_in_backward,
    operator_schema,
    tree_leaves,
    tree_map_only,
    uncoalesced_parts,
    without_subclass,
)
from lightning_memtools.memory.nested_tensors import plain_name, tensors_in
from lightning_memtools.memory.user_code import CodeLine, line_on_stack
from lightning_memtools.memory.virtual.patches import Patches, allow_subclasses
from lightning_memtools.nonfinite import step_rerun
from lightning_memtools.nonfinite.finite_checks import floats_of, rows_with

_MOST_SAMPLES = 1024
# The frames beyond this file belong to those who called for the step to be run again; those beyond the second file
# called for backward.
_NOT_IN_STEP = frozenset({step_rerun.__file__})
_NOT_IN_BACKWARD = frozenset({step_rerun.__file__, torch.autograd.graph.__file__})


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A description of one input or output tensor of an operation, such as its shape, dtype and number of zeros."""

    text: str  # such as ``"[8] float32 (1 of 8 is 0, largest magnitude 5.59)"``; of a good number, its value
    shape: tuple[int, ...]
    dtype: str  # such as ``"float32"``
    # of a bad tensor, the first positions along dimension 0 that hold NaN or Inf; else those that hold 0
    samples: tuple[int, ...]


BadMemory = dict[int, bool]
"""Memory with NaN or Inf: the key of its storage (see `StorageKeys`) to whether it holds NaN, and not only Inf."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BadOperation:
    """An operation whose outputs hold NaN or Inf."""

    number: int  # its place among those that were recorded
    operation: str  # the name that PyTorch dispatches it by, such as ``"aten.log"``
    of_forward: str  # in backward: the forward operation that it belongs to, such as ``"aten.sqrt"``
    backward: bool  # whether it ran in backward
    module: str  # the module that ran, or whose forward pass belongs to it; empty for training_step itself
    place: CodeLine | None  # the line of code
    inputs: BadMemory  # the bad tensors among its inputs
    outputs: BadMemory  # the bad tensors among its outputs
    constant: bool  # whether the bad value was written in the code: NaN or Inf as a number among its arguments
    scalars: tuple[float, ...]  # the numbers among its arguments
    # --- where it made a bad value out of good ones
    took: tuple[TensorFacts, ...] = ()  # facts about its floating point inputs
    gave: tuple[TensorFacts, ...] = ()  # facts about its outputs
    finite_when_wide: bool | None = None  # whether it is finite in float64 on the same values; None if not known
    masks: bool = False  # whether it multiplies every NaN by the 0 of a mask of zeros and ones, too late to remove it


@dataclass(frozen=True, slots=True)
class _ForwardOperation:
    """A forward operation that created an autograd node, with the module and the line of code that called it."""

    operation: str
    module: str
    place: CodeLine | None


def bad_floats_of(tensor: Tensor) -> Tensor | None:
    """Return the floating-point values of a tensor if any is NaN or Inf, else None. Waits for the device."""
    floats = floats_of(tensor)
    return None if floats is None or bool(torch.isfinite(floats).all()) else floats


def facts_of(tensor: Tensor, *, only_nan: bool = False) -> TensorFacts | None:
    """Describe a tensor; None if it has no floating-point values. With `only_nan`, only samples with NaN are listed."""
    floats = floats_of(tensor)
    if floats is None:
        return None
    floats = floats.detach()
    bad, zeros, n = ~torch.isfinite(floats), floats == 0, floats.numel()
    n_bad = int(bad.sum())
    shape, finite = tuple(floats.shape if tensor.is_nested else tensor.shape), floats[~bad]
    counts = ((n_bad, "NaN or Inf"), (int(zeros.sum()), "0"), (int((floats < 0).sum()), "below 0"))
    parts = [f"{count} of {n} {'is' if count == 1 else 'are'} {what}" for count, what in counts if count]
    parts.append(f"largest magnitude {float(finite.abs().max()) if finite.numel() else 0.0:.4g}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{float(floats):.4g}" if not shape and not n_bad else f"{list(shape)} {dtype} ({', '.join(parts)})"
    has_samples = floats.dim() > 0 and is_in_memory(tensor) and not tensor.is_complex()
    marked = floats.isnan() if only_nan else bad if n_bad else zeros
    samples = tuple(rows_with(marked, _MOST_SAMPLES)) if has_samples else ()
    return TensorFacts(text, shape, dtype, samples)


class StorageKeys:
    """Assigns a unique key to each tensor's storage. A key is never reused, even after its storage was freed."""

    def __init__(self) -> None:
        self._alive: dict[int, StorageWeakRef] = {}

    def key(self, tensor: Tensor) -> int | None:
        """Return the key of a tensor's storage; None if the tensor has no storage."""
        try:
            if tensor.layout == torch.sparse_coo:
                _, tensor = uncoalesced_parts(tensor)
            elif tensor.layout != torch.strided or tensor.is_nested:
                tensor = tensor.values()
            if not has_readable_values(tensor):
                return None
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError):
            return None
        # The weak reference keeps the address from being given to another storage, not the memory itself.
        return int(self._alive.setdefault(reference.cdata, reference).cdata)


class OperationTrace(DispatchMode):
    """Records the operations whose outputs hold NaN or Inf. Slow: it reads every output and waits for the device."""

    def __init__(self, model: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[BadOperation] = []
        self.memory = StorageKeys()
        self._names = {id(part): plain_name(name) for name, part in model.named_modules()}
        self._running: list[str] = []  # the modules that run, innermost last
        self._forward: dict[int, _ForwardOperation] = {}
        self._n_nodes, self._thread = autograd_sequence_number(), get_ident()
        self._read: BadMemory = {}  # where the last bad Python number was read from

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context manager that records operations. Global module hooks tell it which module is running."""
        self._running.clear()
        allow_subclasses(patches := Patches())
        hooks = [
            register_module_forward_pre_hook(lambda module, _: self._running.append(self._names.get(id(module), ""))),
            # Also when forward fails: else the module would seem to run for ever.
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            # Compiled code would hide its operations.
            with torch.compiler.set_stance("force_eager"), self:
                yield
        finally:
            patches.undo()
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        backward = in_backward()
        self._note_nodes(func, backward=backward)
        # A user's class may have other methods than Tensor.
        taken, keys = tree_map_only(Tensor, without_subclass, (args, kwargs or {})), dict[int, int]()
        # Tensors that it may overwrite are copied, and known by their keys. The schemas of some normalizations conceal
        # that they write running statistics.
        if operator_schema(func).is_mutable or "batch_norm" in func.name():
            taken = tree_map_only(Tensor, lambda each: self._copy(each, keys), taken)
        out = func(*args, **(kwargs or {}))
        bad = self._bad_among(tensors_in(out), {})
        if func is LOCAL_SCALAR:
            if isinstance(out, float) and not math.isfinite(out):
                self._read = self._bad_among(tree_leaves(taken), keys)
        elif bad and not func.is_view:
            self._note(func, taken, keys, out, bad, backward=backward)
        return out

    def _copy(self, tensor: Tensor, keys: dict[int, int]) -> Tensor:
        if not tensor.is_floating_point() or not is_in_memory(tensor):
            return tensor
        copied = tensor.clone()
        key = self.memory.key(tensor)
        if key is not None:
            keys[id(copied)] = key
        return copied

    def _bad_among(self, values: Iterable[Any], keys: Mapping[int, int]) -> BadMemory:
        """Return the memory of the bad tensors among `values`. `keys` has those of copies, by the copy's id."""
        bad: BadMemory = {}
        for value in values:
            floats = bad_floats_of(value) if isinstance(value, Tensor) else None
            if floats is not None and (key := keys.get(id(value), self.memory.key(value))) is not None:
                bad[key] = bad.get(key, False) or bool(floats.isnan().any())
        return bad

    def _note_nodes(self, func: Any, *, backward: bool) -> None:
        """Record which forward operation created the autograd nodes that are new since the last call.

        An operation may create several nodes, for example under nested torch.func.grad. Nodes that are created in
        backward (create_graph=True) are recorded for the forward operation whose backward is running.
        """
        if get_ident() != self._thread:  # on a GPU backward has a thread of its own, which counts from 0
            return
        first, self._n_nodes = self._n_nodes, autograd_sequence_number()
        if first >= self._n_nodes:
            return
        if backward:
            operation = self._forward.get(node_in_backward())
        else:
            operation = _ForwardOperation(_name(func), self._module_now, _line_here(in_backward=False))
        if operation is not None:
            self._forward.update(dict.fromkeys(range(first, self._n_nodes), operation))

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()

    @property
    def _module_now(self) -> str:
        """The name of the innermost running module; "" if training_step itself is running."""
        return next((name for name in reversed(self._running) if name), "")

    def _note(
        self,
        func: Any,
        taken: tuple[Any, Any],
        keys: dict[int, int],
        out: Any,
        outputs: BadMemory,
        *,
        backward: bool,
    ) -> None:
        flat = tree_leaves(taken)
        tensors = [each for each in flat if isinstance(each, Tensor)]
        numbers = tuple(float(each) for each in flat if isinstance(each, (int, float)) and not isinstance(each, bool))
        inputs = self._bad_among(flat, keys)
        is_constant = not all(map(math.isfinite, numbers))
        if is_constant and self._read:
            inputs, is_constant = {**self._read, **inputs}, False
        known = self._forward.get(node_in_backward()) if backward else None
        place = _line_here(in_backward=backward)
        makes_bad = not inputs or (any(outputs.values()) and not any(inputs.values()))
        took = list(map(facts_of, tensors)) if makes_bad else []
        gave = [facts_of(each, only_nan=bool(inputs)) for each in tensors_in(out)] if makes_bad else []
        self.events.append(
            BadOperation(
                number=len(self.events),
                operation=_name(func),
                # A line within backward is the user's own, of a torch.autograd.Function: it stands for itself.
                of_forward=known.operation if known is not None and place is None else "",
                backward=backward,
                module=(known.module if known is not None else "") or self._module_now,
                place=place or (known.place if known is not None else None),
                inputs=inputs,
                outputs=outputs,
                constant=is_constant,
                scalars=numbers,
                took=tuple(facts for facts in took if facts is not None),
                gave=tuple(facts for facts in gave if facts is not None),
                finite_when_wide=_is_finite_when_wide(func, *taken) if makes_bad else None,
                masks=_name(func) in {"aten.mul", "aten.mul_"} and _is_late_mask(tensors),
            )
        )


def _is_late_mask(factors: Sequence[Tensor]) -> bool:
    """Return True if there are two factors: a mask of zeros and ones, and a tensor that is NaN only at the zeros."""
    if len(factors) != 2 or not all(map(has_readable_values, factors)):  # noqa: PLR2004, a product
        return False
    value, mask = factors if bool(factors[0].isnan().any()) else factors[::-1]
    return bool(((mask == 0) | (mask == 1)).all() and not (value.isnan() & (mask != 0)).any())


def _name(func: Any) -> str:
    name: str = func.name().partition(".")[0].replace("::", ".")
    return name.replace("aten._", "aten.") if name.endswith("softmax") else name


def _line_here(*, in_backward: bool) -> CodeLine | None:
    """Return the innermost line of code on the stack that is not in torch or this package; None if there is none.

    In backward, only code that backward itself runs counts, such as a torch.autograd.Function or a recomputed layer.
    """
    return line_on_stack(stop_at=_NOT_IN_BACKWARD if in_backward else _NOT_IN_STEP)


def _is_finite_when_wide(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Return whether the operation gives a finite result in float64; None if it cannot be computed in float64."""
    narrow = {torch.float32, torch.float16, torch.bfloat16}

    def widen(each: Any) -> Any:
        if isinstance(each, Tensor) and is_in_memory(each):
            return each.double() if each.dtype in narrow else each.clone()
        return torch.float64 if isinstance(each, torch.dtype) and each in narrow else each

    try:
        args, kwargs = tree_map_only((Tensor, torch.dtype), widen, (args, kwargs))
        return all(bad_floats_of(tensor) is None for tensor in tensors_in(func(*args, **kwargs)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
