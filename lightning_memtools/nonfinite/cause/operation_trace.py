"""Records every operation of a step that gives NaN or Inf: its name, module, line of code and inputs."""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_memtools.nonfinite.cause.tensor_facts import NAN, Values, kinds_of, values_of
from lightning_memtools.nonfinite.tensor_names import plain_name

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


def in_backward() -> bool:
    """Whether backward runs."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001, no public way tells


def newest_node() -> int:
    """The number of the node that was made last: it is made, and takes its number, before its operation runs."""
    return int(torch._C._autograd._get_sequence_nr()) - 1  # noqa: SLF001, no public way tells


def node_in_backward() -> int:
    """The number of the node whose backward runs; -1 outside of backward."""
    node: Any = torch._C._current_autograd_node()  # noqa: SLF001, no public way tells
    return -1 if node is None else int(node._sequence_nr())  # noqa: SLF001, as above


_OURS = str(Path(__file__).parents[2])


_TORCH = str(Path(torch.__file__).parent)


_STANDARD = sysconfig.get_paths()["stdlib"]


_INSTALLED = ("site-packages", "dist-packages")


# Installed packages that only pass calls on.
_CARRIERS = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")


_ENGINE = str(Path(_TORCH) / "autograd" / "graph.py")  # who calls backward; frames within it belong to backward


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code.

    Attributes:
        file: The file's path.
        line: The line's number, from 1.
        function: The function that the line belongs to.
        caller: Where the line is in an installed package: (file, line) of the user's code that led there.
    """

    file: str
    line: int
    function: str
    caller: tuple[str, int] | None = None

    def __str__(self) -> str:
        text = f"{short(self.file)}:{self.line}"
        return text if self.caller is None else f"{text}, called from {short(self.caller[0])}:{self.caller[1]}"


def short(file: str) -> str:
    """A path below the working directory as it is from there, within an installed package from the package on."""
    parts = Path(file).parts
    for installed in _INSTALLED:
        if installed in parts:
            return str(Path(*parts[parts.index(installed) + 1 :]))
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


@lru_cache(maxsize=4096)
def kind_of(file: str) -> str:
    """user, installed, ours, or passing (torch, Lightning, the standard library)."""
    if file.startswith(_OURS):
        return "ours"
    parts = Path(file).parts
    installed = next((parts.index(name) for name in _INSTALLED if name in parts), None)
    if file.startswith(("<", _TORCH)) or (installed is None and file.startswith(_STANDARD)):
        return "passing"
    if installed is None:
        return "user"
    return "passing" if parts[installed + 1] in _CARRIERS else "installed"


def place_here(*, in_backward: bool) -> Place | None:
    """The innermost line on the stack that belongs neither to torch, Lightning nor this package.

    In backward only what runs within it counts (the backward of a torch.autograd.Function, or a forward pass that is
    run again); None where that is torch's alone.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001, the stack itself: traceback would read files for every operation
    found: tuple[str, int, str] | None = None
    while frame is not None:
        file, code = frame.f_code.co_filename, frame.f_code
        if file.endswith("rerun.py") and kind_of(file) == "ours":
            break  # beyond are those who called for the step to be run again
        if in_backward and file == _ENGINE:
            break
        kind = kind_of(file)
        if kind == "user":
            if found is None:
                return Place(file, frame.f_lineno, code.co_name)
            return Place(*found, caller=(file, frame.f_lineno))
        if kind == "installed" and found is None:
            found = file, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None if found is None else Place(*found)


class ModuleStack:
    """Which module of a model runs now. Global hooks, so that nothing on the model changes."""

    def __init__(self, model: Module) -> None:
        self._names = {id(part): plain_name(name) for name, part in model.named_modules()}
        self._running: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, as long as the context lasts."""
        self._running.clear()
        hooks = [
            register_module_forward_pre_hook(self._enter),
            # Also when forward fails: else it would seem to run for ever.
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
