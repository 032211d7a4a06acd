"""Under which conditions a step ran: precision, gradient scale, accumulation, what its Trainer said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

# What a step may ask its Trainer for, as far as plain numbers can answer.
TRAINER_FACTS = (
    "current_epoch", "global_step", "global_rank", "local_rank", "node_rank", "world_size", "num_devices", "num_nodes",
    "max_epochs", "max_steps", "min_epochs", "min_steps", "num_training_batches", "estimated_stepping_batches",
    "accumulate_grad_batches", "gradient_clip_val", "is_global_zero", "is_last_batch", "fast_dev_run",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which conditions a step ran. Plain values.

    Attributes:
        automatic: Whether backward follows training_step; else the module runs it itself.
        divided_by: What the loss is divided by for an accumulation.
        scale: What the gradient scaler multiplies the loss by; None without one.
        unscales_itself: Whether the optimizer takes the gradients still scaled.
        device_type: Where the module is.
        autocast: What autocast computes in during training_step, as ``"bfloat16"``; None without.
        autocast_cache: Whether autocast keeps the weights it converted.
        default_dtype: What new tensors are during training_step, as ``"float32"``.
        trainer: What the Trainer says of itself: name to plain value.
    """

    automatic: bool = True
    divided_by: int = 1
    scale: float | None = None
    unscales_itself: bool = False
    device_type: str = "cpu"
    autocast: str | None = None
    autocast_cache: bool = True
    default_dtype: str = "float32"
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Where training_step runs."""
        default = torch.get_default_dtype()
        casting: Any = nullcontext()
        if self.autocast is not None:
            dtype = getattr(torch, self.autocast)
            casting = torch.autocast(self.device_type, dtype=dtype, cache_enabled=self.autocast_cache)
        torch.set_default_dtype(getattr(torch, self.default_dtype))
        try:
            with casting:
                yield
        finally:
            torch.set_default_dtype(default)


def precision_now(device_type: str) -> dict[str, Any]:
    """The part of the conditions that whatever surrounds this call has set: autocast and the default dtype."""
    casts = torch.is_autocast_enabled(device_type)
    return {
        "device_type": device_type,
        "autocast": str(torch.get_autocast_dtype(device_type)).removeprefix("torch.") if casts else None,
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
