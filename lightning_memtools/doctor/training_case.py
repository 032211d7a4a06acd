"""The objects that the doctor examines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools.null_cuda.launch import computes_nothing

if TYPE_CHECKING:
    from lightning_memtools.doctor.step_trial import TrialFacts

Forward = Callable[[nn.Module, Any], Any]
"""Runs the forward pass of a training batch on the model and returns the loss, or None in manual optimization."""


@dataclass(slots=True, kw_only=True)
class TrainingCase:
    """A training run's own objects and settings; nothing here is changed by an examination.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
        train_loader: The loader of the training data.
        evaluation_loaders: The loaders that are alive at the same time, for validation.
        n_train_batches: The number of batches in an epoch; None where it is not known.
        forward: Runs a training batch's forward pass; it is called on fake tensors or copies only.
        device: Where the model is trained.
        precision: As Lightning names it.
        clip: The norm or value that gradients are clipped to; None for no clipping.
        world_size: The number of processes that train together.
        local_ranks: The number of those on this machine.
        sharded: True where parameters and gradients are spread over ranks, so that one rank sees only parts.
        checkpoint: The checkpoint that is to be loaded; None for none.
        seeded: True where the random streams are known to have been seeded.
        steps: The number of training steps that are watched.
        others: Further objects of the user that may hold tensors: callbacks, a data module, the step function.
        stop_at: An object that searches for holders do not enter.
        trial: The result of the trial of the first batch, while its checks are made.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    train_loader: Any = None
    evaluation_loaders: Sequence[Any] = ()
    n_train_batches: int | None = None
    forward: Forward | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "32-true"
    clip: float | None = None
    world_size: int = 1
    local_ranks: int = 1
    sharded: bool = False
    checkpoint: str | None = None
    seeded: bool = False
    steps: int = 20
    others: Sequence[Any] = ()
    stop_at: Any = None
    trial: TrialFacts | None = None

    @property
    def computes_nothing(self) -> bool:
        """True in a dry run: checks of values and of times have nothing to judge."""
        return computes_nothing(self.device)

    def home(self) -> torch.device | None:
        """Return the device that holds most of the model's parameters; None for a model without any."""
        sizes: Counter[torch.device] = Counter()
        for parameter in self.model.parameters():
            sizes[parameter.device] += parameter.numel()
        return sizes.most_common(1)[0][0] if sizes else None

    def strays(self) -> dict[str, tuple[nn.Module, str]]:
        """Return the modules' plain tensor attributes on another kind of device than the parameters, by full name.

        Each comes as its module and the attribute's name there.
        """
        home = self.home()
        return {
            f"{name}.{key}" if name else key: (module, key)
            for name, module in self.model.named_modules()
            for key, value in vars(module).items()
            # A tensor without dimensions may stay on the host: every device takes it.
            if isinstance(value, Tensor) and home is not None and value.device.type != home.type and value.dim()
        }

    def parameter_names(self) -> dict[int, str]:
        """Return the names of the model's parameters by identity."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def optimized(self) -> set[int]:
        """Return the identities of all parameters that any optimizer holds."""
        return {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
