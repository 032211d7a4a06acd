"""Which distributed set-ups a trial can be run in, and a guard against collectives inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import distributed, nn

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced",
    "allgather_coalesced", "alltoall", "alltoall_base", "barrier", "monitored_barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "send", "recv",
    "recv_anysource",
)  # fmt: skip


class CollectiveInTrial(RuntimeError):  # noqa: N818, named for what happened
    """A rank wanted to talk to the others in the middle of a trial."""


def why_refused(trainer: Trainer, module: LightningModule) -> str | None:
    """Why a trial cannot be run under the Trainer's strategy; None where it can."""
    strategy = trainer.strategy
    if type(strategy).__name__ != "SingleDeviceXLAStrategy" and not isinstance(
        strategy, (SingleDeviceStrategy, DDPStrategy)
    ):
        return (
            f"{type(strategy).__name__} shards the model over the ranks or runs collectives in forward and backward, "
            "so a rank that runs out of memory in a trial would leave the others waiting. Find the size with "
            "estimate_memory, or with strategy='ddp' where the model fits, and set it by hand"
        )
    sharded = next((p for p in module.parameters() if hasattr(p, "device_mesh")), None)
    if sharded is not None or any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
        return (
            "the model is sharded (FSDP, DTensor): its forward gathers parameters from all ranks, and a rank that runs "
            "out of memory in a trial would leave the others waiting. Set the size by hand"
        )
    if trainer.world_size > 1 and any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()):
        return (
            "SyncBatchNorm exchanges statistics in every forward, and a rank that runs out of memory in a trial would "
            "leave the others waiting. Tune with sync_batchnorm=False (its memory is the same but for a few vectors) "
            "and set the size that is found"
        )
    return None


@contextmanager
def no_collectives() -> Iterator[None]:
    """Whoever calls a collective gets an error that names it, on the rank that called, and nobody waits.

    All of torch.distributed, and whoever imported functions of it by name, ends in a method of ProcessGroup.
    """
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        yield
        return
    group: Any = distributed.ProcessGroup
    # As they stand in the class: what getattr gives is a function already, and would not become a method again.
    originals = {name: vars(group)[name] for name in _COLLECTIVES if name in vars(group)}

    def refuse(name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            raise CollectiveInTrial(
                f"The collective {name!r} was called while BatchSizeTuner ran a batch size, by torch.distributed in "
                "your own code or in a library's. A rank that fails would leave the others waiting in it. Next: leave "
                "it out of the steps while tuning, or tune with devices=1 and set the size that is found."
            )

        return collective

    try:
        for name in originals:
            setattr(group, name, refuse(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(group, name, original)
