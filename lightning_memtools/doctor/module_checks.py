"""Checks of modules: train and eval modes, and tensors that stayed on another device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_memtools._torch import AnyBatchNorm, AnyDropout, write_count
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.step_trial import trial_of
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.reporting.phrases import counted, first_of


class ModuleModes:
    """Check: modules left in eval mode while they are trained, and BatchNorm in train mode during evaluation."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._is_done = False
        self._writes: list[tuple[str, nn.Module, Tensor, int]] = []
        self._is_reported = False

    def after_backward(self) -> Iterator[Finding]:
        """Look at the modes once gradients tell which modules are trained."""
        if self._is_done:
            return
        self._is_done = True
        model = self._case.model
        for name, module in _outermost_in_eval(model):
            if not any(parameter.grad is not None for parameter in module.parameters()):
                continue  # frozen, or a teacher or average that only gives targets
            acting = [type(part).__name__ for part in module.modules() if _depends_on_mode(part)]
            if not acting:
                continue
            kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(acting).items())
            is_single_norm = isinstance(module, AnyBatchNorm)
            yield Finding(
                "module_modes",
                "info" if is_single_norm else "warning",
                name or type(model).__name__,
                f"It gets gradients in training and is in eval mode, with {kinds} in it.",
                "BatchNorm normalizes with its stored statistics and dropout does nothing, as in evaluation.",
                f"Call {f'model.{name}' if name else 'model'}.train() before training (transformers' from_pretrained "
                "and a model.eval() of one's own leave eval mode on), or freeze it.",
            )

    def evaluation_batch_start(self) -> Iterator[Finding]:
        """Note how often the statistics of BatchNorm were written."""
        self._writes = [
            (name, module, module.num_batches_tracked, write_count(module.num_batches_tracked))
            for name, module in self._case.model.named_modules()
            if isinstance(module, AnyBatchNorm) and module.training and module.num_batches_tracked is not None
            if not module.num_batches_tracked.is_inference()
        ]
        yield from ()

    def evaluation_batch_end(self, _outputs: Any) -> Iterator[Finding]:
        """Report the BatchNorms whose statistics an evaluation batch has changed."""
        changed = [
            name for name, module, counter, count in self._writes if module.training and write_count(counter) != count
        ]
        self._writes = []
        if not changed or self._is_reported:
            return
        self._is_reported = True
        yield Finding(
            "module_modes",
            "warning",
            first_of(changed),
            f"{counted(len(changed), 'BatchNorm layer is', 'BatchNorm layers are')} in train mode in evaluation, and "
            "an evaluation batch has changed their running statistics.",
            "Evaluation depends on how its data is batched, and leaks into the trained model.",
            "Call model.eval() before evaluation, and do not call train() on a part of it there.",
        )


def _outermost_in_eval(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts of a model that are in eval mode as a whole."""
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop(0)
        if not any(part.training for part in module.modules()):
            yield name, module
        else:
            waiting += [
                (f"{name}.{child_name}" if name else child_name, child) for child_name, child in module.named_children()
            ]


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, AnyDropout):
        return float(module.p) > 0
    return isinstance(module, AnyBatchNorm) and module.track_running_stats


class Devices:
    """Check: parameters, buffers and plain tensor attributes on another device than the model, and unused moves."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case

    def before_training(self) -> Iterator[Finding]:
        """Compare the devices of what is registered."""
        home = self._case.home()
        if home is None or self._is_spread_by_accelerate():
            return
        registered = {**dict(self._case.model.named_parameters()), **dict(self._case.model.named_buffers())}
        away = {name: tensor.device for name, tensor in registered.items() if tensor.device.type != home.type}
        if away:
            name, device = next(iter(away.items()))
            yield Finding(
                "devices",
                "warning",
                first_of(list(away)),
                f"{counted(len(away), 'parameter or buffer is', 'parameters and buffers are')} not on {home}, where "
                f"the others are: {name} is on {device}.",
                "The forward pass raises 'Expected all tensors to be on the same device' where they meet.",
                f"model.to({str(home)!r}) once everything is registered (tensor.to() alone returns a copy).",
            )

    def batch_start(self, batch: Any, index: int) -> Iterator[Finding]:
        """Report plain attributes, and moved copies that the trial saw thrown away."""
        if index:
            return
        strays = {} if self._is_spread_by_accelerate() else self._case.strays()
        if strays:
            yield self._plain_attributes(strays)
        for line in dict.fromkeys(trial_of(self._case, batch).discarded_moves):
            yield Finding(
                "devices",
                "warning",
                str(line),
                f"`{line.source}` moves a tensor and throws the moved copy away.",
                "The tensor stays where it was: unlike module.to(), tensor.to() returns a copy.",
                f"Assign the result: x = {line.source}",
            )

    def _plain_attributes(self, strays: dict[str, tuple[nn.Module, str]]) -> Finding:
        names = list(strays)
        module, key = strays[names[0]]
        place = f"{names[0]} is on {getattr(module, key).device}, the model on {self._case.home()}"
        return Finding(
            "devices",
            "info",
            first_of(names),
            f"{counted(len(names), 'tensor is a plain attribute', 'tensors are plain attributes')}: {place}.",
            "model.to() does not move them, and state_dict() does not save them. A step that takes one together with a "
            "tensor of the model raises 'Expected all tensors to be on the same device'.",
            f"self.register_buffer({key!r}, tensor, persistent=False)",
        )

    def _is_spread_by_accelerate(self) -> bool:
        """Return whether accelerate has placed the model's parts, and moves the inputs of each."""
        model = self._case.model
        return any(hasattr(part, "hf_device_map") for part in (model, *model.children()))
