"""The callbacks that every training should have."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_memtools.callbacks.empty_cache import EmptyCache
from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.callbacks.loss_curves import LossCurves
from lightning_memtools.callbacks.memory_monitor import MemoryMonitor
from lightning_memtools.callbacks.oom_report import OOMReport
from lightning_memtools.callbacks.training_doctor import TrainingDoctor


def default_callbacks() -> list[Callback]:
    """Return the callbacks that only watch and protect: `Trainer(callbacks=default_callbacks())`.

    Callbacks that change how training runs (gradient checkpointing, batch size) are added by name.
    """
    return [MemoryMonitor(), LossCurves(), EmptyCache(), OOMReport(), HaltOnNaN(), TrainingDoctor()]
