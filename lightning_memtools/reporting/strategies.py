"""Tells which callbacks work under which strategy, and why others do not.

Strategies are recognised by their class names, which are the same in `lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

StrategyFamily = Literal["DeepSpeed", "XLA", "FSDP", "ModelParallel", "DDP", "SingleDevice", "unknown"]

# The special ones first: in Lightning, those of DeepSpeed and XLA inherit from DDPStrategy or SingleDeviceStrategy.
_KNOWN: tuple[StrategyFamily, ...] = ("DeepSpeed", "XLA", "FSDP", "ModelParallel", "DDP", "SingleDevice")

_CHECKPOINTS_ITSELF = (
    "{strategy} keeps parameters in flat buffers, and its own activation checkpointing knows when they are gathered; "
    "ModelParallelStrategy with fully_shard (FSDP 2) is served"
)
_CANNOT_TRACE = "{strategy} shards the model, and one rank alone cannot trace a step of it"
_COLLECTIVES_IN_TRIALS = (
    "{strategy} shards the model over the ranks or runs collectives in forward and backward, so a rank that runs out "
    "of memory in a trial would leave the others waiting. Find the size with estimate_memory, or with strategy='ddp' "
    "where the model fits, and set it by hand"
)
_SEES_SHARDS = (
    "{strategy} may spread parameters and gradients over the ranks, so that one rank sees only parts: the checks of "
    "gradients are left out"
)
_DECIDES_ALONE = (
    "a rank that fails would leave the others waiting in a collective of the forward or backward pass of {strategy}, "
    "where nothing can be said to them, and all ranks would have to run equally many parts. Train with strategy='ddp' "
    "where the model fits on one device, or find a batch size that fits"
)
_CUTS_THE_GRAPH = "reading a number in every step would cut XLA's graph in two."

_UNSEEN: Mapping[StrategyFamily, str] = {
    "DeepSpeed": "DeepSpeed keeps gradients in partitions of its own and leaves p.grad empty, so that a check would "
    "see none. DeepSpeed skips overflowing steps itself when it trains in fp16.",
    "XLA": _CUTS_THE_GRAPH,
}

# Callbacks that are not named here work under every strategy. A callback works under a family that has no entry.
_REASONS: Mapping[str, Mapping[StrategyFamily, str]] = {
    "GradientCheckpointing": dict.fromkeys(("DeepSpeed", "FSDP"), _CHECKPOINTS_ITSELF),
    "OOMReport": dict.fromkeys(("DeepSpeed", "FSDP", "ModelParallel"), _CANNOT_TRACE),
    "BatchSizeTuner": dict.fromkeys(("DeepSpeed", "FSDP", "ModelParallel", "unknown"), _COLLECTIVES_IN_TRIALS),
    "OOMRecovery": dict.fromkeys(("DeepSpeed", "FSDP", "ModelParallel", "XLA", "unknown"), _DECIDES_ALONE),
    "TrainingDoctor": {
        **dict.fromkeys(("DeepSpeed", "FSDP", "ModelParallel", "unknown"), _SEES_SHARDS),
        "XLA": _CUTS_THE_GRAPH,
    },
    "HaltOnNaN": _UNSEEN,
    "LossSpikes": _UNSEEN,  # HaltOnNaN reads for it
}


def strategy_family(strategy: type) -> StrategyFamily:
    """Return the family of a strategy class, such as "DDP" or "FSDP", from the names of the class and its bases."""
    names = [ancestor.__name__ for ancestor in strategy.__mro__]
    return next((family for family in _KNOWN if any(family in name for name in names)), "unknown")


def why_unsupported(callback: str, strategy: type) -> str | None:
    """Return the reason why a callback does not fully work under a strategy; None if it works fully.

    Args:
        callback: The name of the callback's class.
        strategy: The class of the Trainer's strategy.
    """
    reason = _REASONS.get(callback, {}).get(strategy_family(strategy))
    return None if reason is None else reason.replace("{strategy}", strategy.__name__)
