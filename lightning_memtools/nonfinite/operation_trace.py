"""Records every operation of a step whose outputs hold NaN or Inf: its name, module, line of code and inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    sparse_values,
    tree_leaves,
    tree_map_only,
)
from lightning_memtools.memory.nested_tensors import plain_name
from lightning_memtools.memory.user_code import CodeLine, line_on_stack
from lightning_memtools.nonfinite import step_rerun
from lightning_memtools.nonfinite.finite_checks import floats_of, rows_with

_MOST_SAMPLES = 1024


NAN, POSITIVE, NEGATIVE = "nan", "inf", "-inf"


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Facts about a tensor among the inputs or outputs of an operation."""

    shape: tuple[int, ...]
    dtype: str  # its type, such as ``"float32"``
    n_elements: int  # the number of elements
    n_zeros: int  # the number of elements that are 0
    n_bad: int  # the number of elements that are NaN or Inf
    largest: float  # the largest magnitude among the finite ones; 0 where there are none
    smallest: float  # the smallest value among the finite ones
    n_negative: int  # the number of elements below 0
    # of a bad tensor, the first positions along dimension 0 that hold NaN or Inf; else those that hold 0
    samples: tuple[int, ...]

    def __str__(self) -> str:
        if not self.shape and not self.n_bad:
            return f"{self.smallest:.4g}"
        parts = [
            f"{n} of {self.n_elements} {'is' if n == 1 else 'are'} {what}"
            for n, what in ((self.n_bad, "NaN or Inf"), (self.n_zeros, "0"), (self.n_negative, "below 0"))
            if n
        ]
        return f"{list(self.shape)} {self.dtype} ({', '.join([*parts, f'largest magnitude {self.largest:.4g}'])})"


def kinds_of(tensor: Tensor) -> frozenset[str]:
    """Return those of NaN, Inf and -Inf that a tensor holds; empty for a good one. Waits for the device."""
    floats = floats_of(tensor)
    if floats is None or bool(torch.isfinite(floats).all()):
        return frozenset()
    tests = ((NAN, torch.isnan), (POSITIVE, torch.isposinf), (NEGATIVE, torch.isneginf))
    return frozenset(kind for kind, test in tests if bool(test(floats).any()))


def values_of(tensor: Tensor) -> TensorFacts | None:
    """Describe a tensor; return None where it holds no floating point numbers."""
    floats = floats_of(tensor)
    if floats is None:
        return None
    floats = floats.detach()
    good = torch.isfinite(floats)
    finite = floats[good].double() if floats.device.type != "mps" else floats[good]
    bad, zeros = ~good, floats == 0
    n_bad = int(bad.sum())
    of_interest = bad if n_bad else zeros
    has_samples = floats.dim() > 0 and is_in_memory(tensor) and not tensor.is_complex()
    return TensorFacts(
        shape=tuple(floats.shape if tensor.is_nested else tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        n_elements=floats.numel(),
        n_zeros=int(zeros.sum()),
        n_bad=n_bad,
        largest=float(finite.abs().max()) if finite.numel() else 0.0,
        smallest=float(finite.min()) if finite.numel() else 0.0,
        n_negative=int((floats < 0).sum()),
        samples=tuple(rows_with(of_interest, _MOST_SAMPLES)) if has_samples else (),
    )


BadKinds = frozenset[str]

# The frames beyond this file belong to those who called for the step to be run again; those beyond the second file
# called for backward.
_NOT_IN_STEP = frozenset({step_rerun.__file__})
_NOT_IN_BACKWARD = frozenset({step_rerun.__file__, torch.autograd.graph.__file__})


@dataclass(frozen=True, slots=True)
class BadUse:
    """A tensor with NaN or Inf among the inputs or outputs of an operation."""

    key: int  # the key of its memory; see `StorageKeys`
    kinds: BadKinds  # those of NaN, Inf and -Inf that it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class BadOperation:
    """An operation whose outputs hold NaN or Inf."""

    number: int  # its place in the order of operations
    operation: str  # the name that PyTorch dispatches it by, such as ``"aten.log"``
    of_forward: str  # in backward: the forward operation that it belongs to, such as ``"aten.sqrt"``
    backward: bool  # whether it ran in backward
    module: str  # the module that ran, or whose forward pass belongs to it; empty for training_step itself
    place: CodeLine | None  # the line of code
    inputs: tuple[BadUse, ...]  # the bad tensors among its inputs
    outputs: tuple[BadUse, ...]  # the bad tensors among its outputs
    constant: bool  # whether the bad value was written in the code: NaN or Inf as a number among its arguments
    scalars: tuple[float, ...]  # the numbers among its arguments
    # facts about its floating point inputs, where it made a bad value out of good ones
    took: tuple[TensorFacts, ...] = ()
    gave: tuple[TensorFacts, ...] = ()  # facts about its outputs, likewise
    # whether the same operation on the same values is finite in float64; None if not tried
    finite_when_wide: bool | None = None

    @property
    def gives_nan(self) -> bool:
        """True if an output holds NaN."""
        return _hold_nan(self.outputs)


@dataclass(slots=True)
class _ForwardOperation:
    """The forward operation that a node of the autograd graph belongs to."""

    operation: str
    module: str
    place: CodeLine | None


@dataclass(slots=True)
class _TakenArguments:
    """The arguments of an operation before it ran: tensors that it may overwrite are copies, known by their keys."""

    args: Any
    kwargs: Any
    keys: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class StorageKeys:
    """Gives each tensor's memory a key that is not given again while the trace lasts, even when the tensor is gone."""

    _alive: dict[int, StorageWeakRef] = field(default_factory=dict)

    def key(self, tensor: Tensor) -> int | None:
        """Return the key of a tensor's storage; None for a tensor without one."""
        try:
            if tensor.layout == torch.sparse_coo:
                tensor = sparse_values(tensor)
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
    """Records the operations whose outputs hold NaN or Inf. It reads every output, and so waits for the device."""

    def __init__(self, model: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[BadOperation] = []
        self.memory = StorageKeys()
        self.uses_narrow_floats = False
        self._modules = ModuleStack(model)
        self._forward: dict[int, _ForwardOperation] = {}
        self._n_operations = 0
        self._n_nodes, self._thread = autograd_sequence_number(), get_ident()
        self._last_number: BadOperation | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record operations while the context lasts."""
        # Compiled code would hide its operations.
        with torch.compiler.set_stance("force_eager"), self._modules.watching(), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._n_operations += 1
        backward = in_backward()
        self._note_nodes(func, backward=backward)
        taken = self._take(func, args, kwargs)
        out = func(*args, **kwargs)
        bad = [use for tensor in _tensors(out) if (use := self._use(tensor)) is not None]
        if func is LOCAL_SCALAR:
            if not math.isfinite(_number(out)):
                self._note(func, taken, out, (), backward=backward)
                self._last_number = self.events[-1]
            return out
        if not self.uses_narrow_floats:
            self.uses_narrow_floats = any(t.dtype in {torch.float16, torch.bfloat16} for t in _tensors(out))
        if bad and not _is_view(func):
            self._note(func, taken, out, tuple(bad), backward=backward)
        return out

    def _take(self, func: Any, args: Any, kwargs: Any) -> _TakenArguments:
        taken = _TakenArguments(args, kwargs)
        if operator_schema(func).is_mutable:
            taken.args, taken.kwargs = tree_map_only(Tensor, lambda each: self._copy(each, taken), (args, kwargs))
        return taken

    def _copy(self, tensor: Tensor, taken: _TakenArguments) -> Tensor:
        """Return a copy of a tensor that may be overwritten now."""
        if not tensor.is_floating_point() or not is_in_memory(tensor):
            return tensor
        copied = tensor.clone()
        key = self.memory.key(tensor)
        if key is not None:
            taken.keys[id(copied)] = key
        return copied

    def _use(self, tensor: Tensor, taken: _TakenArguments | None = None) -> BadUse | None:
        kinds = kinds_of(tensor)
        if not kinds:
            return None
        key = taken.keys.get(id(tensor)) if taken is not None else None
        key = self.memory.key(tensor) if key is None else key
        return None if key is None else BadUse(key, kinds)

    def _note_nodes(self, func: Any, *, backward: bool) -> None:
        """Note which forward operation the nodes belong to that autograd has just made.

        Under torch.func.grad an operation makes a node for each level. A backward pass that is differentiated makes
        nodes too, which belong to the operation whose backward it runs.
        """
        if get_ident() != self._thread:  # on a GPU backward has a thread of its own, which counts from 0
            return
        first, self._n_nodes = self._n_nodes, autograd_sequence_number()
        if first >= self._n_nodes:
            return
        if backward:
            operation = self._forward.get(node_in_backward())
        else:
            operation = _ForwardOperation(_name(func), self._modules.now, _line_here(in_backward=False))
        if operation is not None:
            self._forward.update(dict.fromkeys(range(first, self._n_nodes), operation))

    def _note(
        self, func: Any, taken: _TakenArguments, out: Any, outputs: tuple[BadUse, ...], *, backward: bool
    ) -> None:
        flat = tree_leaves((taken.args, taken.kwargs))
        numbers = tuple(float(each) for each in flat if isinstance(each, (int, float)) and not isinstance(each, bool))
        constant = not all(map(math.isfinite, numbers))
        inputs = [use for each in flat if isinstance(each, Tensor) and (use := self._use(each, taken)) is not None]
        if constant and self._last_number is not None:
            # A number read from a bad tensor by .item().
            inputs += self._last_number.inputs
            constant = False
        known = self._forward.get(node_in_backward()) if backward else None
        place = _line_here(in_backward=backward)
        facts: dict[str, Any] = {}
        if not inputs or (_hold_nan(outputs) and not _hold_nan(inputs)):
            facts["took"] = _described([each for each in flat if isinstance(each, Tensor)])
            facts["gave"] = _described(list(_tensors(out)))
            facts["finite_when_wide"] = _is_finite_when_wide(func, taken.args, taken.kwargs)
        event = BadOperation(
            number=self._n_operations,
            operation=_name(func),
            # A line within backward is the user's own, of a torch.autograd.Function: it stands for itself.
            of_forward=known.operation if known is not None and place is None else "",
            backward=backward,
            module=(known.module if known is not None else "") or self._modules.now,
            place=place or (known.place if known is not None else None),
            inputs=tuple(inputs),
            outputs=outputs,
            constant=constant,
            scalars=numbers,
            **facts,
        )
        self.events.append(event)


def _name(func: Any) -> str:
    name: str = func.name().partition(".")[0].replace("::", ".")
    return name.replace("aten._", "aten.") if name.endswith("softmax") else name


def _hold_nan(uses: Sequence[BadUse]) -> bool:
    return any(NAN in use.kinds for use in uses)


def _line_here(*, in_backward: bool) -> CodeLine | None:
    """Return the innermost line on the stack that belongs to the user or to an installed library.

    In backward only a line that runs within it counts: the backward of a torch.autograd.Function, or a forward pass
    that is run again.
    """
    return line_on_stack(stop_at=_NOT_IN_BACKWARD if in_backward else _NOT_IN_STEP)


def _is_view(func: Any) -> bool:
    """Return whether an operation writes nothing, so that the last writer of the memory remains."""
    returns = operator_schema(func).returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for each in out:
            yield from _tensors(each)


def _described(tensors: Sequence[Tensor]) -> tuple[TensorFacts, ...]:
    return tuple(values for tensor in tensors if (values := values_of(tensor)) is not None)


def _is_finite_when_wide(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Return whether the operation is finite if it computes in float64; None where that is not known."""
    narrow = {torch.float32, torch.float16, torch.bfloat16}

    def widen(each: Any) -> Any:
        if isinstance(each, Tensor):
            if not is_in_memory(each):
                return each
            return each.double() if each.dtype in narrow else each.clone()
        return torch.float64 if isinstance(each, torch.dtype) and each in narrow else each

    try:
        args, kwargs = tree_map_only((Tensor, torch.dtype), widen, (args, kwargs))
        return not any(kinds_of(tensor) for tensor in _tensors(func(*args, **kwargs)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


class ModuleStack:
    """Knows which module of a model runs now. It uses global hooks, so that nothing on the model changes."""

    def __init__(self, model: Module) -> None:
        self._names = {id(part): plain_name(name) for name, part in model.named_modules()}
        self._running: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the modules while the context lasts."""
        self._running.clear()
        hooks = [
            register_module_forward_pre_hook(self._enter),
            # Also when forward fails: else the module would seem to run for ever.
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def now(self) -> str:
        """The name of the innermost known module that runs; empty outside of all, as in training_step itself."""
        return next((name for name in reversed(self._running) if name), "")

    def _enter(self, module: Module, _arguments: Any) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
