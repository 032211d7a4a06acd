"""Checks of parameters: those that no optimizer holds, that get no gradient, or that stay equal to each other."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools._torch import l2_norm_of_each
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.step_trial import trial_of
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.reporting.phrases import counted, first_of

# Fewer steps show nothing: a generator may be trained in every second step.
MIN_STEPS = 3


class OptimizerParameters:
    """Check: parameters that get gradients and are in no optimizer, frozen ones in one, and those that are in twice."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._n_steps = 0

    def before_training(self) -> Iterator[Finding]:
        """Look at the optimizers' groups."""
        case, names = self._case, self._case.parameter_names()
        places: dict[int, list[str]] = {}
        frozen: list[str] = []
        for number, optimizer in enumerate(case.optimizers):
            for group_number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    place = f"group {group_number} of optimizer {number} ({type(optimizer).__name__})"
                    places.setdefault(id(parameter), []).append(place)
                    if not parameter.requires_grad:
                        frozen.append(names.get(id(parameter), "a tensor that is no parameter of the model"))
        twice = [key for key, where in places.items() if len(where) > 1]
        if twice:
            yield Finding(
                "optimizer_parameters",
                "warning",
                first_of([names.get(key, "a tensor") for key in twice]),
                f"{counted(len(twice), 'parameter is', 'parameters are')} listed more than once: "
                f"in {' and in '.join(places[twice[0]])}.",
                "Every step moves them several times, with several states and weight decays.",
                "Give each parameter to one group of one optimizer.",
            )
        if frozen:
            yield Finding(
                "optimizer_parameters",
                "info",
                first_of(frozen),
                f"{counted(len(frozen), 'parameter in the optimizer has', 'parameters in the optimizer have')} "
                "requires_grad=False.",
                "They cannot get a gradient, and stay as they are.",
                "optimizer(p for p in model.parameters() if p.requires_grad) makes that explicit.",
            )

    def after_backward(self) -> Iterator[Finding]:
        """Note gradients of parameters that no optimizer holds."""
        self._n_steps += 1
        if self._case.sharded or not self._case.optimizers or self._n_steps != MIN_STEPS:
            return
        held = self._case.optimized()
        left_out = {
            name: parameter
            for name, parameter in self._case.model.named_parameters()
            if id(parameter) not in held and parameter.requires_grad and parameter.grad is not None
        }
        if not left_out:
            return
        gradients = [parameter.grad for parameter in left_out.values() if parameter.grad is not None]
        n_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
        yield Finding(
            "optimizer_parameters",
            "warning",
            first_of(list(left_out)),
            f"{counted(len(left_out), 'parameter gets', 'parameters get')} gradients ({n_bytes:,} bytes after "
            f"{MIN_STEPS} steps) without being in any optimizer.",
            "They are never trained, and their gradients add up and cost time and memory.",
            "Add them to the optimizer, or call requires_grad_(False) on them.",
        )


@dataclass(slots=True)
class _Seen:
    """One parameter's gradients over the steps of its optimizer."""

    name: str
    parameter: Tensor
    weight_decay: float
    n_steps: int = 0
    n_missing: int = 0
    n_zero: int = 0


class MissingGradients:
    """Check: parameters whose gradient is None or exactly zero in every step, and what weight decay does to them.

    The gradients' norms are read on the device; the host waits for the device once, at the last watched step.
    """

    # A parameter that weights initialised with zeros keep out of the first steps, as in LoRA, gets a gradient by then.
    MIN_ZERO_STEPS = 5

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._seen: dict[int, _Seen] = {}
        self._norms: list[tuple[list[_Seen], Tensor]] = []
        self._before: list[tuple[_Seen, Tensor]] = []
        self._shrinks: dict[str, float] = {}
        self._n_steps = 0
        self._is_cut_by_checkpoint = False

    def batch_start(self, batch: Any, index: int) -> Iterator[Finding]:
        """Note whether a checkpoint in the step gives no gradients."""
        if not index and self._case.forward is not None:
            self._is_cut_by_checkpoint = trial_of(self._case, batch).has_cutting_checkpoint
        yield from ()

    def before_optimizer_step(self, optimizer: Optimizer) -> Iterator[Finding]:
        """Note which gradients are missing, and the norms of the others."""
        if self._case.sharded:
            return
        names = self._case.parameter_names()
        with_gradient: dict[tuple[torch.device, torch.dtype], list[tuple[_Seen, Tensor]]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad or id(parameter) not in names:
                    continue
                seen = self._seen.get(id(parameter))
                if seen is None:
                    decay = float(group.get("weight_decay", 0.0) or 0.0)
                    seen = self._seen[id(parameter)] = _Seen(names[id(parameter)], parameter, decay)
                seen.n_steps += 1
                if parameter.grad is None:
                    seen.n_missing += 1
                elif parameter.grad.layout is torch.strided and not self._case.computes_nothing:
                    key = parameter.grad.device, parameter.grad.dtype
                    with_gradient.setdefault(key, []).append((seen, parameter.grad))
        for pairs in with_gradient.values():
            norms = l2_norm_of_each([gradient for _, gradient in pairs], None)
            self._norms.append(([seen for seen, _ in pairs], torch.stack([norm.detach() for norm in norms])))
        if self._n_steps + 1 == self._case.steps:
            self._read_norms()
            self._before = [
                (seen, seen.parameter.detach().norm())
                for seen in self._seen.values()
                # Squares of small numbers vanish: a norm of zero is no proof.
                if seen.n_zero == seen.n_steps and seen.parameter.grad is not None and not seen.parameter.grad.any()
            ]
        yield from ()

    def batch_end(self, _batch: object, _index: int) -> Iterator[Finding]:
        """Measure how much the optimizer's step has shrunk the parameters that have no gradient."""
        self._n_steps += 1
        for seen, before in self._before:
            if float(before):
                self._shrinks[seen.name] = 1 - float(seen.parameter.detach().norm()) / float(before)
        self._before = []
        yield from ()

    def conclude(self) -> Iterator[Finding]:
        """Report the parameters without gradients."""
        self._read_norms()
        missing = [seen for seen in self._seen.values() if seen.n_steps >= MIN_STEPS and seen.n_missing == seen.n_steps]
        if missing:
            yield self._missing(missing)
        zero = [
            seen
            for seen in self._seen.values()
            if seen.n_steps >= self.MIN_ZERO_STEPS
            and seen.n_zero == seen.n_steps
            and (seen.parameter.grad is None or not seen.parameter.grad.any())
        ]
        shrunk = [seen for seen in zero if seen.weight_decay and self._shrinks.get(seen.name, 0.0) > 0]
        if shrunk:
            yield self._shrinking(shrunk)
        rest = [seen for seen in zero if seen not in shrunk]
        if rest:
            yield Finding(
                "missing_gradients",
                "info",
                first_of([seen.name for seen in rest]),
                f"The gradients of {counted(len(rest), 'parameter', 'parameters')} were exactly zero in all of "
                f"{rest[0].n_steps} steps.",
                "They do not learn; dead ReLUs, a loss that ignores them, or saturated values are common reasons.",
                "Follow their output to the loss, or look at the activations behind them.",
            )

    def _missing(self, missing: Sequence[_Seen]) -> Finding:
        """Return a remark: parts of a model that a loss leaves out on purpose, such as a pooler, are common."""
        names = [seen.name for seen in missing]
        evidence = (
            f"{counted(len(missing), 'parameter', 'parameters')} in the optimizer had no gradient (None) in any of "
            f"{missing[0].n_steps} steps."
        )
        if self._is_cut_by_checkpoint:
            return Finding(
                "missing_gradients",
                "warning",
                _common_module(names),
                f"{evidence} torch.utils.checkpoint ran with use_reentrant=True on inputs without gradient.",
                "What is computed inside has no gradient then: these parameters are never trained.",
                "checkpoint(..., use_reentrant=False)",
            )
        return Finding(
            "missing_gradients",
            "info",
            _common_module(names),
            evidence,
            "They are never trained, and DDP raises unless find_unused_parameters is set.",
            "Nothing, if the loss leaves them out on purpose; requires_grad_(False) says so. Else look for a detach() "
            "between them and the loss.",
        )

    def _shrinking(self, shrunk: Sequence[_Seen]) -> Finding:
        first = max(shrunk, key=lambda seen: self._shrinks[seen.name])
        share = self._shrinks[first.name]
        return Finding(
            "missing_gradients",
            "warning",
            first_of([seen.name for seen in shrunk]),
            f"The gradients of {counted(len(shrunk), 'parameter', 'parameters')} were exactly zero in all of "
            f"{first.n_steps} steps, and weight_decay={first.weight_decay:g} shrank {first.name} by {share:.3g} of "
            "its norm in one step.",
            f"They shrink towards zero without learning: {1 - (1 - share) ** 1000:.0%} are lost in 1000 such steps.",
            "Put them into a group with weight_decay=0, or call requires_grad_(False) on them before training; if the "
            "loss does not use them, let zero_grad() set gradients to None (its default).",
        )

    def _read_norms(self) -> None:
        """Wait for the norms, once."""
        for all_seen, norms in self._norms:
            for seen, norm in zip(all_seen, norms.tolist(), strict=True):
                seen.n_zero += norm == 0
        self._norms.clear()


def _common_module(names: Sequence[str]) -> str:
    """Return the innermost module that holds all of these parameters; the first names where that is the model."""
    module = posixpath.commonpath([name.rpartition(".")[0].replace(".", "/") for name in names])
    return module.replace("/", ".") if module and len(names) > 1 else first_of(names)


class SymmetricWeights:
    """Check: weights whose rows are all equal, and whose gradients are too, so that they stay equal for ever.

    The host waits for the device twice: for the comparison of the rows, and for that of the gradients where rows are
    equal.
    """

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._candidates: dict[str, nn.Parameter] = {}
        self._is_done = False

    def before_training(self) -> Iterator[Finding]:
        """Find the weights whose rows are all equal."""
        weights = {
            name: parameter
            for name, parameter in self._case.model.named_parameters()
            if parameter.requires_grad and parameter.dim() > 1 and parameter.shape[0] > 1 and parameter.numel()
        }
        # The first two rows rule out nearly all.
        equal = _all_on_host({name: (weight[0] == weight[1]).all() for name, weight in _detached(weights).items()})
        rest = {name: weights[name] for name, is_equal in equal.items() if is_equal}
        equal = _all_on_host({name: (weight == weight[:1]).all() for name, weight in _detached(rest).items()})
        self._candidates = {name: weights[name] for name, is_equal in equal.items() if is_equal}
        yield from ()

    def after_backward(self) -> Iterator[Finding]:
        """Compare the rows of the candidates' gradients."""
        if self._is_done or self._case.sharded:
            return
        self._is_done = True
        gradients = {name: p.grad for name, p in self._candidates.items() if p.grad is not None}
        self._candidates = {}
        same = _all_on_host({name: _rows_are_alike(gradient) for name, gradient in gradients.items()})
        symmetric = [name for name, are_same in same.items() if are_same]
        if not symmetric:
            return
        n_rows = gradients[symmetric[0]].shape[0]
        yield Finding(
            "symmetric_weights",
            "warning",
            first_of(symmetric),
            f"All {n_rows} rows of {symmetric[0]} are equal, and so are the rows of its first gradient, which is not "
            f"zero. So it is for {len(symmetric)} weights.",
            f"The {n_rows} outputs stay copies of one another: the layer has the capacity of one.",
            "Initialise with random values: nn.init.kaiming_uniform_(weight), in place of a constant.",
        )


def _detached(weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in weights.items() if weight.layout is torch.strided}


def _rows_are_alike(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        return torch.zeros((), dtype=torch.bool, device=gradient.device)
    size = gradient.abs().amax()
    # Equal sums may be rounded differently, depending on where a row lies.
    return ((gradient - gradient[:1]).abs().amax() <= 1e-5 * size) & (size > 0)


def _all_on_host(values: dict[str, Tensor]) -> dict[str, bool]:
    by_device: dict[torch.device, list[str]] = {}
    for name, value in values.items():
        by_device.setdefault(value.device, []).append(name)
    return {
        name: bool(value)
        for device, names in by_device.items()
        if device.type != "meta"
        for name, value in zip(names, torch.stack([values[name] for name in names]).tolist(), strict=True)
    }
