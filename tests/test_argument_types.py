"""A value of a type that an argument does not take is refused when it is given, with its name and the value."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import lightning_memtools as memtools
from tests.lightning_models import Regression, loader, trainer

CANDIDATES = (3, 1.5, "no such value", [3], {"a": 3}, b"bytes")
"""Values of types that YAML and a slip of the hand give."""
RESULTS = {"BatchSizeResult", "CheckpointPlan", "DoctorReport", "DryRunResult", "FailedStepRelease", "Finding"}
RESULTS |= {"LossSpike", "LossSpikeError", "MemoryEstimate", "MemoryStats", "PeakMemory", "Replay"}
CALLABLES = [
    name
    for name in memtools.__all__
    if name not in RESULTS and not name.endswith("Error") and name != "default_callbacks"
]


def given_to(name: str) -> dict[str, Any]:
    """The arguments that a function cannot do without."""
    if name == "tune_batch_size":
        return {"trainer": trainer(Path(), logger=False), "model": Regression()}
    model = torch.nn.Linear(4, 1)
    needed: dict[str, dict[str, Any]] = {
        "estimate_memory": {
            "model": model,
            "batch": torch.zeros(2, 4),
            "step": lambda model, batch: model(batch).sum(),
        },
        "plan_checkpoints": {"module": model},
        "OOMRecovery": {"loss": "mean"},
        "replay": {"path": "no-such-step.pt", "model": None},
        "diagnose": {"model": Regression(), "dataloader": loader()},
        "dry_run": {"program": __file__},
        "release_failed_step": {"error": RuntimeError()},
    }
    return needed.get(name, {})


def admits(annotation: Any, value: Any) -> bool:
    """Whether a value is of an annotation's type; True where that cannot be told."""
    origin, inner = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin in {types.UnionType, typing.Union}:
        return any(admits(kind, value) for kind in inner)
    if origin in {Any, Callable, typing.IO} or isinstance(origin, typing.TypeVar):
        return origin is not Callable or callable(value)
    if origin is Literal:
        return value in inner
    if origin is Sequence:
        return isinstance(value, list) and all(admits(inner[0], one) for one in value)
    known = {float: (float, int), os.PathLike: (str, os.PathLike)}
    return isinstance(value, known.get(origin, origin))


def wrong_values() -> Iterator[Any]:
    for name in CALLABLES:
        function: Any = getattr(memtools, name)
        made = vars(function)["__init__"] if isinstance(function, type) else function
        hints = typing.get_type_hints(made)
        for parameter in inspect.signature(function).parameters.values():
            for value in CANDIDATES:
                if not admits(hints[parameter.name], value):
                    yield pytest.param(name, parameter.name, value, id=f"{name}-{parameter.name}-{value!r}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument", "value"), list(wrong_values()))
def test_a_value_of_another_type_is_refused(name, argument, value):
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(memtools, name)(**given_to(name) | {argument: value})
    message = str(caught.value)
    shown = [repr(value), *(map(repr, value) if isinstance(value, list) else ())]
    assert argument in message or any(one in message for one in shown)
