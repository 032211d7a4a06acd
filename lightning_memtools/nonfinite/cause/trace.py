"""Records every operation of a step that gives NaN or Inf: what it is, where it stands, what went in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_memtools.nonfinite.cause.graph import in_backward, newest_node, node_in_backward
from lightning_memtools.nonfinite.cause.places import ModuleStack, Place, place_here
from lightning_memtools.nonfinite.cause.values import NAN, Values, kinds_of, values_of

Kinds = frozenset[str]


@dataclass(frozen=True, slots=True)
class Use:
    """A bad tensor that an operation took or gave.

    Attributes:
        key: Which memory it lies in.
        kinds: Which of NaN, Inf and -Inf it holds.
    """

    key: int
    kinds: Kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An operation that gave NaN or Inf.

    Attributes:
        number: Its place in the order of operations.
        operation: Its name, as ``"aten.log"``.
        of_forward: In backward: the forward operation that it belongs to, as ``"aten.sqrt"``.
        backward: Whether it ran in backward.
        module: The module that ran, or whose forward pass belongs to it; empty for training_step itself.
        place: The line of code.
        inputs: The bad tensors that it took.
        outputs: The bad tensors that it gave.
        constant: Whether the bad value was written in the code: an infinite number among its arguments.
        scalars: The numbers among its arguments.
        took: All floating point tensors that it took, where it made a bad value out of good ones.
        gave: What it gave, likewise.
        finite_when_wide: Whether the same operation on the same values is finite in float64; None if not tried.
    """

    number: int
    operation: str
    of_forward: str
    backward: bool
    module: str
    place: Place | None
    inputs: tuple[Use, ...]
    outputs: tuple[Use, ...]
    constant: bool
    scalars: tuple[float, ...]
    took: tuple[Values, ...] = ()
    gave: tuple[Values, ...] = ()
    finite_when_wide: bool | None = None

    @property
    def gives_nan(self) -> bool:
        """Whether it gave a NaN."""
        return any(NAN in use.kinds for use in self.outputs)

    @property
    def makes_nan(self) -> bool:
        """Whether it gave a NaN and took none."""
        return self.gives_nan and not any(NAN in use.kinds for use in self.inputs)


@dataclass(slots=True)
class _Forward:
    """What is known of a node of the graph."""

    operation: str
    module: str
    place: Place | None


@dataclass(slots=True)
class _Taken:
    """What an operation took, as it was before: tensors that it may overwrite are copies, known by their keys."""

    args: Any
    kwargs: Any
    keys: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Memory:
    """Recognises memory by its storage, for as long as the trace lasts, also when the tensor is gone."""

    _alive: dict[int, StorageWeakRef] = field(default_factory=dict)

    def key(self, tensor: Tensor) -> int | None:
        """The storage's key; None for a tensor without one."""
        if tensor.layout == torch.sparse_coo:
            tensor = tensor._values()  # noqa: SLF001, values() refuses what is not coalesced
        elif tensor.layout != torch.strided:
            tensor = tensor.values()
        try:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError):
            return None
        # The weak reference keeps the address from being given to another storage, not the memory itself.
        return int(self._alive.setdefault(reference.cdata, reference).cdata)


class Trace(TorchDispatchMode):
    """Records the operations that give NaN or Inf. Each operation's outputs are read: this waits for the device."""

    def __init__(self, model: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.memory = Memory()
        self.uses_narrow_floats = False
        self._modules = ModuleStack(model)
        self._forward: dict[int, _Forward] = {}
        self._n_operations = 0
        self._last_number: Event | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record, as long as the context lasts."""
        # Compiled code would hide its operations.
        with torch.compiler.set_stance("force_eager"), self._modules.watching(), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._n_operations += 1
        backward = in_backward()
        if not backward:
            self._note_forward(func)
        taken = self._take(func, args, kwargs)
        out = func(*args, **kwargs)
        bad = [use for tensor in _tensors(out) if (use := self._use(tensor)) is not None]
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001, its name: what .item() runs
            if not math.isfinite(_number(out)):
                self._note(func, taken, out, (), backward=backward)
                self._last_number = self.events[-1]
            return out
        if not self.uses_narrow_floats:
            self.uses_narrow_floats = any(t.dtype in {torch.float16, torch.bfloat16} for t in _tensors(out))
        if bad and not _is_view(func):
            self._note(func, taken, out, tuple(bad), backward=backward)
        return out

    def _take(self, func: Any, args: Any, kwargs: Any) -> _Taken:
        taken = _Taken(args, kwargs)
        if func._schema.is_mutable:  # noqa: SLF001, no public way tells
            taken.args, taken.kwargs = tree_map_only(Tensor, lambda each: self._copy(each, taken), (args, kwargs))
        return taken

    def _copy(self, tensor: Tensor, taken: _Taken) -> Tensor:
        """Of a tensor that may be overwritten now."""
        if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_meta:
            return tensor
        copied = tensor.clone()
        key = self.memory.key(tensor)
        if key is not None:
            taken.keys[id(copied)] = key
        return copied

    def _use(self, tensor: Tensor, taken: _Taken | None = None) -> Use | None:
        kinds = kinds_of(tensor)
        if not kinds:
            return None
        key = taken.keys.get(id(tensor)) if taken is not None else None
        key = self.memory.key(tensor) if key is None else key
        return None if key is None else Use(key, kinds)

    def _note_forward(self, func: Any) -> None:
        number = newest_node()
        if number not in self._forward:
            self._forward[number] = _Forward(_name(func), self._modules.now, place_here(in_backward=False))

    def _note(self, func: Any, taken: _Taken, out: Any, outputs: tuple[Use, ...], *, backward: bool) -> None:
        flat, _ = tree_flatten((taken.args, taken.kwargs))
        numbers = tuple(float(each) for each in flat if isinstance(each, (int, float)) and not isinstance(each, bool))
        constant = not all(map(math.isfinite, numbers))
        inputs = [use for each in flat if isinstance(each, Tensor) and (use := self._use(each, taken)) is not None]
        if constant and self._last_number is not None:
            # A number read from a bad tensor by .item().
            inputs += self._last_number.inputs
            constant = False
        known = self._forward.get(node_in_backward()) if backward else None
        place = place_here(in_backward=backward)
        event = Event(
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
        )
        if not inputs or event.makes_nan:
            tensors = [each for each in flat if isinstance(each, Tensor)]
            object.__setattr__(event, "took", _described(tensors))
            object.__setattr__(event, "gave", _described(list(_tensors(out))))
            object.__setattr__(event, "finite_when_wide", _is_finite_when_wide(func, taken.args, taken.kwargs))
        self.events.append(event)


def _name(func: Any) -> str:
    name: str = func.name().partition(".")[0].replace("::", ".")
    return name.replace("aten._", "aten.") if name.endswith("softmax") else name


def _is_view(func: Any) -> bool:
    """Whether it writes nothing: the memory's writer stays who it was."""
    returns = func._schema.returns  # noqa: SLF001, no public way tells
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for each in out:
            yield from _tensors(each)


def _described(tensors: Sequence[Tensor]) -> tuple[Values, ...]:
    return tuple(values for tensor in tensors if (values := values_of(tensor)) is not None)


def _is_finite_when_wide(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Whether the operation is finite if it computes in float64; None where that cannot be told."""
    narrow = {torch.float32, torch.float16, torch.bfloat16}

    def widen(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.double() if each.dtype in narrow else each.clone()
        return torch.float64 if isinstance(each, torch.dtype) and each in narrow else each

    try:
        args, kwargs = tree_map_only((Tensor, torch.dtype), widen, (args, kwargs))
        return not any(kinds_of(tensor) for tensor in _tensors(func(*args, **kwargs)))
    except (RuntimeError, NotImplementedError, TypeError):
        return None
