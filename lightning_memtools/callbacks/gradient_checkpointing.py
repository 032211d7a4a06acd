"""GradientCheckpointing: less memory for activations, by computing some of them twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import EitherCallback
from lightning_memtools.callbacks.checkpointing_run import CheckpointingRun
from lightning_memtools.checkpointing.checkpoint_options import BnDropout, CheckpointOptions, LossHead
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.reporting.neighbours import Neighbour


class GradientCheckpointing(EitherCallback, Neighbour):
    """Trains with less memory: recomputes parts of the model in backward instead of keeping their activations.

    On the first training batch it traces a step on fake tensors, chooses what to recompute, predicts the peak, and
    applies the plan if that lowers the peak. Gradients, weights, running statistics and random numbers are bit for bit
    those of the plain run, and within rounding where the loss of a language model is computed in chunks. Names, types,
    state_dict and checkpoints stay as they are; copies and pickles are of the plain model. Everything is undone when
    fit ends or fails.

    | It writes | content |
    | --- | --- |
    | `memtools/checkpoint_plan` (text, to loggers that take it) | what is recomputed, what is left out, bytes, peaks |
    | `<log_dir>/memtools/checkpoint_plan.md` | the same |
    | console, rank 0 | the same |

    After the third step the measured peak is added to the predicted one. In the first step every recomputed range runs
    two more times, to prove that it repeats itself bit for bit; a layer that does not is left out of the plan.

    Forward hooks on layers within recomputed ranges fire again in backward. Under FSDP 2 (ModelParallelStrategy) every
    range lies within one sharded module, and a budget has to be a share. Compiled models, and models under FSDP 1 and
    DeepSpeed, are left unchanged, with a warning that says why.

    Args:
        segments: Cut each Sequential into this many equal chunks, all but the last recomputed, as
            `torch.utils.checkpoint.checkpoint_sequential` does. "auto" takes the plan with the lowest product of
            activation memory and operations, with at most a third more operations than without.
        memory_budget: A float is the share of the plain step's activation memory that the plan may have; a size such
            as "8GiB" is the highest allocated peak. The plan with the least recomputation that fits is taken.
        bn_dropout: What may happen to BatchNorm and Dropout layers of a Sequential: with "skip" they never run twice;
            with "recompute" they may, and the results are the same bit for bit; with "avoid" nothing that contains
            one runs twice; "auto" is "skip", or "recompute" where "skip" leaves nothing worth doing.
        include: Patterns of module names to take instead of choosing among all modules, such as ["blocks.*"]. A match
            that is no Sequential becomes one recomputed segment.
        exclude: Patterns of modules that are never recomputed.
        loss_head: With "auto", a linear layer and the cross-entropy of its output are computed in chunks of rows where
            that lowers the peak and nothing else takes the output; with "keep", all at once. The loss and its gradients
            are the same within rounding, which is checked in the first step.
        offload: Keep the inputs of what is recomputed in pinned host memory between forward and backward. Only on CUDA.

    Raises:
        ValueError: An argument is not among those accepted. From fit: a pattern matches no module, or no plan fits
            the budget.
    """

    parts_of_a_run = ("_run",)  # what is applied stays with the original: it is undone once

    def __init__(
        self,
        *,
        segments: int | Literal["auto"] = "auto",
        memory_budget: float | str | None = None,
        bn_dropout: BnDropout = "skip",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        loss_head: LossHead = "auto",
        offload: bool = False,
    ) -> None:
        self._options = CheckpointOptions.parse(
            segments, memory_budget, bn_dropout, include, exclude, loss_head, offload=offload
        )
        self.segments = segments
        self.memory_budget = memory_budget
        self.bn_dropout = bn_dropout
        self.include = include
        self.exclude = exclude
        self.loss_head = loss_head
        self.offload = offload
        self.plan: CheckpointPlan | None = None
        self._run: CheckpointingRun | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo what an earlier fit may have left, and start again."""
        self._undo()
        if stage == "fit":
            self._run = CheckpointingRun(trainer, self._options)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan on the first batch that gives a loss; measure the peak of a later step."""
        if self._run is not None:
            self._run.is_in_trial = self.is_in_trial
            self._run.begin_step(pl_module, batch, batch_idx)
            self.plan = self._run.plan or self.plan

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the measured peak beside the predicted one."""
        if self._run is not None:
            # For a step that gives no loss, which Lightning skips, it has no outputs.
            self._run.end_step(gave_loss=bool(outputs) or not pl_module.automatic_optimization)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo the plan."""
        self._undo()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo the plan."""
        self._undo()

    def _undo(self) -> None:
        if self._run is not None:
            self._run.undo()
        self._run = None
