"""Which layers need care when they are run a second time."""

# ruff: noqa: SLF001 - modules, autograd and storages are looked at through torch's own underscored parts, as torch's tools do
from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

# By name, for libraries that are not imported here: torchvision has StochasticDepth, timm DropPath and DropBlock2d.
_DROPOUTS_BY_NAME = {"StochasticDepth", "DropPath", "DropBlock2d", "PatchDropout", "DropBlock"}
_RATES = ("p", "drop_prob")
# The pre-forward hooks that torch.nn.utils.spectral_norm leaves, and the parametrization of its successor.
_POWER_ITERATIONS = {"SpectralNorm", "_SpectralNorm"}


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is a Dropout of any kind that drops anything now."""
    if not isinstance(module, _DropoutNd) and type(module).__name__ not in _DROPOUTS_BY_NAME:
        return False
    rate = next((getattr(module, name) for name in _RATES if hasattr(module, name)), None)
    return module.training and not (isinstance(rate, (int, float)) and rate == 0)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm that computes the batch's statistics now."""
    return isinstance(module, _BatchNorm) and module.training


def tracks_statistics(module: nn.Module) -> bool:
    """Whether a forward pass changes running statistics: BatchNorm's, and InstanceNorm's where it keeps some."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def is_sync_batch_norm(module: nn.Module) -> bool:
    """Whether a module averages statistics over ranks: run twice, it would communicate twice."""
    return isinstance(module, nn.SyncBatchNorm) and module.training


def iterates_power(module: nn.Module) -> bool:
    """Whether a forward pass advances a power iteration, so that a second one has another weight."""
    if not module.training:
        return False
    hooks = (type(hook).__name__ for hook in module._forward_pre_hooks.values())
    return type(module).__name__ in _POWER_ITERATIONS or any(name in _POWER_ITERATIONS for name in hooks)


def works_in_place(module: nn.Module) -> bool:
    """Whether a layer says that it overwrites its input."""
    return getattr(module, "inplace", False) is True


def is_special(module: nn.Module) -> bool:
    """Whether a module itself is what `bn_dropout` speaks of."""
    return is_dropout(module) or is_batch_norm(module)


def first_within(module: nn.Module, *kinds: object) -> str | None:
    """The class name of the first module in a tree that is of one of the kinds; None without one."""
    return next((type(part).__name__ for part in _tree(module) if any(kind(part) for kind in kinds)), None)  # type: ignore[operator]


def why_outside(layer: nn.Module, bn_dropout: str) -> str | None:
    """Why a layer may not be part of a recomputed range; None where it may."""
    sync = first_within(layer, is_sync_batch_norm)
    if sync is not None:
        return f"{sync} talks to other ranks"
    power = first_within(layer, iterates_power)
    if power is not None:
        return "power iteration (spectral_norm) would run twice"
    if bn_dropout == "skip" and is_special(layer):
        return f"{type(layer).__name__} never runs twice"
    if bn_dropout == "avoid":
        special = first_within(layer, is_special)
        if special is not None:
            return f"contains {special}" if not is_special(layer) else f"is a {special}"
    return None


def _tree(module: nn.Module) -> Iterator[nn.Module]:
    # Parametrizations are modules too, so they are among these.
    yield from module.modules()
