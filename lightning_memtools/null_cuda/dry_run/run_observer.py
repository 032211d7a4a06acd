"""Observes a run: the peaks of its stages, and the owners of memory blocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memtools._torch import has_compiled
from lightning_memtools.memory.history_owners import OwnerNotes
from lightning_memtools.memory.living_objects import instances_of, outermost
from lightning_memtools.memory.peaks import Phase, Stage, StageWatch, peak_counter
from lightning_memtools.memory.readers import accelerator_reader
from lightning_memtools.memory.step_snapshot import ModuleLabels
from lightning_memtools.memory.virtual.patches import Patches
from lightning_memtools.null_cuda.dry_run.api import DryRunSpec
from lightning_memtools.null_cuda.dry_run.result import DryRunStage
from lightning_memtools.null_cuda.dry_run.script_files import ScriptFiles

WHOLE_SCRIPT = "script"


class RunObserver:
    """Records, in a dry run, the peak memory of each stage and the owners of memory blocks. Works without Lightning.

    Attributes:
        notes: Remarks for the result of the dry run.
        stages: The peaks of each stage that a Trainer has run.
        owners: Records which model, optimizer or batch owned each memory block, and when.
        files: Redirects files, so that the script does not overwrite existing ones.
        reporting: The OOMReport callbacks of all Trainers.
        n_steps: The number of optimizer steps so far, in Trainers and outside.
    """

    def __init__(self, spec: DryRunSpec) -> None:
        self.spec = spec
        self.notes: list[str] = []
        self.stages: dict[str, DryRunStage] = {}
        self.owners = OwnerNotes()
        self.files = ScriptFiles(Path(spec.directory), self.note)
        self.reporting: list[Any] = []
        self.n_steps = 0
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reader = accelerator_reader(torch.device("cuda", spec.rank))
        assert reader is not None
        self._counter = peak_counter(reader)
        self._script = self._counter.open()
        self._script.resume()
        self._watch: StageWatch | None = None
        self._labels: list[ModuleLabels] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._let_script_reset_peaks()
        register_optimizer_step_post_hook(self._end_step)

    def note(self, text: str) -> None:
        """Add a remark to the notes, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def _let_script_reset_peaks(self) -> None:
        """Patch `reset_peak_memory_stats` so that the peaks are read before the script resets them."""

        def make(reset: Callable[..., None]) -> Callable[..., None]:
            def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> None:
                self._counter.fold(reset=False)
                reset(*args, **kwargs)

            return reset_peak_memory_stats

        patches = Patches()
        for module in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
            patches.replace(module, "reset_peak_memory_stats", make)

    # --- a Trainer

    def begin(self) -> None:
        """Begin to observe a Trainer's fit, validate, test or predict call."""
        self.end()  # of a call before, which may have ended with an exception
        self._watch = StageWatch(self._counter)

    def enter(self, stage: Stage) -> None:
        """Begin to measure the memory of a stage, such as "val"."""
        if self._watch is not None:
            self._watch.enter(stage)
            self.owners.enter(stage)

    def leave(self, stage: Stage) -> None:
        """Stop measuring the memory of a stage."""
        if self._watch is not None and self._watch.running == stage:
            self._watch.point(stage)
            self._watch.leave(stage)
            self.owners.enter(self._watch.running)

    def phase(self, phase: Phase | None) -> None:
        """Label allocations from now on with a phase of the training step, such as "forward"; None for no phase."""
        for labels in self._labels:
            labels.enter_phase(phase or "")

    def see(self, model: nn.Module, optimizers: Sequence[Any], batch: Any) -> None:
        """Record which memory blocks the model, the optimizers and the batch own now."""
        running = self._watch.running if self._watch is not None else WHOLE_SCRIPT
        self.owners.note(running, model, optimizers, batch)

    def label_modules(self, model: nn.Module) -> None:
        """Label allocations with the module that makes them, until `end` is called."""
        self._labels.append(ModuleLabels(model))

    def end(self) -> None:
        """Stop observing a Trainer run (such as `fit`), and keep the peaks of its stages. Idempotent."""
        while self._labels:
            self._labels.pop().remove()
        if self._watch is None:
            return
        self._watch.close()
        for stage, peak in self._watch.peaks.items():
            known = self.stages.get(stage)
            if peak.allocated is not None and (known is None or known.peak_allocated_bytes < peak.allocated):
                self.stages[stage] = DryRunStage(
                    stage=stage, peak_allocated_bytes=peak.allocated, peak_reserved_bytes=peak.reserved or 0
                )
        self._watch = None
        self.owners.enter(None)

    def whole_script(self) -> DryRunStage:
        """Return a DryRunStage named "script" with the peak memory since the script began."""
        self._counter.fold()
        allocated, reserved = self._script.allocated or 0, self._script.reserved or 0
        return DryRunStage(stage=WHOLE_SCRIPT, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)

    # --- optimizers, in a Trainer and outside

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step. Outside of a Trainer, also note which tensors own memory blocks."""
        self.n_steps += 1
        if self._watch is not None:
            return
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
            for model in outermost(instances_of(nn.Module)):
                if model not in self._models and any(id(weight) in trained for weight in model.parameters()):
                    self._models.add(model)
                    if not has_compiled():  # hooks would change what is compiled
                        self.label_modules(model)
        seen = list(self._models)
        self.see(seen[0] if len(seen) == 1 else nn.ModuleList(seen), list(self._optimizers), None)
