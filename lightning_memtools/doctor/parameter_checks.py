"""Checks of parameters: those that no optimizer holds, that get no gradient, or that stay equal to each other."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._torch import l2_norm_of_each
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.doctor.training_case import Norms, TrainingCase, UpdateNorms
from lightning_memtools.reporting.phrases import counted, first_of

# Fewer steps show nothing: a generator may be trained in every second step.
_MIN_UPDATES = 3
# A parameter that weights initialised with zeros keep out of the first updates, as in LoRA, gets a gradient by then.
_MIN_ZERO_UPDATES = 5


def optimizer_parameters(case: TrainingCase, _: Any) -> list[Finding]:
    """Return parameters that get gradients and are in no optimizer, which leaves their gradients to add up."""
    if case.sharded or not case.optimizers or case.n_steps < _MIN_UPDATES:
        return []
    held = {id(p) for optimizer in case.optimizers for group in optimizer.param_groups for p in group["params"]}
    gradients = {
        name: parameter.grad
        for name, parameter in case.model.named_parameters()
        if id(parameter) not in held and parameter.requires_grad and parameter.grad is not None
    }
    if not gradients:
        return []
    n_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients.values())
    evidence = (
        f"{counted(len(gradients), 'parameter gets', 'parameters get')} gradients ({n_bytes:,} bytes after "
        f"{case.n_steps} steps) without being in any optimizer."
    )
    return [finding("optimizer_parameters", first_of(list(gradients)), evidence)]


def note_update(case: TrainingCase, optimizer: Optimizer) -> None:
    """Note which gradients are missing, and the norms of the others and of weights that decay, on their devices.

    The weights' norms are noted at the optimizer's first update and at the one that makes their number sufficient.
    """
    if case.sharded:
        return
    names, number = case.parameter_names(), sum(update.optimizer is optimizer for update in case.updates)
    missing: list[str] = []
    gradients: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                missing.append(name)
            elif parameter.grad.layout is torch.strided and not case.computes_nothing:
                gradients[name] = parameter.grad
                if group.get("weight_decay") and number in {0, _MIN_ZERO_UPDATES - 1}:
                    weights[name] = parameter.detach()
    case.updates.append(UpdateNorms(optimizer, missing, _norms_of(gradients), _norms_of(weights)))


def _norms_of(tensors: dict[str, Tensor]) -> Norms:
    norms = l2_norm_of_each(list(tensors.values()), None) if tensors else ()
    return tuple(tensors), _together([norm.detach().float() for norm in norms])


def _together(values: Sequence[Tensor]) -> Tensor:
    """Return numbers of one device or several as one tensor, so that the host waits for them once."""
    return torch.stack([value.to(values[0].device) for value in values]) if values else torch.empty(0)


def missing_gradients(case: TrainingCase, _: Any) -> list[Finding]:
    """Return parameters whose gradient is None or zero at every update, and how much weight decay shrinks them.

    Here the host waits for the norms that were noted.
    """
    n_missing, n_zero, n_updates = Counter[str](), Counter[str](), Counter[str]()
    weights: dict[str, list[float]] = {}
    for update in case.updates:
        n_missing.update(update.missing)
        n_updates.update(update.missing)
        for name, norm in _values_of(update.gradients):
            n_updates[name] += 1
            n_zero[name] += norm == 0
        for name, norm in _values_of(update.weights):
            weights.setdefault(name, []).append(norm)
    never = [name for name, n in n_missing.items() if n == n_updates[name] >= _MIN_UPDATES]
    zero = [name for name, n in n_zero.items() if n == n_updates[name] >= _MIN_ZERO_UPDATES]
    shrinks = {
        name: 1 - (weights[name][1] / weights[name][0]) ** (1 / (_MIN_ZERO_UPDATES - 1))
        for name in zero
        if len(weights.get(name, ())) > 1 and weights[name][0]
    }
    shrunk = [name for name in zero if shrinks.get(name, 0.0) > 0]
    findings = []
    if never:
        module = posixpath.commonpath([name.rpartition(".")[0].replace(".", "/") for name in never]).replace("/", ".")
        evidence = (
            f"{counted(len(never), 'parameter', 'parameters')} in the optimizer had no gradient (None) at any of "
            f"{n_updates[never[0]]} updates."
        )
        place = module if module and len(never) > 1 else first_of(never)
        findings.append(finding("missing_gradients/none", place, evidence))
    if zero:
        names = shrunk or zero
        evidence = (
            f"The gradients of {counted(len(names), 'parameter', 'parameters')} were exactly zero at all of "
            f"{n_updates[names[0]]} updates"
        )
        if shrunk:
            most = max(shrunk, key=lambda name: shrinks[name])
            evidence += f", and weight decay shrank {most} by {shrinks[most]:.3g} of its norm at each"
        mistake, lost = (
            f"missing_gradients/{'shrunk' if shrunk else 'zero'}",
            1 - (1 - max(shrinks.values(), default=0)) ** 1000,
        )
        findings.append(finding(mistake, first_of(names), f"{evidence}.", lost=lost))
    return findings


def _values_of(norms: Norms) -> Iterable[tuple[str, float]]:
    return zip(norms[0], norms[1].tolist(), strict=True)


def symmetric_weights(case: TrainingCase, _: Any) -> list[Finding]:
    """Return weights whose rows are all equal, and equal in their first gradient too: they stay equal for ever.

    The host waits for the device once, and again where the first two rows of a weight are equal.
    """
    if case.sharded or case.computes_nothing:
        return []
    pairs = {
        name: (parameter.detach(), parameter.grad)
        for name, parameter in case.model.named_parameters()
        if parameter.grad is not None and parameter.dim() > 1 and parameter.shape[0] > 1 and parameter.numel()
        if parameter.layout is parameter.grad.layout is torch.strided
    }
    tests: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda weight, _: (weight[0] == weight[1]).all(),  # rules out nearly all
        lambda weight, _: (weight == weight[:1]).all(),
        lambda _, gradient: _are_alike(gradient),
    ]
    for test in tests:
        answers = _together([test(*pair) for pair in pairs.values()]).tolist()
        pairs = {name: pair for (name, pair), answer in zip(pairs.items(), answers, strict=True) if answer}
    if not pairs:
        return []
    name, (weight, _) = next(iter(pairs.items()))
    evidence = (
        f"All {len(weight)} rows of {name} are equal, and so are the rows of its first gradient, which is not zero. So "
        f"it is for {counted(len(pairs), 'weight', 'weights')}."
    )
    return [finding("symmetric_weights", first_of(list(pairs)), evidence)]


def _are_alike(gradient: Tensor) -> Tensor:
    size = gradient.abs().amax()
    # Equal sums may be rounded differently, depending on where a row lies.
    return ((gradient - gradient[:1]).abs().amax() <= 1e-5 * size) & (size > 0)
