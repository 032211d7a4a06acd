"""Runs a step again from its initial state and compares the results. Afterwards everything is as before."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from hashlib import sha256
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_memtools._torch import is_in_memory, write_count_or_none
from lightning_memtools.memory.nested_tensors import named_tensors, plain_name, tensors_in_attributes
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.nonfinite.finite_checks import find_bad, floats_of
from lightning_memtools.nonfinite.step_guard import MicroBatch, undivided_loss
from lightning_memtools.reporting.phrases import first_of
from lightning_memtools.reporting.ranks import refused_collectives
from lightning_memtools.simulation.replay_loop import ReplayLoop
from lightning_memtools.simulation.step_runner import Recipe, StepListener, StepRunner
from lightning_memtools.simulation.step_trainer import precision_plugin
from lightning_memtools.state.state_snapshot import StateSnapshot

SIMPLE = (bool, int, float, str, type(None))
# The attributes that a step may ask its Trainer for, and that plain values can answer.
TRAINER_FACTS = (
    "current_epoch", "global_step", "global_rank", "local_rank", "node_rank", "world_size", "num_devices", "num_nodes",
    "max_epochs", "max_steps", "min_epochs", "min_steps", "num_training_batches", "estimated_stepping_batches",
    "accumulate_grad_batches", "gradient_clip_val", "is_global_zero", "is_last_batch", "fast_dev_run",
)  # fmt: skip


# Those that can be made from their names: not a plugin of the user's, nor one of another library.
PRECISIONS = ("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConditions:
    """The settings under which a training step ran, such as its precision, as plain values."""

    divided_by: int = 1  # the number that the loss is divided by for an accumulation
    scale: float | None = None  # the number that the gradient scaler multiplies the loss by; None without one
    precision: str = "32-true"  # Lightning's name for it, such as ``"bf16-mixed"``
    trainer: Mapping[str, Any] = field(default_factory=dict)  # attributes of the Trainer: name to plain value

    @classmethod
    def now(cls, trainer: Any) -> StepConditions:
        """Return the current settings of the Trainer and of its gradient scaler."""
        facts, scaler = {}, getattr(trainer.precision_plugin, "scaler", None)
        for name in TRAINER_FACTS:
            with contextlib.suppress(Exception):  # such as an estimate of steps without a data loader
                facts[name] = getattr(trainer, name)
        plain = {name: value for name, value in facts.items() if type(value) in SIMPLE}
        return cls(
            divided_by=trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1,
            scale=None if scaler is None else scaler.get_scale(),
            precision=str(trainer.precision),
            trainer=plain,
        )


class CannotRerunError(Exception):
    """Raised when a step cannot be run again; the message says why."""


@dataclass(slots=True)
class StepOutcome:
    """The losses and gradients that a rerun of a step gave."""

    # the loss of each micro-batch (in manual optimization: of each backward pass), as 0-dim tensors
    losses: list[Tensor]
    gradients: dict[str, Tensor]  # name of the parameter to its gradient, unscaled

    @property
    def is_finite(self) -> bool:
        """True if neither the losses nor the gradients hold NaN or Inf."""
        return all(math.isfinite(float(loss)) for loss in self.losses) and not find_bad(self.gradients.items())


@dataclass(eq=False)
class StepRerun:
    """Runs a step any number of times from the same state. As a context manager, it restores everything on exit.

    The step runs in Lightning's own loop, with a Trainer that logs nothing and makes no update. What the step prints
    and warns is not shown.

    Attributes:
        written: The names of the parameters, attribute tensors and batch tensors that the step overwrites. The
            original step overwrote them, too, so a rerun cannot start from the original values.
    """

    module: Module  # the LightningModule, with the weights and buffers that the step began with
    micro: Sequence[MicroBatch]
    conditions: StepConditions
    _: KW_ONLY
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Any] = ()  # Lightning's configurations; those of the Trainer if there is one
    parameters: Sequence[Tensor] = ()  # those whose gradients belong to the step; all when left out
    trainer: Any = None

    def __post_init__(self) -> None:
        self._device = device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        if device.type != "cpu":
            torch.accelerator.synchronize()  # batches may still be on their way to the host
        for micro in self.micro:
            if micro.was_moved:  # as Lightning moves it: the sizes of packed sequences stay on the host
                micro.batch = self.module.transfer_batch_to_device(micro.batch, device, 0)  # type: ignore[operator]
        self.written: tuple[str, ...] = ()
        self._inputs: list[tuple[str, Tensor]] = []  # the tensors of batches that the step itself may have written to
        for micro in self.micro:
            if not micro.is_copied:
                self._inputs += named_tensors(micro.batch, f"batch {micro.index}")
        # They count what the step has returned, and nothing is computed from that.
        self._metrics = tuple(
            f"{plain_name(name)}." for name, part in self.module.named_modules() if isinstance(part, Metric)
        )
        self._named = list(self.module.named_parameters())  # the step may replace some
        self._wanted = {id(p) for p in self.parameters}
        self._snapshot: StateSnapshot
        self._losses: list[Tensor] = []
        self._n_updates, self._now = 0, self.micro[0]

    def __enter__(self) -> Self:
        skip = () if self.trainer is None else (type(self.trainer),)
        roots = [self.module, *self.optimizers, [each.batch for each in self.micro]]
        self._snapshot = StateSnapshot(roots, skip=skip, host=host_memory)
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        del self._snapshot
        self._losses = []

    def reset(self) -> None:
        """Restore everything to the state that it had when the context manager was entered."""
        self._snapshot.restore()

    def run(
        self, *, within: AbstractContextManager[Any] | None = None, batches: Mapping[int, Any] | None = None
    ) -> StepOutcome:
        """Run the step from its start, and return its losses and gradients.

        Args:
            within: A context manager in which forward and backward run, such as a dispatch mode.
            batches: Replacements for some of the step's batches, as a dict from a batch's position to its replacement.

        Raises:
            CannotRerunError: The step raised an error or used a collective.
        """
        self.reset()
        self._losses = []
        for parameter in self.module.parameters():
            parameter.grad = None
        before, trainer = self._writes(), self.trainer
        made = None if trainer else precision_plugin(self.conditions.precision, self._device.type)
        try:
            with _quiet(), torch.enable_grad():
                loop = ReplayLoop(
                    self.module,
                    original=trainer,
                    facts=self.conditions.trainer,
                    optimizers=self.optimizers,
                    schedulers=self.schedulers,
                    accumulate=self.conditions.divided_by,
                    scale=self.conditions.scale,
                    forward=(made or trainer.precision_plugin).train_step_context,
                    on_loss=self._note_loss,
                    before_update=self._before_update,
                )
            text = "the step talks to the other ranks ({}), which do not run it again"
            refused = refused_collectives(lambda collective: CannotRerunError(text.format(collective)))
            with _quiet(), torch.enable_grad(), refused, within or nullcontext():
                for position, micro in enumerate(self.micro):
                    if micro.random is not None:
                        micro.random.restore()
                    self._now, self._n_updates = micro, 0
                    batch = (batches or {}).get(position, micro.batch)
                    if loop.run(batch, micro.index, is_last=micro is self.micro[-1]):
                        break
        except CannotRerunError:
            raise
        except Exception as error:
            raise CannotRerunError(f"the step could not be run again: {type(error).__name__}: {error}") from error
        self.written = tuple(name for name, state in self._writes().items() if before.get(name, state) != state)
        gradients = {
            plain_name(name): p.grad
            for name, p in self._named
            if p.grad is not None and (not self._wanted or id(p) in self._wanted)
        }
        return StepOutcome(self._losses, gradients)

    def _note_loss(self, loss: Tensor) -> None:
        scale = self.conditions.scale
        factor = None if scale is None else torch.full((), scale, dtype=torch.float32, device=loss.device)
        self._losses.append(undivided_loss(loss, self.conditions.divided_by, factor))

    def _before_update(self) -> bool:
        """Count an optimizer update. Return True if it is the update of the bad step, which ends the rerun."""
        micro = self._now
        self._n_updates += 1
        if self._n_updates == micro.updates_before:
            self._losses.clear()
        return self._n_updates > micro.updates_before and micro is self.micro[-1]

    def _writes(self) -> dict[str, Any]:
        """Return a marker of each parameter, attribute and batch tensor. Writing to a tensor changes its marker."""
        tensors = [*self.module.named_parameters(), *tensors_in_attributes(self.module), *self._inputs]
        return {
            key: (id(each), write_count_or_none(each), each.data_ptr() if is_in_memory(each) else 0)
            for name, each in tensors
            if not (key := plain_name(name)).startswith(self._metrics)
        }


@contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def configured(module: Module, conditions: StepConditions) -> tuple[list[Optimizer], Sequence[Any]]:
    """Call configure_optimizers. Return the optimizers, and Lightning's configurations of the schedulers."""
    with _quiet(), torch.enable_grad():
        runner = StepRunner(module, Recipe(), StepListener(), replay=conditions.trainer)
    runner.module.trainer = None
    for part in module.modules():
        vars(part).pop("print", None)
    return runner.optimizers, runner.trainer.strategy.lr_scheduler_configs


def digests_of(gradients: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each gradient's dtype and bits, by name. Bits that cannot be read are left out."""
    digests = {}
    for name, gradient in gradients.items():
        digest, floats = sha256(str(gradient.dtype).encode()), floats_of(gradient)
        if floats is not None:
            bits = floats.detach().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(bits.numpy().tobytes())
        digests[name] = digest.hexdigest()
    return digests


def mismatches(losses: Sequence[float], digests: Mapping[str, str], again: StepOutcome) -> list[str]:
    """Return the differences between a rerun and the original step, as sentences; [] if every bit is equal."""
    now, gradients = [float(loss) for loss in again.losses], digests_of(again.gradients)
    differences = []
    if list(map(repr, now)) != list(map(repr, losses)):  # the text of a float tells every bit
        differences.append(f"It gave the losses {now}, the step {list(losses)}.")
    different = [name for name in {*digests, *gradients} if name in digests and digests[name] != gradients.get(name)]
    if different:
        differences.append(f"Of {len(digests)} gradients {len(different)} differ: {first_of(sorted(different))}.")
    return differences
