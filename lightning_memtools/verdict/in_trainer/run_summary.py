"""RunSummary, the callback with which `memtools run` adds callbacks to a Trainer and gives a verdict at the end."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_memtools._lightning import callbacks_of, prepared_loaders, training_step
from lightning_memtools.callbacks.guarded import WatchingCallback
from lightning_memtools.callbacks.training_doctor import TrainingDoctor
from lightning_memtools.doctor.findings import DoctorReport
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.reporting.files import NO_RUN, NotWritten, keep_files_in, report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import hear_scalars, log_text
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.ranks import PATIENCE_S, RankPosts
from lightning_memtools.verdict.at_exit import tell_at_exit
from lightning_memtools.verdict.in_trainer.asked_callbacks import asked_callbacks
from lightning_memtools.verdict.judging import judge
from lightning_memtools.verdict.phase_times import watch_fetching
from lightning_memtools.verdict.run_facts import RankFacts, RunFacts, summary_of
from lightning_memtools.verdict.run_meter import RunMeter
from lightning_memtools.verdict.waits import watch_next_step

_WATCHED_BATCH = 2  # the first ones choose kernels


class RunSummary(WatchingCallback):
    """Adds `callbacks` to its Trainer. At the end of each fit, writes a verdict (what limits speed) and `summary.json`.

    Lightning creates it, through an entry point of this package. Callbacks that the Trainer already has are not added.
    """

    page = "run"
    takes_part_in_trials = False
    parts_of_a_run = ("_meter", "_undo", "_posts_of_ranks")

    def __init__(self, callbacks: tuple[Callback, ...] = ()) -> None:
        self.callbacks = callbacks
        self._meter: RunMeter | None = None
        self._undo: contextlib.ExitStack | None = None
        self._heard: Counter[str] = Counter()
        self._waits: list[str] = []
        self._directory: Path | NotWritten = NO_RUN
        self._posts_of_ranks: RankPosts | None = None

    @classmethod
    def asked_for(cls, text: str) -> RunSummary:
        """Create the callback from `text`, the value of the variable MEMTOOLS: JSON options, or "1" for defaults."""
        return cls(tuple(asked_callbacks(**json.loads(text) if text.startswith("{") else {})))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add `self.callbacks` to the Trainer, after this callback, so that their setup runs, too."""
        self.stop_watching()
        present = callbacks_of(trainer)
        is_ours = type(trainer).__module__.startswith("lightning_memtools.")
        if is_ours or next(each for each in present if isinstance(each, RunSummary)) is not self:
            return  # a list of callbacks that several Trainers share has that of the first Trainer, too
        if not trainer.loggers and not getattr(trainer, "fast_dev_run", False):
            folder = _free(Path("memtools", f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}").absolute())
            keep_files_in(trainer, trainer.strategy.broadcast(folder))
        missing = [each for each in self.callbacks if not any(isinstance(other, type(each)) for other in present)]
        place = present.index(self) + 1
        present[place:place] = missing  # the loop that has called this hook goes on with them
        self._directory = report_directory(trainer)
        if stage == "fit":
            self._meter = RunMeter(trainer.strategy.root_device, trainer.global_rank)
            self._posts_of_ranks = RankPosts("RunSummary") if trainer.world_size > 1 else None
            self._undo, self._heard, self._waits = contextlib.ExitStack(), Counter(), []
            self._undo.callback(hear_scalars(trainer, self._hear))

    def _hear(self, scalars: Mapping[str, float]) -> None:
        self._heard.update({"memory/leaks": int(scalars.get("memory/leaks", 0))})
        for tag in ("nonfinite/skipped", "spikes/found"):  # each the number so far
            self._heard[tag] = int(scalars.get(tag, self._heard[tag]))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring the time and memory of training."""
        if self._meter is not None and self._undo is not None:
            self._meter.enter("train")
            profiler = trainer.profiler  # type: ignore[attr-defined]  # a connector sets it
            self._undo.callback(watch_fetching(profiler, self._meter.times.switch))
            after = "rest" if pl_module.automatic_optimization else "forward"
            for optimizer in trainer.optimizers:  # the hook of other callbacks at a batch's end may come before ours
                self._undo.callback(optimizer.register_step_post_hook(lambda *_: self._switch(after)).remove)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start timing the forward phase. In one early step, also find the lines of code that wait for the GPU."""
        if self._meter is not None and self._undo is not None:
            if trainer.strategy.root_device.type == "cuda" and self._meter.n_batches == _WATCHED_BATCH:
                self._waits, stop = watch_next_step(pl_module)
                self._undo.callback(stop)
            self._meter.times.switch("forward")

    def on_before_backward(self, *args: Any) -> None:
        """Start timing the backward phase."""
        self._switch("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward phase. With manual optimization, time then counts as forward until the optimizer steps."""
        if self._meter is not None:
            self._meter.times.look_at_lead()
            self._switch("rest" if pl_module.automatic_optimization else "forward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Start timing the optimizer phase."""
        self._switch("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        """Stop measuring this training batch."""
        if self._meter is not None:
            self._meter.end_batch(pl_module, trainer.optimizers, batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring a validation run within training."""
        if self._meter is not None and not trainer.sanity_checking:
            self._meter.enter("val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring a validation run within training."""
        if self._meter is not None and not trainer.sanity_checking:
            self._meter.leave("val")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring training."""
        if self._meter is not None:
            self._meter.leave("train")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the verdict on the fit."""
        self._conclude(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the verdict on the failed fit, without waiting for other ranks, which may have failed, too."""
        self._conclude(trainer, exception)

    def stop_watching(self) -> None:
        """Stop measuring. Idempotent."""
        if self._undo is not None:
            self._undo.close()
        self._meter = self._undo = None

    def _switch(self, phase: str) -> None:
        if self._meter is not None:
            self._meter.times.switch(phase)

    def _conclude(self, trainer: Trainer, error: BaseException | None) -> None:
        """Stop measuring, gather the measurements of all ranks, and write the verdict on rank 0. Idempotent."""
        if self._meter is None:
            return
        reader, mine = self._meter.reader, self._meter.close()
        self.stop_watching()
        posts, ranks = self._posts_of_ranks, [asdict(mine)]
        if posts is not None:
            ranks = posts.finish(patience_s=PATIENCE_S if error is None else 0.0, latest=asdict(mine))
        if not trainer.is_global_zero:
            return
        facts = RunFacts(
            ranks=[RankFacts(**rank) for rank in ranks if rank is not None],
            device=str(trainer.strategy.root_device) if reader is None else reader.name,
            error="" if error is None else in_one_line(error),
            num_workers=next((getattr(each, "num_workers", None) for each in prepared_loaders(trainer.fit_loop)), None),
            skipped_steps=self._heard["nonfinite/skipped"],
            loss_spikes=self._heard["spikes/found"],
            leaks=self._heard["memory/leaks"],
            waits=tuple(dict.fromkeys(self._waits)),
            **_said_by(callbacks_of(trainer)),
        )
        verdict = judge(facts)
        name = "summary.json"
        if isinstance(self._directory, Path):
            name = _free(self._directory / name).name
        text = json.dumps(summary_of(facts, asdict(verdict)), indent=1, ensure_ascii=False)
        written = write_report_or_warn(self._directory, name, text)
        lines = [*verdict.lines, *([f"Summary: {short_path(str(written))}"] if written is not None else [])]
        log_text(trainer, "memtools/verdict", "\n".join(f"- {line}" for line in lines), training_step(trainer))
        tell_at_exit(verdict.limit, mine.training_s, lines)


def _said_by(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the findings and remarks of the Trainer's callbacks, as keyword arguments for RunFacts."""
    report = next((each.report for each in callbacks if isinstance(each, TrainingDoctor)), DoctorReport())
    remarks = [each.memory_remark for each in callbacks if isinstance(each, Neighbour)]
    return {
        "findings": [f"{each.check}, {each.place}: {each.evidence} Fix: {each.fix}" for each in report.serious],
        "checks": len(report.checks) if report.steps else 0,
        "remarks": [remark for remark in remarks if remark],
    }


def _free(path: Path) -> Path:
    """Return a path where no file is yet: `path`, or else `path` with _2, _3, ... after its stem."""
    others = (path.with_stem(f"{path.stem}_{n}") for n in count(2))
    return next(each for each in chain([path], others) if not each.exists())
