"""The loss of a backward pass, as training_step returned it."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def noted(loss: Tensor, divided_by: int, scale: Tensor | None) -> Tensor:
    """The value of a loss that was divided for an accumulation and multiplied by a gradient scaler's scale, 0-dim."""
    value = loss.detach()
    # A float64 loss may be finite beyond float32's range.
    value = (value if value.dtype == torch.float64 else value.float()) * divided_by
    if scale is not None:
        value = value / scale
    return value if value.dim() == 0 else value.mean()
