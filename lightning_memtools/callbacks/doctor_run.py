"""One fit under TrainingDoctor: its examination, the findings of all ranks, and where they are reported."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_memtools._lightning import is_compiled_by_lightning, training_step
from lightning_memtools.doctor.examination import Examination
from lightning_memtools.doctor.findings import DoctorReport, Finding, TrainingMistakeError
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.phrases import counted
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.reporting.tables import console_table
from lightning_memtools.simulation.step_runner import forward_of

_LEAKS = {"memory_growth", "retained_graphs"}


class DoctorRun:
    """Examines one fit and reports what it finds. Make it on every rank.

    Args:
        trainer: The Trainer.
        module: The module that it fits.
        names: The names of the checks.
        steps: The number of training batches, and of evaluation batches, to watch.
        raises: End training at a serious finding, in place of a warning.

    Attributes:
        report: The findings so far.
        examination: Takes the events of training; None once nothing is watched any more.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, names: Sequence[str], *, steps: int, raises: bool
    ) -> None:
        self.report = DoctorReport(checks=tuple(names))
        case = TrainingCase(
            model=module,
            steps=steps,
            others=[*trainer.callbacks, trainer.datamodule],  # type: ignore[attr-defined]
            stop_at=trainer,
            precision=str(trainer.precision),
            clip=trainer.gradient_clip_val or None,  # Lightning takes 0 for no clipping
            world_size=trainer.world_size,
            local_ranks=min(trainer.num_devices, trainer.world_size),
            sharded=why_unsupported("TrainingDoctor", type(trainer.strategy)) is not None,
            seeded="PL_GLOBAL_SEED" in os.environ,
        )
        self.examination: Examination | None = Examination(case, names)
        self._raises = raises
        self._ranks = RankGather()  # through the store: a rank that failed is not waited for
        self._directory = report_directory(trainer)
        self._told: set[Finding] = set()
        self._n_published = 0
        self._load_hook: RemovableHandle | None = None
        if module.strict_loading and not case.sharded:
            # The path given to `fit` is not known here, but what is loaded from it comes by this hook.
            self._load_hook = module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                partial(self._compare_keys, trainer)
            )

    def __getstate__(self) -> dict[str, Any]:
        # For a module that is pickled before training, with the hook above: a copy compares nothing.
        return {"examination": None, "_load_hook": None}

    def begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Examine the model and its settings before the first step."""
        self._remove_load_hook()
        if self.examination is None:
            return
        case = self.examination.case
        case.optimizers = trainer.optimizers
        case.device = trainer.strategy.root_device
        case.train_loader = trainer.train_dataloader
        validation = trainer.val_dataloaders
        case.evaluation_loaders = validation if isinstance(validation, (list, tuple)) else [validation]
        n_batches = trainer.num_training_batches
        case.n_train_batches = int(n_batches) if n_batches != float("inf") else None
        # One rank cannot trace a step that needs the others, and a compiled one cannot be traced.
        if not case.sharded and not is_compiled_by_lightning(module):
            case.forward = forward_of(module, trainer, optimizers=trainer.optimizers)
        self.examination.before_training()

    def tell(self, trainer: Trainer) -> bool:
        """Collect the findings of all ranks and report the new ones. Called at the same points on every rank.

        Returns:
            True if every rank has watched an evaluation.

        Raises:
            TrainingMistakeError: There is a new serious finding, and `raises` is set.
        """
        if self.examination is None:
            return True
        mine = self.examination.report()
        every = self._ranks.objects((mine.findings, self.examination.n_evaluated))
        found = [finding for findings, _ in every for finding in findings]
        self.report = DoctorReport.of(found, mine.checks, mine.steps)
        new = [finding for finding in self.report.serious if finding not in self._told]
        self._told.update(new)
        if self.examination.is_concluded or new:
            self._publish(trainer, new)
        if new and self._raises:
            raise TrainingMistakeError(self.report)
        return all(n_evaluated for _, n_evaluated in every)

    def end_with(self, trainer: Trainer, error: BaseException) -> None:
        """Report what this rank found until training failed, without waiting for other ranks."""
        if self.examination is not None and not isinstance(error, TrainingMistakeError):
            self.report = self.examination.report()
            self._publish(trainer, [one for one in self.report.serious if one not in self._told])
        self.stop()

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._remove_load_hook()
        self.examination = None
        self._ranks.close()

    def _compare_keys(
        self, trainer: Trainer, _module: LightningModule, state: Mapping[str, Tensor], *_rest: Any
    ) -> None:
        self._remove_load_hook()  # the comparison loads too, into fake tensors
        if self.examination is not None:
            self.examination.loading(state)
            self.tell(trainer)

    def _remove_load_hook(self) -> None:
        if self._load_hook is not None:
            self._load_hook.remove()
        self._load_hook = None

    def _publish(self, trainer: Trainer, new: Sequence[Finding]) -> None:
        if not trainer.is_global_zero:
            return
        text = self.report.markdown()
        write_report_or_warn(self._directory, "doctor.md", text)
        write_report_or_warn(self._directory, "doctor.json", self.report.as_json())
        self._n_published = max(self._n_published + 1, training_step(trainer))
        log_text(trainer, "memtools/doctor", text, self._n_published)
        n_leaks = sum(finding.check in _LEAKS for finding in new)
        if n_leaks:
            log_scalars(trainer, {"memory/leaks": float(n_leaks)}, training_step(trainer))
        if new and not self._raises:
            names = ", ".join(dict.fromkeys(finding.check for finding in new))
            print_on_console(console_table(self.report.table(new)))
            number = counted(len(new), "serious mistake", "serious mistakes")
            warnings.warn(f"TrainingDoctor found {number}: {names}. See the table.", stacklevel=2)
