"""Checks of a checkpoint: which of its keys do not fit the model, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.reporting.phrases import first_of

_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
_STATISTICS = ("num_batches_tracked", "running_mean", "running_var")


def load_and_compare(model: nn.Module, path: str) -> list[Finding]:
    """Load a checkpoint of Lightning or of a plain script into the model; return findings on mismatched keys.

    The caller has to restore the model afterwards. No code in the file is executed (`weights_only=True`).

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
    try:
        # torch adds missing counters of old checkpoints itself, so that they are not among these.
        missing, unexpected = nn.Module.load_state_dict(model, state, strict=False)
    except RuntimeError as error:  # of other sizes
        return [finding("checkpoint_keys/others", path, " ".join(str(error).split())[:300])]
    if not (keys := [*missing, *unexpected]):
        return []
    evidence = f"Missing: {first_of(missing) or 'none'}. Unexpected: {first_of(unexpected) or 'none'}."
    if all(key.endswith(_STATISTICS) for key in keys):
        evidence += " BatchNorm has these keys; it counts batches since PyTorch 0.4.1, where it tracks statistics."
        return [finding("checkpoint_keys/statistics", f"{path}: {first_of(keys)}", evidence)]
    return [finding("checkpoint_keys/others", f"{path}: {first_of(keys)}", evidence)]
