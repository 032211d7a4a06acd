"""Puts everything back as it was: objects, containers, tensors and random numbers, in place.

A copy of a model would be another model, and on a GPU it would take memory of what is to be measured. So this walks
over all objects that can be reached, notes of each container and object what it holds, copies tensors to the host, and
writes back into the very same objects.
"""

from __future__ import annotations

import importlib
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, torch.dtype, torch.device, torch.Size,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.GeneratorType,
    types.FrameType, types.TracebackType,
)  # fmt: skip
# What has a life outside of this process's memory: threads, connections, files. Going back there would break them.
_FOREIGN = {
    "_io", "asyncio", "concurrent", "ctypes", "http", "importlib", "io", "logging", "mlflow", "multiprocessing",
    "queue", "rich", "signal", "socket", "sqlite3", "ssl", "subprocess", "tensorboard", "threading", "tqdm", "urllib3",
    "wandb", "weakref", "_weakref", "_thread", "_weakrefset", "neptune", "comet_ml", "inspect", "typing", "pathlib",
}  # fmt: skip


class Memento:
    """What everything that can be reached from `roots` was like; `restore` puts it back, as often as needed.

    Of a data set only what its containers and attributes refer to is noted, not its tensors and arrays: they may be
    larger than the host's memory, and reading does not change them. Generators that are under way, class attributes
    and globals of modules cannot be put back.

    Args:
        roots: Where to begin.
        skip: Types whose objects are left alone.
        host: Makes a context in which tensors made are host memory.
    """

    def __init__(
        self,
        roots: Iterable[object],
        *,
        skip: tuple[type, ...] = (),
        host: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._skip = skip
        self._host = host
        self._undo: list[Callable[[], None]] = []
        self._keep: list[object] = []  # an id is only good for as long as its object lives
        self._seen: set[int] = set()
        self._random = RandomState()
        with torch.no_grad(), host():
            self._walk(list(roots))

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad(), self._host():
            for undo in self._undo:
                undo()
        self._random.restore()

    def _walk(self, waiting: list[Any]) -> None:
        in_dataset: set[int] = set()
        while waiting:
            one = waiting.pop()
            if isinstance(one, (*_ATOMS, *self._skip)) or id(one) in self._seen:
                continue
            self._seen.add(id(one))
            self._keep.append(one)
            is_data = isinstance(one, Dataset) or id(one) in in_dataset
            found = self._note(one, is_data=is_data)
            if is_data:
                in_dataset.update(id(thing) for thing in found)
            waiting += found

    def _note(self, one: Any, *, is_data: bool) -> list[Any]:  # noqa: PLR0911, one kind of object each
        """Note one object's own state; returns what it refers to."""
        if isinstance(one, Tensor):
            return [] if is_data else self._note_tensor(one) + self._note_object(one)
        # Of a class derived from a container both are state: Lightning's results are a dict with attributes.
        if isinstance(one, dict):
            return self._note_dict(one) + self._note_object(one)
        if isinstance(one, (list, set, deque, bytearray)):
            return self._note_sequence(one) + self._note_object(one)
        if isinstance(one, (tuple, frozenset)):
            return list(one)
        if isinstance(one, types.MethodType):
            return [one.__self__]
        if type(one).__module__.partition(".")[0] in _FOREIGN:
            return []
        if self._note_generator(one):
            return []
        if type(one).__module__.partition(".")[0] == "numpy":
            if not is_data:
                self._note_array(one)
            return []
        return self._note_object(one)

    def _note_tensor(self, one: Tensor) -> list[Any]:
        if one.is_meta or one.layout is not torch.strided:
            return []
        requires_grad, grad = one.requires_grad, one.grad if one.is_leaf else None
        copied = _written_part(one).to("cpu", copy=True)
        shape = one.shape

        def undo() -> None:
            if one.shape != shape:
                one.data = copied.expand(shape).to(one.device, copy=True)
            else:
                with torch.inference_mode(one.is_inference()):
                    _written_part(one).copy_(copied)
            if one.is_leaf:
                one.grad = grad
                one.requires_grad_(requires_grad)

        self._undo.append(undo)
        return [grad]

    def _note_dict(self, one: dict[Any, Any]) -> list[Any]:
        kind: Any = OrderedDict if isinstance(one, OrderedDict) else dict
        items = list(kind.items(one))

        def undo() -> None:
            now = list(kind.items(one))
            if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
                return
            kind.clear(one)
            for key, value in items:
                kind.__setitem__(one, key, value)

        self._undo.append(undo)
        return [value for _, value in items]

    def _note_sequence(self, one: Any) -> list[Any]:
        held = type(one).copy(one) if isinstance(one, bytearray) else list(one)

        def undo() -> None:
            if isinstance(one, list):
                list.__setitem__(one, slice(None), held)
            elif isinstance(one, bytearray):
                one[:] = held
            else:
                one.clear()
                (one.update if isinstance(one, set) else one.extend)(held)

        self._undo.append(undo)
        return [] if isinstance(one, bytearray) else list(held)

    def _note_generator(self, one: Any) -> bool:
        """Whether it is a stream of random numbers, which goes back to where it was."""
        if isinstance(one, torch.Generator):
            state = one.get_state()
            self._undo.append(lambda: _discard(one.set_state(state)))
        elif isinstance(one, random.Random):
            numbers = one.getstate()
            self._undo.append(lambda: one.setstate(numbers))
        elif type(one).__name__ == "Generator" and hasattr(one, "bit_generator"):  # numpy's
            bits = one.bit_generator.state
            self._undo.append(lambda: setattr(one.bit_generator, "state", bits))
        elif type(one).__name__ == "RandomState" and hasattr(one, "set_state"):
            legacy = one.get_state()
            self._undo.append(lambda: one.set_state(legacy))
        else:
            return False
        return True

    def _note_array(self, one: Any) -> None:
        if hasattr(one, "flags") and one.flags.writeable and hasattr(one, "dtype"):
            copied = one.copy()

            def undo() -> None:
                one[...] = copied

            self._undo.append(undo)

    def _note_object(self, one: Any) -> list[Any]:
        found: list[Any] = []
        held = getattr(one, "__dict__", None)
        if isinstance(held, dict):
            self._seen.add(id(held))
            self._keep.append(held)
            found += self._note_dict(held)
        names = [name for kind in type(one).__mro__ for name in _slots(kind)]
        slots = {name: getattr(one, name) for name in names if hasattr(one, name)}
        if slots:
            self._undo.append(lambda: _set_slots(one, slots))
            found += slots.values()
        return found


class RandomState:
    """Where the process's streams of random numbers are: Python, NumPy, torch on the host and on its accelerator."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        cuda: Any = torch.cuda
        self._cuda = cuda.get_rng_state_all() if cuda.is_initialized() else None
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Go back there."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        if self._numpy is not None:
            importlib.import_module("numpy").random.set_state(self._numpy)

    def packed(self) -> dict[str, Any]:
        """The streams' states as tensors and numbers, by name: what `torch.load(weights_only=True)` takes."""
        version, numbers, gauss = self._python
        packed: dict[str, Any] = {"python": [version, torch.tensor(numbers), gauss], "torch": self._torch}
        if self._cuda is not None:
            packed["cuda"] = list(self._cuda)
        if self._mps is not None:
            packed["mps"] = self._mps
        if isinstance(self._numpy, tuple):
            name, key, *rest = self._numpy
            packed["numpy"] = [str(name), torch.from_numpy(key.astype("int64")), *map(float, rest)]
        return packed

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> RandomState:
        """From what `packed` gave; a stream that is not in it is as it is now."""
        state = cls()
        if "python" in packed:
            version, numbers, gauss = packed["python"]
            state._python = (version, tuple(numbers.tolist()), gauss)
        state._torch = packed.get("torch", state._torch)
        cuda = packed.get("cuda", state._cuda) if torch.cuda.is_available() else None
        state._cuda = None if cuda is None else cuda[: torch.cuda.device_count()]
        state._mps = packed.get("mps", state._mps) if torch.backends.mps.is_available() else None
        if "numpy" in packed:
            name, key, position, has_gauss, cached = packed["numpy"]
            state._numpy = (name, key.numpy().astype("uint32"), int(position), int(has_gauss), cached)
        return state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        return (
            self._python == other._python
            and torch.equal(self._torch, other._torch)
            and _same_tensors(self._cuda, other._cuda)
            and repr(self._numpy) == repr(other._numpy)
        )

    __hash__ = None  # type: ignore[assignment]


def _written_part(tensor: Tensor) -> Tensor:
    """The tensor without what an expansion repeats: such memory cannot be written through all of its places."""
    part = tensor.detach()
    for dim, stride in enumerate(part.stride()):
        if stride == 0 and part.shape[dim] > 1:
            part = part.narrow(dim, 0, 1)
    return part


def _discard(_: object) -> None:
    """For an undo that returns something."""


def _same_tensors(one: list[Tensor] | None, other: list[Tensor] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    names = [f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name for name in names]
    return [name for name in names if name not in {"__dict__", "__weakref__"}]


def _set_slots(one: Any, slots: dict[str, Any]) -> None:
    for name, value in slots.items():
        if getattr(one, name, None) is not value:
            object.__setattr__(one, name, value)
