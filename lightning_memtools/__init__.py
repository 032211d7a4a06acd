"""PyTorch Lightning callbacks that make GPU memory and training health visible and manageable.

Public names are resolved on first use (PEP 562), so that command lines and TensorBoard start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_memtools.batch_size.batch_size_result import BatchSizeResult as BatchSizeResult
    from lightning_memtools.budgets.assert_peak_memory import assert_peak_memory as assert_peak_memory
    from lightning_memtools.budgets.peak_memory import PeakMemory as PeakMemory
    from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner as BatchSizeTuner
    from lightning_memtools.callbacks.batch_size_tuner import tune_batch_size as tune_batch_size
    from lightning_memtools.callbacks.empty_cache import EmptyCache as EmptyCache
    from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing as GradientCheckpointing
    from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN as HaltOnNaN
    from lightning_memtools.callbacks.loss_curves import LossCurves as LossCurves
    from lightning_memtools.callbacks.loss_spikes import LossSpikes as LossSpikes
    from lightning_memtools.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from lightning_memtools.callbacks.oom_recovery import OOMRecovery as OOMRecovery
    from lightning_memtools.callbacks.oom_report import OOMReport as OOMReport
    from lightning_memtools.callbacks.presets import default_callbacks as default_callbacks
    from lightning_memtools.callbacks.training_doctor import TrainingDoctor as TrainingDoctor
    from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan as CheckpointPlan
    from lightning_memtools.checkpointing.planning import plan_checkpoints as plan_checkpoints
    from lightning_memtools.doctor.diagnosing import diagnose as diagnose
    from lightning_memtools.doctor.findings import DoctorReport as DoctorReport
    from lightning_memtools.doctor.findings import Finding as Finding
    from lightning_memtools.doctor.findings import TrainingMistakeError as TrainingMistakeError
    from lightning_memtools.estimate import estimate_memory as estimate_memory
    from lightning_memtools.estimate.memory_estimate import MemoryEstimate as MemoryEstimate
    from lightning_memtools.memory.release_failed_step import FailedStepRelease as FailedStepRelease
    from lightning_memtools.memory.release_failed_step import release_failed_step as release_failed_step
    from lightning_memtools.memory.stats import MemoryStats as MemoryStats
    from lightning_memtools.memory.virtual import VirtualDevice as VirtualDevice
    from lightning_memtools.nonfinite.bad_step import NonFiniteError as NonFiniteError
    from lightning_memtools.nonfinite.loss_spike import LossSpike as LossSpike
    from lightning_memtools.nonfinite.loss_spike import LossSpikeError as LossSpikeError
    from lightning_memtools.nonfinite.step_file import Replay as Replay
    from lightning_memtools.nonfinite.step_file import StepFileError as StepFileError
    from lightning_memtools.nonfinite.step_file import replay as replay
    from lightning_memtools.null_cuda.dry_run.api import dry_run as dry_run
    from lightning_memtools.null_cuda.dry_run.result import DryRunResult as DryRunResult
    from lightning_memtools.null_cuda.stubs import DryRunError as DryRunError
    from lightning_memtools.warning_categories import DegradedWarning as DegradedWarning
    from lightning_memtools.warning_categories import FindingWarning as FindingWarning
    from lightning_memtools.warning_categories import MemtoolsWarning as MemtoolsWarning

__version__ = "0.1.0"

_HOME_OF_NAME = {
    "BatchSizeResult": "batch_size.batch_size_result",
    "BatchSizeTuner": "callbacks.batch_size_tuner",
    "CheckpointPlan": "checkpointing.checkpoint_plan",
    "DegradedWarning": "warning_categories",
    "DoctorReport": "doctor.findings",
    "DryRunError": "null_cuda.stubs",
    "DryRunResult": "null_cuda.dry_run.result",
    "EmptyCache": "callbacks.empty_cache",
    "FailedStepRelease": "memory.release_failed_step",
    "Finding": "doctor.findings",
    "FindingWarning": "warning_categories",
    "GradientCheckpointing": "callbacks.gradient_checkpointing",
    "HaltOnNaN": "callbacks.halt_on_nan",
    "LossCurves": "callbacks.loss_curves",
    "LossSpike": "nonfinite.loss_spike",
    "LossSpikeError": "nonfinite.loss_spike",
    "LossSpikes": "callbacks.loss_spikes",
    "MemoryEstimate": "estimate.memory_estimate",
    "MemoryMonitor": "callbacks.memory_monitor",
    "MemoryStats": "memory.stats",
    "MemtoolsWarning": "warning_categories",
    "NonFiniteError": "nonfinite.bad_step",
    "OOMRecovery": "callbacks.oom_recovery",
    "OOMReport": "callbacks.oom_report",
    "PeakMemory": "budgets.peak_memory",
    "Replay": "nonfinite.step_file",
    "StepFileError": "nonfinite.step_file",
    "TrainingDoctor": "callbacks.training_doctor",
    "TrainingMistakeError": "doctor.findings",
    "VirtualDevice": "memory.virtual",
    "assert_peak_memory": "budgets.assert_peak_memory",
    "default_callbacks": "callbacks.presets",
    "diagnose": "doctor.diagnosing",
    "dry_run": "null_cuda.dry_run.api",
    "estimate_memory": "estimate",
    "plan_checkpoints": "checkpointing.planning",
    "release_failed_step": "memory.release_failed_step",
    "replay": "nonfinite.step_file",
    "tune_batch_size": "callbacks.batch_size_tuner",
}

__all__ = list(_HOME_OF_NAME)  # type checkers go by the imports above, which name each as itself


def __getattr__(name: str) -> object:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
