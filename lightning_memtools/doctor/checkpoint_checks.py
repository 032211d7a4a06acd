"""Checks of a checkpoint: which of its keys do not fit the model, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.reporting.phrases import first_of

_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
_COUNTER, _STATISTICS = "num_batches_tracked", ("num_batches_tracked", "running_mean", "running_var")


def load_and_compare(model: nn.Module, path: str) -> list[Finding]:
    """Load a checkpoint of Lightning, or of a plain script, into the model and return what does not fit.

    The model changes: the caller restores it. Nothing in the file is executed (`weights_only=True`).

    Raises:
        ValueError: The file cannot be read, or holds no state_dict.
    """
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"checkpoint={path!r} cannot be read: {in_one_line(error)}") from error
    for key in _CONTAINERS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"checkpoint={path!r} holds {type(state).__name__}, and no state_dict.")
    own = model.state_dict()
    sizes = {
        key: f"{key} is {tuple(value.shape)} in the checkpoint and {tuple(own[key].shape)} in the model."
        for key, value in state.items()
        if key in own and value.shape != own[key].shape
    }
    if sizes:  # torch raises for them, also with strict=False
        return [finding("checkpoint_keys/others", f"{path}: {first_of(list(sizes))}", " ".join(sizes.values()))]
    keys = nn.Module.load_state_dict(model, state, strict=False)
    return differences(path, keys.missing_keys, keys.unexpected_keys)


def differences(path: str, missing: Sequence[str], unexpected: Sequence[str]) -> list[Finding]:
    """Return the differences between a checkpoint and a model, with what removes them.

    Args:
        path: The checkpoint.
        missing: The keys that the model has and the checkpoint has not.
        unexpected: The keys that the checkpoint has and the model has not.
    """
    keys = [*missing, *unexpected]
    if not keys:
        return []
    # torch adds missing counters of old checkpoints itself, under the model's names.
    own, saved = (sorted(key for key in some if not key.endswith(_COUNTER)) for some in (missing, unexpected))
    if own and len(own) == len(saved):
        added, removed = saved[0].removesuffix(own[0]), own[0].removesuffix(saved[0])
        if saved == [added + key for key in own]:
            evidence = (
                f"All {len(own)} keys fit the model once {added!r} is removed from their front, as wrappers add it."
            )
            return [finding("checkpoint_keys/prefix", path, evidence, key=f"key.removeprefix({added!r})")]
        if own == [removed + key for key in saved]:
            evidence = f"All {len(own)} keys fit the model once {removed!r} is put in front: it is of an inner model."
            return [finding("checkpoint_keys/prefix", path, evidence, key=f"{removed!r} + key")]
    evidence = f"Missing: {first_of(missing) or 'none'}. Unexpected: {first_of(unexpected) or 'none'}."
    if all(key.endswith(_STATISTICS) for key in keys):
        evidence += " BatchNorm has these keys; it counts batches since PyTorch 0.4.1, where it tracks statistics."
        return [finding("checkpoint_keys/statistics", f"{path}: {first_of(keys)}", evidence)]
    return [finding("checkpoint_keys/others", f"{path}: {first_of(keys)}", evidence)]
