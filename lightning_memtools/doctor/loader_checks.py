"""Checks of the data: a last batch of one sample, and shared memory."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_memtools._torch import AnyBatchNorm, output_shape
from lightning_memtools.doctor.autograd_nodes import nodes_below, operator_of
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.doctor.training_case import TrainingCase, without_ones
from lightning_memtools.memory.loader_sizes import batch_size_of, drops_last, n_samples_of
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.shared_memory import free_in_container, free_shared_memory
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.phrases import counted, first_of

_MOST_NODES = 100_000


def note_shapes(case: TrainingCase, batch: Any) -> None:
    """Note the size of the first batch, and the shapes of its tensors."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and not tensor.is_nested]
    case.batch_size = next((tensor.shape[0] for tensor in tensors), 1)
    case.batch_shapes = frozenset(without_ones(tensor.shape) for tensor in tensors)


def batch_norm_one_sample(case: TrainingCase, loss: Tensor) -> list[Finding]:
    """Return the BatchNorm layers that a last batch of one sample makes raise.

    They are those that get one value per channel and sample in the first step: one sample alone has no variance there.
    """
    norms = [module for module in case.model.modules() if isinstance(module, AnyBatchNorm) and module.training]
    # SyncBatchNorm counts the samples of all ranks.
    counts_alone = any(case.world_size == 1 or not isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    if not counts_alone or not _ends_with_one(case):
        return []
    names, lone = case.parameter_names(), []
    for node in nodes_below(loss.grad_fn, _MOST_NODES):
        shape = output_shape(node)
        if "BatchNorm" in operator_of(node) and shape and math.prod(shape) == case.batch_size * shape[1]:
            leaves = [getattr(before, "variable", None) for before, _ in node.next_functions]
            layers = [names[id(leaf)].rpartition(".")[0] for leaf in leaves if id(leaf) in names]
            if not layers or case.model.get_submodule(layers[0]).training:
                lone.append(layers[0] if layers else "a BatchNorm layer")
    if not lone:
        return []
    size, n_samples = batch_size_of(case.train_loader), n_samples_of(case.train_loader)
    per_rank = f" on each of {case.world_size} ranks" if case.world_size > 1 else ""
    evidence = (
        f"{n_samples} samples{per_rank} in batches of {size} leave a last batch of one sample, and "
        f"{counted(len(lone), 'BatchNorm layer gets', 'BatchNorm layers get')} one value per channel and sample."
    )
    return [finding("batch_norm_one_sample", first_of(lone[::-1]), evidence)]


def _ends_with_one(case: TrainingCase) -> bool:
    loader: Any = case.train_loader
    size, n_samples = batch_size_of(loader), n_samples_of(loader)
    # Another batch sampler, or a loader's own __iter__, may form batches of its own sizes.
    is_plain = (
        type(getattr(loader, "batch_sampler", None)) is BatchSampler and type(loader).__iter__ is DataLoader.__iter__
    )
    if not is_plain or not size or not n_samples or drops_last(loader):
        return False
    is_reached = case.n_train_batches is None or case.n_train_batches >= -(-n_samples // size)
    return is_reached and size > 1 and n_samples % size == 1


def note_free_memory(case: TrainingCase, _: Any) -> None:
    """Note the free shared memory before the workers fill it."""
    limits = [limit for limit in (free_shared_memory(), free_in_container()) if limit is not None]
    case.free_shared = min(limits, default=None)


def shared_memory(case: TrainingCase, batch: Any) -> list[Finding]:
    """Compare the bytes of all batches that workers load ahead with the shared memory that was free."""
    loaders = [one for one in (case.train_loader, *case.evaluation_loaders) if getattr(one, "num_workers", 0)]
    if not loaders or case.free_shared is None:
        return []
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
    need = sum(one.num_workers * (one.prefetch_factor or 0) for one in loaders) * batch_bytes * case.local_ranks
    if need <= case.free_shared:
        return []
    workers = " + ".join(
        f"{counted(one.num_workers, 'worker', 'workers')} x {counted(one.prefetch_factor, 'batch', 'batches')}"
        for one in loaders
    )
    ranks = f", on {case.local_ranks} ranks," if case.local_ranks > 1 else ""
    evidence = (
        f"{workers} of {format_size(batch_bytes)}{ranks} need {format_size(need)} of shared memory when all are ready, "
        f"and {format_size(case.free_shared)} were free."
    )
    return [finding("shared_memory", "DataLoader", evidence)]
