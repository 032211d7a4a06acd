"""Replaces the tensors of a user's module with fake tensors for a while, and restores the module exactly.

Nothing is copied. The references that a module, its submodules and the plain objects and containers in them hold are
saved, and tensors among them are exchanged for fake ones of the same size. Putting the saved references back undoes
everything that a step did to those attributes. Two kinds of references outside of the objects are treated alike: those
in containers that a module's class holds, and variables that hooks of modules can reach. So what hooks note of a traced
step is forgotten.

Random generators that the objects hold, or that the code of a step names, continue from where they were. Functions of
`functools.lru_cache` that this code names are cleared if a result was added, since it may hold fakes.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools._torch import storage_id
from lightning_memtools.memory.cuda_ops.rules import span
from lightning_memtools.memory.reachable_variables import CachedFunction, values_named_in_steps, variables_of_hooks
from lightning_memtools.simulation.known_values import note_values
from lightning_memtools.state.random_state import generator_state, set_generator_state
from lightning_memtools.state.state_snapshot import restorer_of_dict

# Objects whose attributes are left alone: they belong to the program, not to the model.
_OPAQUE = (
    *(str, bytes, int, float, complex, type, torch.dtype, torch.device, torch.Size, torch.Generator),
    *(ModuleType, FunctionType, MethodType, BuiltinFunctionType, threading.Thread, partial),
)
_CONTAINERS = (dict, list, deque, set)
_LIBRARIES = {"builtins", "torch", "lightning", "pytorch_lightning"}
_MAX_OBJECTS = 1_000_000

MakeTensor = Callable[[Any], Any]


class TensorExchange:
    """Makes a stand-in of the same size for each tensor. If two tensors share memory, so do their stand-ins.

    Stand-ins are created as ordinary tensors. Under a FakeTensorMode this makes them fakes, which take no memory.

    Args:
        dtype: The dtype for stand-ins of floating-point tensors; None to keep the dtype of each tensor.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        # With the original, so that no other object gets its id meanwhile.
        self._made: dict[int, tuple[Any, Any]] = {}
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def __call__(self, original: Any) -> Any:
        """Return the stand-in of a tensor or of an optimizer. It is created when it is first asked for."""
        if id(original) not in self._made:
            made: Any = copy_optimizer(original, self) if isinstance(original, Optimizer) else self._make(original)
            if not isinstance(original, (nn.Parameter, Optimizer)):  # what is trained has other values in each step
                note_values(made, original)
            self._made[id(original)] = made, original
        return self._made[id(original)][0]

    def forget_memory(self) -> None:
        """Make later stand-ins share no memory with those created so far."""
        self._bases.clear()

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        data = self._data(tensor)
        if not isinstance(tensor, nn.Parameter):
            return data.requires_grad_(tensor.requires_grad) if tensor.requires_grad else data
        parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
        for name, value in {} if _is_sharded(tensor) else vars(tensor).items():
            if name not in vars(parameter):
                setattr(parameter, name, value)
        return parameter

    def _data(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.layout is not torch.strided:
            raise ValueError(f"A tensor of layout {tensor.layout} has no fake stand-in: use a strided (dense) one.")
        if _is_sharded(tensor):
            return torch.empty(tensor.shape, dtype=dtype, device="cpu")
        storage = tensor.untyped_storage()
        # Two views of one storage rarely differ in type; if they do, their stand-ins share no memory.
        key = storage_id(storage), dtype
        n_elements = storage.nbytes() // tensor.element_size()
        if key not in self._bases and n_elements == span(tensor):  # nearly always, and fast
            self._bases[key] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            return self._bases[key].detach()
        if key not in self._bases:
            self._bases[key] = torch.empty(n_elements, dtype=dtype, device="cpu")
        return self._bases[key].detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def borrowed(model: nn.Module, exchange: MakeTensor) -> Iterator[None]:
    """Context manager: replace all tensors reachable from a model with results of `exchange`. Restore them on exit.

    An optimizer is replaced by its copy. The search does not enter objects that only have ``__slots__``, or closures,
    except for the closures of modules' hooks.
    """
    seen: set[int] = set()
    queue: deque[Any] = deque([model])
    kinds: set[type] = set()
    with ExitStack() as undo:
        while queue and len(seen) < _MAX_OBJECTS:
            thing = queue.popleft()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            _keep_state(thing, undo)
            if isinstance(thing, nn.Module):
                if type(thing) not in kinds:
                    kinds.add(type(thing))
                    queue.extend(_containers_of_class(type(thing)))
                    for value in values_named_in_steps(type(thing)):
                        _keep_state(value, undo)
                for variable in variables_of_hooks(thing):
                    value = variable.value
                    undo.callback(variable.put, value)
                    if isinstance(value, torch.Tensor):
                        variable.put(exchange(value))
                    queue.append(value)
            container = _container(thing)
            if container is not None:
                queue.extend(_exchange_items(container, exchange, undo))
        yield


def copy_optimizer(optimizer: Optimizer, exchange: MakeTensor, *, with_state: bool = True) -> Optimizer:
    """Return a copy of an optimizer, with the same class and settings but with other tensors.

    Args:
        optimizer: The optimizer, which is not changed. The copy is made without calling the constructor.
        exchange: Returns the replacement for one of the optimizer's tensors.
        with_state: True to copy the state too; False for a copy without state.
    """
    new: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        is_wrapped = isinstance(value, Optimizer)  # opacus and others pass on what they are given to another optimizer
        vars(new)[name] = copy_optimizer(value, exchange, with_state=with_state) if is_wrapped else value
    vars(new).pop("step", None)  # a learning rate scheduler wraps it on the instance: it would step the original
    new.param_groups = [{**group, "params": list(map(exchange, group["params"]))} for group in optimizer.param_groups]
    new.state = defaultdict(dict)
    for parameter, state in optimizer.state.items() if with_state else ():
        new.state[exchange(parameter)] = {
            key: exchange(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
    return new


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, which is split among the ranks. Its stand-in has the full size."""
    return hasattr(tensor, "to_local")


def _exchange_items(container: Any, exchange: MakeTensor, undo: ExitStack) -> list[Any]:
    """Replace the tensors in a container, and return the old content. Closing `undo` restores the old content."""
    if isinstance(container, dict):
        undo.callback(restorer_of_dict(container))
        values = dict(container)
        for key, value in values.items():
            if (changed := _exchanged(value, exchange)) is not value:
                container[key] = changed
        return list(values.values())
    content, is_set = container.copy(), isinstance(container, set)
    undo.callback(container.update if is_set else container.extend, content)
    undo.callback(container.clear)
    for index, value in enumerate(() if is_set else content):
        container[index] = _exchanged(value, exchange)
    return list(content)


def _keep_state(thing: Any, undo: ExitStack) -> None:
    """Register with `undo` how to reset `thing`: restore a random generator's state, or clear a function's cache."""
    if isinstance(thing, CachedFunction):
        n_misses = thing.cache_info().misses
        undo.callback(lambda: None if thing.cache_info().misses == n_misses else thing.cache_clear())
    elif (state := generator_state(thing)) is not None:
        undo.callback(set_generator_state, thing, state)


def _containers_of_class(kind: type) -> list[Any]:
    """Return the class attributes of `kind` that are containers such as lists, except those of library classes."""
    mine = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _LIBRARIES]
    values = [value for base in mine for name, value in vars(base).items() if not name.startswith("__")]
    return [value for value in values if isinstance(value, _CONTAINERS)]


def _container(thing: Any) -> Any:
    """Return where to search `thing` for tensors: a container itself, or an object's `__dict__`; None for neither."""
    if isinstance(thing, _CONTAINERS):
        return thing
    if isinstance(thing, (*_OPAQUE, torch.Tensor, Optimizer, tuple)) or _is_around_the_model(
        type(thing)  # type: ignore[arg-type]  # mypy: type[Any] is not Hashable
    ):
        return None
    return getattr(thing, "__dict__", None)


@cache
def _is_around_the_model(kind: type) -> bool:
    """Return whether a class is Lightning's Trainer or Fabric, which are not part of the model."""
    names = {base.__name__ for base in kind.__mro__ if base.__module__.startswith(("lightning.", "pytorch_lightning."))}
    return not names.isdisjoint({"Trainer", "Fabric"})


def _exchanged(value: Any, exchange: MakeTensor) -> Any:
    if isinstance(value, torch.Tensor | Optimizer):
        return exchange(value)
    if type(value) is tuple and any(isinstance(item, torch.Tensor | Optimizer) for item in value):
        return tuple(_exchanged(item, exchange) for item in value)
    return value
