"""Measures a fit on one rank: the time of each phase, and the memory peaks of each stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.nested_tensors import batch_size_in
from lightning_memtools.memory.owned import Owned, on_device_of, owned_by
from lightning_memtools.memory.peaks import StageWatch, peak_counter
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.verdict.phase_times import PhaseTimes
from lightning_memtools.verdict.run_facts import RankFacts


class RunMeter:
    """Measures the time and memory that a fit takes on one rank.

    Args:
        device: The device that the model runs on.
        rank: The rank of this process.

    Attributes:
        n_batches: The number of training batches so far.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.times = PhaseTimes(device)
        self._device, self._rank = device, rank
        self.reader = reader_for(device)
        self._stages = None if self.reader is None else StageWatch(peak_counter(self.reader))
        self._owned: Owned | None = None
        self._batch_size: int | None = None
        self.n_batches = 0

    def enter(self, stage: Any) -> None:
        """Start measuring a stage: "train", or "val" for a validation run within training."""
        if self._stages is not None:
            self._stages.enter(stage)
        self.times.switch("rest" if stage == "train" else "validation")

    def leave(self, stage: Any) -> None:
        """Stop measuring a stage that `enter` began."""
        self.times.switch(None if stage == "train" else "rest")
        if self._stages is not None and stage in {"train", self._stages.running}:
            self._stages.point(stage, self._owned if stage == "train" else None)
            self._stages.leave(stage)

    def end_batch(self, model: nn.Module, optimizers: list[Optimizer], batch: Any) -> None:
        """End a training batch. After batches 1, 2, 4, 8 and so on, also record what takes memory at the peak."""
        self.times.switch("rest")
        self.n_batches += 1
        if self.n_batches == 1:
            self.times.forget()  # kernels are chosen and compiled, workers start
        if self.n_batches.bit_count() == 1:
            self._batch_size = max(self._batch_size or 0, batch_size_in(batch) or 0) or None
            self._look_at_peak(model, optimizers, batch)

    def _look_at_peak(self, model: nn.Module, optimizers: list[Optimizer], batch: Any) -> None:
        if self._stages is None or self.reader is None or self._stages.running != "train":
            return
        if self.reader.composition_at_peak() is None:
            self._owned = owned_by(model, optimizers, on_device_of(self.reader, self._device), inputs=batch)
        self._stages.point("train", self._owned)

    def close(self) -> RankFacts:
        """Stop measuring, and return the measurements. Call this once."""
        if self._stages is not None:
            self._stages.close()
        peaks = {} if self._stages is None else self._stages.peaks
        train = peaks.get("train")
        return RankFacts(
            rank=self._rank,
            steps=max(0, self.n_batches - 1),
            host_s=self.times.host_s(),
            device_s=self.times.device_s(),
            behind_share=self.times.behind_share,
            peak_bytes=max((peak.allocated for peak in peaks.values() if peak.allocated), default=None),
            reserved_bytes=max((peak.reserved for peak in peaks.values() if peak.reserved), default=None),
            capacity_bytes=None if self.reader is None else self.reader.stats().capacity,
            composition_bytes=dict(train.composition) if train is not None and train.composition else None,
            batch_size=self._batch_size,
        )
