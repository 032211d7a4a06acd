"""Puts a model on the device as one rank of a strategy holds it: torch's own DDP, FSDP 1 and FSDP 2.

They run in a process group whose collectives return at once (torch's "fake" backend). So what a rank keeps, gathers
and frees, and when, is decided by torch's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_memtools._torch import pretended_ranks, sharding_undone
from lightning_memtools.simulation.ddp_buckets import BucketSettings
from lightning_memtools.simulation.step_runner import AUTOCAST_TYPES, Recipe, is_lightning_module

StrategyName = Literal["ddp", "fsdp", "fsdp2"]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Lightning's own configure_model does nothing.
_OF_LIGHTNING = {"lightning.pytorch.core.hooks", "pytorch_lightning.core.hooks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The ranks of a training, of which the first is run.

    Attributes:
        strategy: "ddp", "fsdp" (FullyShardedDataParallel) or "fsdp2" (fully_shard).
        devices: The number of ranks, each with a device.
        shard: Applies `fully_shard` to the model, given the mesh of all ranks; None for the model's own
            ``configure_model``, or for blocks that are found.
        buckets: The settings of DDP's buckets.
    """

    strategy: StrategyName
    devices: int
    shard: Callable[[nn.Module, Any], Any] | None = None
    buckets: BucketSettings | None = None

    @property
    def shards(self) -> bool:
        """True if parameters are spread over the ranks."""
        return self.strategy != "ddp"


class Placement:
    """Puts a model on the device once it is called, and returns what a step calls.

    Attributes:
        notes: What was done, in words.
    """

    def __init__(self, model: nn.Module, ranks: RankSettings | None, recipe: Recipe) -> None:
        self.notes: list[str] = []
        self._model, self._ranks, self._recipe = model, ranks, recipe

    def __call__(self) -> nn.Module:
        """Put the model on the device."""
        model, ranks = self._model, self._ranks
        if ranks is None:
            return model.to("cuda")
        if ranks.strategy == "fsdp2":
            self._shard(model, ranks)
            return model
        return self._ddp(model, ranks) if ranks.strategy == "ddp" else self._fsdp(model)

    def begin_batch(self, called: nn.Module, number: int) -> None:
        """Note that the batch of this number begins: DDP sums gradients over ranks in the last one of a step only."""
        if isinstance(called, nn.parallel.DistributedDataParallel):
            called.require_backward_grad_sync = number % self._recipe.accumulate == 0

    def _ddp(self, model: nn.Module, ranks: RankSettings) -> nn.Module:
        buckets = ranks.buckets or BucketSettings(bucket_mb=25)
        self.notes.append(f"One of {ranks.devices} ranks under DDP.")
        return nn.parallel.DistributedDataParallel(
            model.to("cuda"),
            device_ids=[torch.cuda.current_device()],
            bucket_cap_mb=None if buckets.starts_small else buckets.bucket_mb,
            gradient_as_bucket_view=buckets.as_view,
            find_unused_parameters=not buckets.are_rebuilt,
        )

    def _fsdp(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision  # noqa: PLC0415, may not be built in
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: PLC0415

        dtype = self._recipe.dtype or AUTOCAST_TYPES.get(self._recipe.precision or "", torch.float32)
        units = repeated_blocks(model)
        self._note_units("FSDP 1", units)
        wrapped = FullyShardedDataParallel(
            model,
            device_id=torch.cuda.current_device(),
            use_orig_params=True,
            # As Lightning's FSDPStrategy.
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
            auto_wrap_policy=ModuleWrapPolicy({type(unit) for unit in units}) if units else None,
        )
        return wrapped.to("cuda")

    def _shard(self, model: Any, ranks: RankSettings) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415, may not be built in
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        # The mesh of Lightning's ModelParallelStrategy, with all ranks in one dimension.
        mesh = init_device_mesh("cuda", (ranks.devices, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
        if ranks.shard is not None:
            ranks.shard(model, mesh["data_parallel"])
            self.notes.append(f"One of {ranks.devices} ranks under FSDP 2, sharded by the function that was given.")
        elif configures_itself(model):
            # LightningModule.device_mesh is a property that cannot be set; a subclass is the public way to another one.
            kind = type(model)
            model.__class__ = type(kind.__name__, (kind,), {"device_mesh": mesh, "__module__": kind.__module__})
            model.configure_model()
            self.notes.append(f"One of {ranks.devices} ranks under FSDP 2, sharded by the model's configure_model.")
        else:
            units = repeated_blocks(model)
            self._note_units("FSDP 2", units)
            for unit in dict.fromkeys((*units, *_roots(model))):  # the blocks of a ModuleList are both
                fully_shard(unit, mesh=mesh["data_parallel"])
        if any(one.is_meta for one in (*model.parameters(), *model.buffers())):
            model.to_empty(device="cuda")
        model.to("cuda")

    def _note_units(self, strategy: str, units: list[nn.Module]) -> None:
        assert self._ranks is not None
        kinds = Counter(type(unit).__name__ for unit in units)
        which = " and ".join(f"{number} {name}" for name, number in kinds.items()) or "nothing"
        self.notes.append(
            f"One of {self._ranks.devices} ranks under {strategy}: {which} sharded each by itself, the rest together."
        )


@contextmanager
def one_rank(model: nn.Module, ranks: RankSettings | None, recipe: Recipe) -> Iterator[Placement]:
    """Make this process the first rank within, and yield what puts the model on the device.

    The caller restores the model's attributes (see `fakes.borrowed`).

    Raises:
        RuntimeError: This process is a rank of another process group already.
    """
    if ranks is None:
        yield Placement(model, None, recipe)
        return
    from torch import distributed  # noqa: PLC0415, may not be built in

    if distributed.is_initialized():
        raise RuntimeError(
            f"strategy={ranks.strategy!r} needs a process group of its own, and this process is rank "
            f"{distributed.get_rank()} of {distributed.get_world_size()} already. Estimate before "
            "init_process_group, or in a process of its own (`memtools estimate`)."
        )
    with pretended_ranks(0, ranks.devices), sharding_undone(model):
        distributed.init_process_group()
        yield Placement(model, ranks, recipe)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of which a model is made, outermost: members of a list or a Sequential with one of its class.

    These are what trainings shard one by one, and what policies of FSDP 1 wrap.
    """
    found: list[nn.Module] = []
    kinds = Counter(map(type, model.children()))
    for child in model.children():
        is_block = isinstance(model, _CONTAINERS) and kinds[type(child)] > 1 and not isinstance(child, _CONTAINERS)
        if not is_block:
            found += repeated_blocks(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    return found


def configures_itself(model: nn.Module) -> bool:
    """Return whether a LightningModule overrides ``configure_model``, which is where it is sharded."""
    configure = getattr(type(model), "configure_model", None)
    return is_lightning_module(model) and getattr(configure, "__module__", None) not in _OF_LIGHTNING


def _roots(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called as a whole: of a LightningModule, whose step is no call of it, its parts."""
    if not (is_lightning_module(model) or type(model) in {nn.ModuleList, nn.ModuleDict}):
        return [model] if next(model.parameters(), None) is not None else []
    return [root for child in model.children() for root in _roots(child)]
