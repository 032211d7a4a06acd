"""Snapshot and restore, in place, of everything that can be reached from some objects.

A copy of a model would be another model, and on a GPU it would take the memory that is to be measured. A snapshot
therefore walks over all objects that can be reached, records the contents of each container and object, copies tensors
to the host, and writes everything back into the same objects.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memtools._torch import is_in_memory, without_subclass
from lightning_memtools.memory.nested_tensors import slots_of, tensors_in
from lightning_memtools.state.random_state import RandomState, generator_state, set_generator_state

_IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, torch.dtype, torch.device, torch.Size,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.GeneratorType,
    types.FrameType, types.TracebackType,
)  # fmt: skip
# Modules whose objects stand for something outside of this process's memory: threads, connections, files. Writing back
# their attributes would break them.
_EXTERNAL_MODULES = {
    "_io", "asyncio", "concurrent", "ctypes", "http", "importlib", "io", "logging", "mlflow", "multiprocessing",
    "queue", "rich", "signal", "socket", "sqlite3", "ssl", "subprocess", "tensorboard", "threading", "tqdm", "urllib3",
    "wandb", "weakref", "_weakref", "_thread", "_weakrefset", "neptune", "comet_ml", "inspect", "typing", "pathlib",
}  # fmt: skip


class StateSnapshot:
    """Records the state of all objects that can be reached from `roots`, and restores it as often as needed.

    The states of all global random generators are included. In a dataset, containers and attributes are recorded, but
    not the values of tensors and arrays. These may not fit in host memory, and loading data does not change them. If a
    container has more than 10,000 items, and a sample of 64 holds no tensor, the items are not searched further.
    Generator functions that are running, class attributes and global variables are not restored.

    Args:
        roots: The objects to start from, such as a module.
        skip: Types whose objects are neither recorded nor searched.
        host: A function that returns a context manager in which new tensors are allocated in host memory.
    """

    def __init__(
        self,
        roots: Iterable[object],
        *,
        skip: tuple[type, ...] = (),
        host: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._ignored = (*_IMMUTABLE, *skip)
        self._host = host
        self._restorers: list[Callable[[], object]] = []
        # Objects are told apart by their ids, which are unique only while the objects live.
        self._recorded: dict[int, object] = {}
        self._random = RandomState.now()
        with torch.no_grad(), host():
            self._record_all(list(roots))

    def restore(self) -> None:
        """Restore everything that was recorded."""
        with torch.no_grad(), self._host():
            for restore in self._restorers:
                restore()
        self._random.restore()

    def _record_all(self, waiting: list[Any]) -> None:
        in_dataset: set[int] = set()
        while waiting:
            value = waiting.pop()
            if isinstance(value, self._ignored) or id(value) in self._recorded:
                continue
            self._recorded[id(value)] = value
            is_data = isinstance(value, Dataset) or id(value) in in_dataset
            referred = self._record(value, is_data=is_data)
            if is_data:
                in_dataset.update(id(each) for each in referred)
            waiting += referred

    def _record(self, value: Any, *, is_data: bool) -> list[Any]:  # noqa: PLR0911, one return for each kind of object
        """Record the state of one object; if `is_data`, without tensor values. Return the objects that it refers to."""
        if isinstance(value, Tensor):
            return [] if is_data else self._record_tensor(value) + self._record_object(value)
        # A class derived from a container has items and attributes: Lightning's results are a dict with attributes.
        if isinstance(value, dict):
            return self._record_dict(value) + self._record_object(value)
        if isinstance(value, (list, set, deque)):
            return self._record_sequence(value) + self._record_object(value)
        if isinstance(value, (tuple, frozenset)):
            return _walked(list(iter(value)))  # a tuple may refuse to say its length
        if isinstance(value, types.MethodType):
            return [value.__self__]
        module = type(value).__module__.partition(".")[0]
        if module in _EXTERNAL_MODULES or self._record_generator(value):
            return []
        if module == "numpy":
            if not is_data:
                self._record_array(value)
            return []
        return self._record_object(value)

    def _record_tensor(self, tensor: Tensor) -> list[Any]:
        requires_grad, grad = tensor.requires_grad, tensor.grad if tensor.is_leaf else None

        def restore_gradient() -> None:
            if tensor.is_leaf:
                tensor.grad = grad
                if tensor.requires_grad != requires_grad:  # the parameter of a lazy module refuses to be asked
                    tensor.requires_grad_(requires_grad)

        if not is_in_memory(tensor):  # a fake one has no values
            self._restorers.append(restore_gradient)
            return [grad]
        try:
            copied = _without_expansion(tensor).to("cpu", copy=True)
        except (RuntimeError, NotImplementedError):
            return []  # a subclass that refuses to be copied
        shape = tensor.shape

        def restore() -> None:
            if tensor.shape != shape:
                tensor.data = copied.expand(shape).to(tensor.device, copy=True)
            else:
                with torch.inference_mode(tensor.is_inference()):
                    _without_expansion(tensor).copy_(copied)
            restore_gradient()

        self._restorers.append(restore)
        return [grad]

    def _record_dict(self, container: dict[Any, Any]) -> list[Any]:
        self._restorers.append(restorer_of_dict(container))
        return _walked(list(dict.values(container)))

    def _record_sequence(self, container: Any) -> list[Any]:
        items = list(iter(container))

        def restore() -> None:
            if isinstance(container, list):
                list.__setitem__(container, slice(None), items)
            else:
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(items)

        self._restorers.append(restore)
        return _walked(items)

    def _record_generator(self, value: Any) -> bool:
        """Record the state of a random generator and return True. Return False for any other object."""
        state = generator_state(value)
        if state is None:
            return False
        self._restorers.append(lambda: set_generator_state(value, state))
        return True

    def _record_array(self, array: Any) -> None:
        if getattr(getattr(array, "flags", None), "writeable", False):  # a dtype has flags too, a number
            copied = array.copy()

            def restore() -> None:
                array[...] = copied

            self._restorers.append(restore)

    def _record_object(self, value: Any) -> list[Any]:
        """Record an object's attributes, both those in `__dict__` and those in slots. Return their values."""
        referred: list[Any] = []
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._recorded[id(attributes)] = attributes
            referred += self._record_dict(attributes)
        slots = slots_of(value)
        if slots:
            self._restorers.append(lambda: _set_slots(value, slots))
            referred += slots.values()
        return referred


def restorer_of_dict(container: dict[Any, Any]) -> Callable[[], None]:
    """Return a function that restores a dict's present items. It does not write to a dict that still has them."""
    # The methods of the base class: those of a derived class may do more than to read and write, or refuse.
    base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
    items = list(base.items(container))

    def restore() -> None:
        now = list(base.items(container))
        if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
            return
        base.clear(container)
        for key, value in items:
            base.__setitem__(container, key, value)

    return restore


_LONG = 10_000


def _walked(items: list[Any]) -> list[Any]:
    """Return the items of a container that are to be searched for further state: usually all of them.

    Return [] if there are over 10,000 and a sample of 64 holds no tensor: a million items would take minutes.
    """
    if len(items) <= _LONG or any(next(tensors_in(item), None) is not None for item in items[:: len(items) // 64]):
        return items
    return []


def _without_expansion(tensor: Tensor) -> Tensor:
    """Return a view that can be written in place, even of an expanded tensor: expanded dimensions get size 1."""
    part = without_subclass(tensor)
    for dim, stride in enumerate(part.stride()):
        if stride == 0 and part.shape[dim] > 1:
            part = part.narrow(dim, 0, 1)
    return part


def _set_slots(value: Any, slots: dict[str, Any]) -> None:
    for name, held in slots.items():
        if getattr(value, name, None) is not held:
            object.__setattr__(value, name, held)  # a frozen dataclass refuses setattr
