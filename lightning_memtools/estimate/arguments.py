"""What estimate_memory accepts, and what it says of anything else."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from lightning_memtools.simulation.ddp_buckets import unwrapped
from lightning_memtools.simulation.step import STEP_NAMES
from lightning_memtools.simulation.trainer_stand_in import has_step, is_lightning_module


def check_numbers(*, steps: int, accumulate: int, clip: float | None, ddp_bucket_mb: float | None) -> None:
    """Refuse numbers that are out of range.

    Raises:
        ValueError: One is.
    """
    for name, number in (("steps", steps), ("accumulate", accumulate)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} is {number!r}: it has to be a whole number of at least 1.")
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ValueError(f"clip is {clip!r}: it has to be the norm to clip gradients to, a number above 0, or None.")
    if ddp_bucket_mb is not None and not ddp_bucket_mb > 0:
        raise ValueError(f"ddp_bucket_mb is {ddp_bucket_mb!r}: it has to be above 0 MiB, such as torch's default, 25.")


def check_model(model: object, step: object, *, stage: str, device: str) -> None:
    """Refuse what has no step, and stages and devices that there are not.

    Raises:
        TypeError: The model is no module, or the step no function.
        ValueError: The stage or the device is unknown, or the model lacks the stage's step.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: pass a LightningModule, or another torch.nn.Module.")
    if stage not in STEP_NAMES:
        raise ValueError(f"Unknown stage {stage!r}. Accepted are {', '.join(map(repr, STEP_NAMES))}.")
    if device not in {"cuda", "cpu"}:
        raise ValueError(f"Unknown device {device!r}. Accepted are 'cuda' and 'cpu': whose operators are estimated.")
    if step is not None:
        if not callable(step):
            raise TypeError(f"step is {step!r}: pass a function, step=lambda model, batch: loss.")
        return
    inner = unwrapped(model)
    if not is_lightning_module(inner):
        raise ValueError(
            f"{type(inner).__name__} is no LightningModule, so estimate_memory does not know its step. Pass "
            "step=lambda model, batch: loss, such as step=lambda model, batch: mse_loss(model(batch[0]), batch[1])."
        )
    name = STEP_NAMES[stage]
    if not has_step(inner, name):
        raise ValueError(f"{type(inner).__name__} has no {name}, which stage={stage!r} runs. Define it, or pass step.")


def check_optimizer(optimizer: object) -> None:
    """Refuse what cannot be an optimizer.

    Raises:
        TypeError: It is neither one nor makes one.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise TypeError(
            f"optimizer is {optimizer!r}: pass an optimizer, its class such as torch.optim.AdamW, or a function of the "
            "parameters such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )


def check_training(model: nn.Module, step: object, optimizer: object, *, accumulate: int, clip: float | None) -> None:
    """Refuse what cannot be trained as it was asked for.

    Raises:
        ValueError: There is nothing to train, or not with this optimizer, or not in this way.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no parameters to train. If it makes them in configure_model or setup, call "
            'that first; under torch.device("meta") they take no memory.'
        )
    if isinstance(optimizer, Optimizer) and not any(
        id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise ValueError(
            f"The {type(optimizer).__name__} that was passed holds none of the parameters of {type(model).__name__}, "
            "so it would train something else. Make it from model.parameters(), or pass its class."
        )
    if step is None and not getattr(model, "automatic_optimization", True) and (accumulate > 1 or clip is not None):
        raise ValueError(
            f"{type(model).__name__} optimizes manually, where a Trainer neither accumulates nor clips: leave "
            "accumulate and clip out. What its training_step does of either is part of the estimate."
        )
