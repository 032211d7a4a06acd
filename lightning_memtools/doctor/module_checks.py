"""Checks of modules and of the process: frozen BatchNorm, tensors on another device, and the seed."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import AnyBatchNorm, is_in_memory, write_count
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.doctor.training_case import TrainingCase
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
