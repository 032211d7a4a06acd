"""Checks of modules and of the process: train and eval modes, tensors on another device, and the seed."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import AnyBatchNorm, AnyDropout, write_count
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.reporting.phrases import counted, first_of

# A seed that the system draws has 53 bits; one that a person gives is nearly always below.
_LARGEST_USUAL_SEED = 2**32


def trained_in_eval(case: TrainingCase, _: Any) -> list[Finding]:
    """Return the parts that get gradients in eval mode and hold dropout or BatchNorm.

    Parts without a gradient are frozen, or only give targets, as a teacher does. A BatchNorm in eval mode in a part
    in train mode is meant so.
    """
    layers: dict[str, Counter[str]] = {}
    for name, layer in case.model.named_modules():
        parent = name.rpartition(".")[0]
        part = case.model.get_submodule(parent)
        acts = isinstance(layer, (AnyDropout, AnyBatchNorm)) and getattr(layer, "p", 1.0) > 0
        if acts and not layer.training and not part.training and any(p.grad is not None for p in part.parameters()):
            layers.setdefault(parent, Counter())[type(layer).__name__] += 1
    return [
        finding(
            "module_modes/training",
            name or type(case.model).__name__,
            "It gets gradients in training and is in eval mode, with "
            f"{', '.join(f'{n} {kind}' for kind, n in kinds.items())} in it.",
            part=f"model.{name}" if name else "model",
        )
        for name, kinds in layers.items()
    ]


def note_statistics(case: TrainingCase, _: Any) -> None:
    """Note how often the statistics of each BatchNorm in train mode were written before an evaluation batch."""
    case.write_counts = [
        (name, counter, write_count(counter))
        for name, module in case.model.named_modules()
        if isinstance(module, AnyBatchNorm) and module.training
        if (counter := module.num_batches_tracked) is not None and not counter.is_inference()
    ]


def norms_in_evaluation(case: TrainingCase, _: Any) -> list[Finding]:
    """Return the BatchNorm layers whose statistics an evaluation batch has written."""
    changed = [name for name, counter, count in case.write_counts if write_count(counter) != count]
    case.write_counts = []
    if not changed:
        return []
    evidence = (
        f"{counted(len(changed), 'BatchNorm layer is', 'BatchNorm layers are')} in train mode in evaluation, and an "
        "evaluation batch has changed their running statistics."
    )
    return [finding("module_modes/evaluation", first_of(changed), evidence)]


def devices(case: TrainingCase, _: Any) -> list[Finding]:
    """Return parameters, buffers and plain tensor attributes on another device than most parameters."""
    model = case.model
    sizes: Counter[torch.device] = Counter()
    for parameter in model.parameters():
        sizes[parameter.device] += parameter.numel()
    # accelerate places a model's parts, and moves the inputs of each.
    if not sizes or any(hasattr(part, "hf_device_map") for part in (model, *model.children())):
        return []
    home = sizes.most_common(1)[0][0]
    registered = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plain = {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        # A tensor without dimensions may stay on the host: every device takes it.
        if isinstance(value, Tensor) and value.dim()
    }
    findings = []
    for mistake, tensors in (("devices", registered), ("devices/plain", plain)):
        away = {name: tensor.device for name, tensor in tensors.items() if tensor.device.type != home.type}
        for name, device in list(away.items())[:1]:
            evidence = (
                f"{counted(len(away), 'tensor is', 'tensors are')} not on {home} like the model: {name} is on {device}."
            )
            fields = {"home": str(home), "name": name.rpartition(".")[2]}
            findings.append(finding(mistake, first_of(list(away)), evidence, **fields))
    return findings


def reproducibility(*_: Any) -> list[Finding]:
    """Return that the run is not seeded."""
    seed = torch.initial_seed()
    if "PL_GLOBAL_SEED" in os.environ or seed < _LARGEST_USUAL_SEED:
        return []
    return [finding("reproducibility", "the process", f"No seed was set: torch drew {seed} from the system.")]
