"""A module in a capsule: saved as its class, hyperparameters, attributes and weights, and made again from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memtools._torch import buffers_of
from lightning_memtools.memory.nested_tensors import plain_name, tensors_in_attributes
from lightning_memtools.state.buffer_keeper import is_expanded
from lightning_memtools.state.capsule.capsule_file import CapsuleError, compact, from_plain, to_plain
from lightning_memtools.state.random_state import RandomState
from lightning_memtools.state.starts import Attributes, BatchStart, restore_attributes, simple_items

Find = Callable[[str], Any]


def saved_module(module: Any, left_out: list[str]) -> dict[str, Any]:
    """Return what a module is made again from, without its weights, as plain values."""
    kind = type(module)
    hparams: list[str] = []
    left_out += [f"attribute {name} (a tensor that is no buffer)" for name, _ in tensors_in_attributes(module)]
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "hparams": {key: to_plain(value, hparams, key) for key, value in dict(getattr(module, "hparams", {})).items()},
        "hparams_left_out": hparams,
        "attributes": _packed({name: simple_items(vars(part)) for name, part in module.named_modules()}),
        "evaluating": [plain_name(name) for name, part in module.named_modules() if not part.training],
    }


def saved_weights(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the parameters and buffers of a module, by name."""
    return {
        "parameters": {plain_name(name): compact(each) for name, each in module.named_parameters()},
        "buffers": {plain_name(name): compact(each) for name, each in module.named_buffers()},
    }


def saved_start(start: BatchStart | None) -> dict[str, Any] | None:
    """Return what a batch began with, as plain values."""
    if start is None:
        return None
    frozen = sorted(map(plain_name, start.frozen))
    return {"random": saved_random(start.random), "attributes": _packed(start.attributes), "frozen": frozen}


def start_from(saved: Mapping[str, Any] | None, module: nn.Module, find: Find) -> BatchStart | None:
    """Return what `saved_start` was given; parts that the module does not have are left out."""
    if saved is None:
        return None
    held = set(saved["frozen"])
    frozen = frozenset(name for name, _ in module.named_parameters() if plain_name(name) in held)
    attributes = _attributes_of(saved["attributes"], module, find)
    return BatchStart(random_from(saved["random"], find), attributes, (), frozen)


def saved_random(random: RandomState) -> dict[str, Any]:
    """Return the states of the random streams, as plain values."""
    return {each.name: to_plain(getattr(random, each.name), [], each.name) for each in fields(random)}


def random_from(saved: Mapping[str, Any], find: Find) -> RandomState:
    """Rebuild the random streams that `saved_random` turned into plain values.

    Streams that are not among them keep their present state, and devices that this machine lacks are left out.
    """
    now = RandomState.now()
    held = {each.name: getattr(now, each.name) for each in fields(now)}
    held |= {name: from_plain(state, find) for name, state in saved.items()}
    cuda = held["cuda"] if torch.cuda.is_available() else None
    held["cuda"] = None if cuda is None else cuda[: torch.cuda.device_count()]
    held["mps"] = held["mps"] if torch.backends.mps.is_available() else None
    return RandomState(**held)


def _packed(attributes: Attributes) -> dict[str, Any]:
    return {
        plain_name(name): {key: to_plain(value, [], key) for key, value in values.items()}
        for name, values in attributes.items()
        if values
    }


def _attributes_of(packed: Mapping[str, Any], module: nn.Module, find: Find) -> Attributes:
    names = {plain_name(name): name for name, _ in module.named_modules()}
    return {
        names[name]: {key: from_plain(value, find) for key, value in values.items()}
        for name, values in packed.items()
        if name in names
    }


def rebuilt(saved: Mapping[str, Any], model: Any, device: torch.device, find: Find) -> nn.Module:
    """Return the module with the state that the step began with, on a device.

    Args:
        saved: What `read_capsule` returned.
        model: A module to use, or a class or function that makes one; None for the capsule's own class.
        device: The device to put it on.
        find: Finds a class by ``"module:name"``.

    Raises:
        CapsuleError: The module cannot be made, or is another one.
    """
    about = saved["module"]
    module = model if isinstance(model, nn.Module) else _made(about, model, find)
    configure: Any = getattr(module, "configure_model", None)
    if configure is not None and _missing(saved, module):
        configure()
    module.to(device)
    if saved["weights"] is not None:
        _load(saved["weights"], module, about)
    restore_attributes(module, _attributes_of(about["attributes"], module, find))
    evaluating = set(about["evaluating"])
    for name, part in module.named_modules():
        part.training = plain_name(name) not in evaluating
    return module


def _made(about: Mapping[str, Any], model: Any, find: Find) -> nn.Module:
    kind = _class_of(about, find) if model is None else model
    name = about["class"].replace(":", ".")
    hparams, missing = _arguments_for(kind, about["hparams"])
    odd = [key for key in hparams if any(out.startswith(f"{key} (") for out in about["hparams_left_out"])]
    if missing or odd:
        which = f"was not saved: {', '.join(missing)}" if missing else f"cannot be held by a file: {', '.join(odd)}"
        raise CapsuleError(
            f"{name} cannot be made again: an argument of its constructor {which}.\n"
            "Next: make the module yourself and pass it, replay(path, model=my_module), or a function that makes it, "
            "memtools replay PATH --model package.function; call self.save_hyperparameters() in its constructor for "
            "the next time."
        )
    try:
        module = kind(**{key: from_plain(value, find) for key, value in hparams.items()})
    except Exception as error:
        raise CapsuleError(
            f"{name} cannot be made again: its constructor failed with {type(error).__name__}: {error}.\n"
            "Next: make the module yourself and pass it: replay(path, model=my_module)."
        ) from error
    if not isinstance(module, nn.Module):
        raise CapsuleError(
            f"{kind!r} made a {type(module).__name__}, which is no module. Pass a function or class that makes one."
        )
    return module


def _class_of(about: Mapping[str, Any], find: Find) -> Any:
    name = about["class"].partition(":")[2]
    advice = (
        "Next: pass it: replay(path, model=my_module), or memtools replay PATH --model package.Class (or a function "
        "that makes the module)."
    )
    if "<locals>" in name:
        raise CapsuleError(f"{name} was defined within a function and cannot be imported.\n{advice}")
    try:
        kind = find(about["class"])
        if not (isinstance(kind, type) and issubclass(kind, nn.Module) and hasattr(kind, "training_step")):
            raise TypeError("it is no LightningModule, and nothing else is made")  # noqa: TRY301, reported as the others
    except Exception as error:
        raise CapsuleError(
            f"The module's class {about['class'].replace(':', '.')} cannot be imported ({type(error).__name__}: "
            f"{error}). The weights, batch and random numbers in the capsule can be read: "
            f"torch.load(path, weights_only=True).\n{advice}"
        ) from error
    return kind


def _missing(saved: Mapping[str, Any], module: nn.Module) -> bool:
    here = {plain_name(name) for name, _ in module.named_parameters()}
    return saved["weights"] is not None and bool(saved["weights"]["parameters"].keys() - here)


@torch.no_grad()
def _load(weights: Mapping[str, Mapping[str, Tensor]], module: nn.Module, about: Mapping[str, Any]) -> None:
    parameters = {plain_name(name): each for name, each in module.named_parameters()}
    missing = sorted(parameters.keys() ^ weights["parameters"].keys())
    ready = {name: each for name, each in parameters.items() if not is_lazy(each)}
    saved = weights["parameters"]
    wrong = [name for name in saved if name in ready and ready[name].shape != saved[name].shape]
    if missing or wrong:
        what = ", ".join([*missing[:3], *(f"{name} (shape)" for name in wrong[:3])])
        raise CapsuleError(
            f"This is not the module that the step ran with: {what} differ. {about['class'].replace(':', '.')} was "
            "made from its saved hyperparameters, which may not be all that it is made of.\n"
            "Next: make the module as the training script does and pass it: replay(path, model=my_module)."
        )
    for name, value in weights["parameters"].items():
        parameter: Any = parameters[name]
        if is_lazy(parameter):
            parameter.materialize(value.shape)
        parameter.data = value.to(parameter.device)
    names = {plain_name(name): part for name, part in module.named_modules()}
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    for name, value in weights["buffers"].items():
        owner, _, key = name.rpartition(".")
        part = names[owner]
        here = buffers_of(part).get(key)  # a buffer may be None or not there yet
        is_alike = here is not None and here.shape == value.shape and here.dtype == value.dtype
        if here is not None and is_alike and not is_expanded(here):
            here.copy_(value)
        else:
            buffers_of(part)[key] = value.to(device)


def _arguments_for(kind: Any, held: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the saved hyperparameters that a constructor takes, and the names of its arguments that are missing."""
    accepted = inspect.signature(kind).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    taken = {key: value for key, value in held.items() if takes_all or key in accepted}
    missing = [
        key
        for key, each in accepted.items()
        if each.default is each.empty and key not in held and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
    ]
    return taken, missing
