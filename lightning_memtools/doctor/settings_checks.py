"""Checks of settings: combinations that fail only at the first step, and a run that cannot be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_memtools._torch import takes_scaled_gradients
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.reporting.phrases import first_of

# A seed that the system draws has 53 bits; one that a person gives is nearly always below.
_LARGEST_USUAL_SEED = 2**32


class RejectedSettings:
    """Check: combinations of precision, optimizer and clipping that raise at the first optimizer step."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case

    def before_training(self) -> Iterator[Finding]:
        """Look at the combination."""
        case = self._case
        if case.precision not in {"16-mixed", "bf16-mixed"}:
            return
        for optimizer in case.optimizers:
            name = type(optimizer).__name__
            if case.clip and takes_scaled_gradients(optimizer):
                yield Finding(
                    "rejected_settings",
                    "error",
                    f"{name}(fused=True)",
                    f"precision={case.precision!r} with gradient_clip_val={case.clip:g} and an optimizer that unscales "
                    "gradients in its own kernels.",
                    "Lightning raises 'does not allow for gradient clipping' at the first optimizer step.",
                    "fused=False, precision='bf16-true', or no clipping.",
                )
            if isinstance(optimizer, torch.optim.LBFGS) and case.precision == "16-mixed":
                yield Finding(
                    "rejected_settings",
                    "error",
                    name,
                    "precision='16-mixed' with LBFGS, which needs several passes for one step.",
                    "Lightning raises 'AMP and the LBFGS optimizer are not compatible' at the first step.",
                    "precision='32-true' or 'bf16-mixed', or another optimizer.",
                )
        half = [name for name, p in case.model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
        if half and case.precision == "16-mixed":
            yield Finding(
                "rejected_settings",
                "error",
                first_of(half),
                f"precision='16-mixed' with {len(half)} trainable parameters that are float16 already.",
                "The gradient scaler raises 'Attempting to unscale FP16 gradients.' at the first step.",
                "model.float(): mixed precision keeps the parameters in float32.",
            )


class Reproducibility:
    """Check: an unseeded run and nondeterministic settings."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case

    def before_training(self) -> Iterator[Finding]:
        """Look at the seed and at the settings."""
        seed = torch.initial_seed()
        if not self._case.seeded and seed >= _LARGEST_USUAL_SEED:
            yield Finding(
                "reproducibility",
                "info",
                "the process",
                f"No seed was set: torch drew {seed} from the system.",
                "Weights, dropout and shuffling differ from run to run.",
                "lightning.seed_everything(0, workers=True), before the model is built.",
            )
        if self._case.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            reason = (
                "cudnn.benchmark is on" if torch.backends.cudnn.benchmark else "some CUDA kernels add up in any order"
            )
            yield Finding(
                "reproducibility",
                "info",
                "torch",
                f"Deterministic algorithms are not enabled ({reason}).",
                "Two runs with one seed differ in the last bits, and drift apart.",
                "Trainer(deterministic=True) where runs must be repeated exactly; it costs speed.",
            )
