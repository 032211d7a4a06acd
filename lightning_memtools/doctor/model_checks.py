"""Checks of modules, parameters and the seed: frozen BatchNorm, and what no optimizer holds or no gradient reaches."""

from __future__ import annotations

import os
import posixpath
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._torch import AnyBatchNorm, is_in_memory, l2_norm_of_each, write_count
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.doctor.training_case import TrainingCase, UpdateNorms
from lightning_memtools.reporting.phrases import counted, first_of

# A seed that the system draws has 53 bits; one that a person gives is nearly always below.
_LARGEST_USUAL_SEED = 2**32


def note_frozen_norms(case: TrainingCase, _: Any) -> None:
    """Record in `case` the weights of frozen BatchNorm layers, and how often their statistics have been updated."""
    case.frozen_norms = [
        (name, norm, norm.weight.tolist(), write_count(norm.num_batches_tracked))
        for name, norm in case.model.named_modules()
        if isinstance(norm, AnyBatchNorm) and norm.num_batches_tracked is not None
        if norm.weight is not None and not norm.weight.requires_grad and is_in_memory(norm.weight)
    ]


def frozen_norms(case: TrainingCase, _: Any) -> list[Finding]:
    """Return a finding on frozen BatchNorm layers whose running statistics the training steps have changed.

    Layers whose weights have also changed are skipped: they copy another model, for example in a momentum encoder.
    """
    moved = [
        name
        for name, norm, weights, n_written in case.frozen_norms
        if write_count(norm.num_batches_tracked) > n_written and norm.weight.tolist() == weights
        if not any(p.requires_grad for p in case.model.get_submodule(name.rpartition(".")[0]).parameters())
    ]
    if not moved:
        return []
    layers = counted(len(moved), "BatchNorm layer of a frozen part runs", "BatchNorm layers of frozen parts run")
    evidence = f"{layers} in train mode: {case.n_steps} steps have written the running statistics, not the weights."
    return [finding("frozen_batch_norm", first_of(moved), evidence)]


def devices(case: TrainingCase, _: Any) -> list[Finding]:
    """Return a finding on parameters, buffers and tensor attributes that are not on the device used for training."""
    model, home = case.model, case.device
    # Strategies may keep parameters on the host; accelerate places a model's parts, and moves the inputs of each.
    if case.sharded or any(hasattr(part, "hf_device_map") for part in (model, *model.children())):
        return []
    # Of plain attributes, a tensor without dimensions may stay on the host: every device takes it.
    plain = {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.dim()
    }
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **plain}
    away = {name: tensor.device for name, tensor in tensors.items() if tensor.device.type != home.type}
    if not away:
        return []
    name, device = next(iter(away.items()))
    evidence = f"{counted(len(away), 'tensor is', 'tensors are')} not on {home} like the model: {name} is on {device}."
    # An attribute alone may be meant for the host.
    mistake = "devices" if away.keys() - plain.keys() else "devices/plain"
    return [finding(mistake, first_of(list(away)), evidence, home=str(home))]


def reproducibility(*_: Any) -> list[Finding]:
    """Return a finding if the run is not seeded."""
    seed = torch.initial_seed()
    if "PL_GLOBAL_SEED" in os.environ or seed < _LARGEST_USUAL_SEED:
        return []
    return [finding("reproducibility", "the process", f"No seed was set: torch drew {seed} from the system.")]


# Fewer show nothing: a generator may be trained in every second step, and a parameter that weights initialised with
# zeros keep out of the first updates, as in LoRA, gets a gradient by then.
_MIN_UPDATES = 5


def optimizer_parameters(case: TrainingCase, _: Any) -> list[Finding]:
    """Return a finding on parameters that get gradients but are in no optimizer, so they are never updated."""
    held = {id(p) for optimizer in case.optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in case.model.named_parameters() if p.requires_grad and p.grad is not None]
    left_out = [name for name, parameter in trained if id(parameter) not in held]
    # With none of them, the optimizer is the stand-in that Lightning makes for a model without one.
    if case.sharded or case.n_steps < _MIN_UPDATES or len(left_out) in {0, len(trained)}:
        return []
    evidence = f"{counted(len(left_out), 'parameter gets', 'parameters get')} gradients without being in any optimizer."
    return [finding("optimizer_parameters", first_of(left_out), evidence)]


def note_update(case: TrainingCase, optimizer: Optimizer) -> None:
    """Record in `case` the norms of an optimizer's gradients, and of its parameters that have weight decay.

    Norms of parameters are recorded only at the first and the fifth update. All norms stay on the device.
    """
    if case.sharded or case.computes_nothing:
        return
    names, number = case.parameter_names(), sum(update.optimizer is optimizer for update in case.updates)
    held: list[str] = []
    gradients: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name, gradient = names.get(id(parameter)), parameter.grad
            if name is None or not parameter.requires_grad:
                continue
            if gradient is not None and gradient.layout is not torch.strided:
                continue
            held.append(name)
            if gradient is not None:
                gradients[name] = gradient
                if group.get("weight_decay") and number in {0, _MIN_UPDATES - 1}:
                    weights[name] = parameter.detach()
    norms = _norms_of(gradients, case.device), _norms_of(weights, case.device)
    case.updates.append(UpdateNorms(optimizer, held, *norms))


def _norms_of(tensors: dict[str, Tensor], device: torch.device) -> tuple[list[str], Tensor]:
    """Return the names of tensors, and the norms of these tensors as a single tensor on `device`."""
    if not tensors:
        return [], torch.empty(0)
    norms = l2_norm_of_each(list(tensors.values()), None)
    return list(tensors), torch.stack([norm.detach().to(device, torch.float32) for norm in norms])


def _values_of(norms: tuple[list[str], Tensor]) -> Iterable[tuple[str, float]]:
    """Return (name, norm) pairs with the norms as floats. The host waits for the device once."""
    names, values = norms
    return zip(names, values.tolist(), strict=True)


def missing_gradients(case: TrainingCase, _: Any) -> list[Finding]:
    """Return findings on parameters whose gradient was None or zero at every update.

    The findings also say how much weight decay shrank these parameters. Reading the norms waits for the device.
    """
    n_updates, n_moved, weights = Counter[str](), Counter[str](), defaultdict[str, list[float]](list)
    for update in case.updates:
        n_updates.update(update.held)
        n_moved.update(name for name, norm in _values_of(update.gradients) if norm != 0)
        for name, norm in _values_of(update.weights):
            weights[name].append(norm)
    idle = [name for name, n in n_updates.items() if n >= _MIN_UPDATES and not n_moved[name]]
    shrinks = {
        name: 1 - (weights[name][1] / weights[name][0]) ** (1 / (_MIN_UPDATES - 1))
        for name in idle
        if len(weights[name]) > 1 and weights[name][1] < weights[name][0]
    }
    findings = []
    for names in ([name for name in idle if name not in shrinks], list(shrinks)):
        if not names:
            continue
        part = posixpath.commonpath([name.rpartition(".")[0].replace(".", "/") for name in names]).replace("/", ".")
        has_others = any(name.startswith(f"{part}.") for name in n_updates.keys() - set(idle))
        place = first_of(names) if len(names) == 1 or not part or has_others else part
        evidence = (
            f"{counted(len(names), 'parameter', 'parameters')} in the optimizer had no gradient, or zeros, at all of "
            f"{n_updates[names[0]]} updates"
        )
        if shrunk := names[0] in shrinks:
            most = max(names, key=lambda name: shrinks[name])
            evidence += f", and weight decay shrank {most} by {shrinks[most]:.3g} of its norm at each"
        findings.append(finding(f"missing_gradients/{'shrunk' if shrunk else 'none'}", place, f"{evidence}."))
    return findings


def symmetric_weights(case: TrainingCase, _: Any) -> list[Finding]:
    """Return a finding on weights whose rows are all equal and get equal gradients, so that they stay equal.

    The host waits for the device once per weight.
    """
    if case.sharded or case.computes_nothing:
        return []
    equal = [
        (name, parameter)
        for name, parameter in case.model.named_parameters()
        if parameter.grad is not None and parameter.dim() > 1 and parameter.shape[0] > 1 and parameter.numel()
        if parameter.layout is parameter.grad.layout is torch.strided
        if torch.equal(parameter[0], parameter[1])  # rules out nearly all, and takes little memory
        if (parameter == parameter[:1]).all() and _are_alike(parameter.grad)
    ]
    if not equal:
        return []
    name, weight = equal[0]
    evidence = f"All {len(weight)} rows of {name} are equal, and those of its first gradient, which is not zero."
    return [finding("symmetric_weights", first_of([name for name, _ in equal]), evidence)]


def _are_alike(gradient: Tensor) -> bool:
    size = gradient.abs().amax()
    # Equal sums may be rounded differently, depending on where a row lies.
    return bool(((gradient - gradient[:1]).abs().amax() <= 1e-5 * size) & (size > 0))
