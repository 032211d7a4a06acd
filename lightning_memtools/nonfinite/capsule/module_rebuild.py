"""Rebuilds the module of a capsule from its class, its hyperparameters and its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools._torch import buffers_of
from lightning_memtools.nonfinite.capsule.capsule_file import CapsuleError
from lightning_memtools.nonfinite.capsule.environment import arguments_for
from lightning_memtools.nonfinite.capsule.plain_values import from_plain
from lightning_memtools.nonfinite.micro_batches import restore_attributes
from lightning_memtools.nonfinite.tensor_names import plain_name

Find = Callable[[str], Any]


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
    names = {plain_name(name): name for name, _ in module.named_modules()}
    restore_attributes(module, {names[name]: values for name, values in about["attributes"].items() if name in names})
    evaluating, frozen = set(about["evaluating"]), set(about["frozen"])
    for name, part in module.named_modules():
        part.training = plain_name(name) not in evaluating
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(plain_name(name) not in frozen)
    return module


def _made(about: Mapping[str, Any], model: Any, find: Find) -> nn.Module:
    kind = _class_of(about, find) if model is None else model
    name = about["class"].replace(":", ".")
    hparams, missing = arguments_for(kind, about["hparams"])
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
    ready = {name: each for name, each in parameters.items() if not _is_lazy(each)}
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
        if _is_lazy(parameter):
            parameter.materialize(value.shape)
        parameter.data = value.to(parameter.device)
    names = {plain_name(name): part for name, part in module.named_modules()}
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    for name, value in weights["buffers"].items():
        owner, _, key = name.rpartition(".")
        part = names[owner]
        here = buffers_of(part).get(key)  # a buffer may be None or not there yet
        if here is not None and here.shape == value.shape and here.dtype == value.dtype:
            here.copy_(value)
        else:
            buffers_of(part)[key] = value.to(device)


def _is_lazy(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedParameter)
