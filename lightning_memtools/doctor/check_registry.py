"""The checks by name: which exist, and the objects that make them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_memtools.doctor.checkpoint_checks import CheckpointKeys
from lightning_memtools.doctor.graph_checks import EvaluationGraphs, RetainedGraphs
from lightning_memtools.doctor.loader_checks import BatchNormOneSample, ChangedBatch, DataWaiting, SharedMemory
from lightning_memtools.doctor.loss_checks import SpikeCheck, StepTrial
from lightning_memtools.doctor.memory_checks import GrowingMemory
from lightning_memtools.doctor.module_checks import Devices, ModuleModes
from lightning_memtools.doctor.parameter_checks import MissingGradients, OptimizerParameters, SymmetricWeights
from lightning_memtools.doctor.settings_checks import RejectedSettings, Reproducibility
from lightning_memtools.doctor.training_case import TrainingCase

# A check has methods named as the events in examination.py, and yields findings from them. None: it is made by the
# trial of the step, which several checks share.
CHECKS: Mapping[str, Callable[[TrainingCase], Any] | None] = {
    "batch_norm_one_sample": BatchNormOneSample,
    "shared_memory": SharedMemory,
    "checkpoint_keys": CheckpointKeys,
    "optimizer_parameters": OptimizerParameters,
    "symmetric_weights": SymmetricWeights,
    "devices": Devices,
    "rejected_settings": RejectedSettings,
    "reproducibility": Reproducibility,
    "missing_gradients": MissingGradients,
    "retained_graphs": RetainedGraphs,
    "evaluation_graphs": EvaluationGraphs,
    "loss_broadcast": None,
    "loss_sum": None,
    "module_modes": ModuleModes,
    "changed_batch": ChangedBatch,
    "data_waiting": DataWaiting,
    "memory_growth": GrowingMemory,
    "loss_spikes": SpikeCheck,
}
_BY_TRIAL = {"loss_broadcast", "loss_sum", "devices"}


def selected_checks(checks: str | Sequence[str], ignore: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the checks to make, in their order.

    Args:
        checks: "all", one name, or several.
        ignore: The names of those to leave out.

    Raises:
        ValueError: There is no check of a name.
    """
    wanted, left_out = (
        list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]
        for given in (list(CHECKS) if checks == "all" else checks, ignore)
    )
    for name in (*wanted, *left_out):
        if not isinstance(name, str) or name not in CHECKS:
            near = difflib.get_close_matches(str(name), CHECKS, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"There is no check {name!r}.{meant} The checks are: {', '.join(CHECKS)}; or 'all'.")
    return tuple(name for name in CHECKS if name in wanted and name not in left_out)


def made_checks(case: TrainingCase, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the checks of these names with their names; the trial comes last, under the name "trial"."""
    made = [(name, make(case)) for name, make in CHECKS.items() if name in names and make is not None]
    if _BY_TRIAL & set(names):
        made.append(("trial", StepTrial(case, names)))
    return made
