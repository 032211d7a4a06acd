"""Whether HaltOnNaN and `Trainer(detect_anomaly=True)` name the operation and the line that made the first bad value.

Every failing model of the tests' gallery once as it is and once with a causal mask of -inf in its body; and the healthy
ones, where there is nothing to name. What is right stands in the gallery; of a torch.autograd.Function, its name is
right too. Nothing is timed.

    PYTHONPATH=. python benchmarks/nan_cause.py
"""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from machine import save
from torch.utils.data import DataLoader

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite.bad_step import NonFiniteError
from tests.lightning_models import trainer
from tests.nonfinite import gallery
from tests.nonfinite.gallery import BODY_IS_MASKED, FAILING, HEALTHY, Case

WAYS = ("HaltOnNaN", "detect_anomaly")
Named = dict[str, Any]


def made(case: Case, *, masked: bool) -> L.LightningModule:
    L.seed_everything(0, verbose=False)
    model: L.LightningModule = case.make()
    vars(model)["masked"] = masked
    return model


def fit(model: L.LightningModule, case: Case, root: Path, *callbacks: L.Callback, **options: Any) -> None:
    dataset: Any = case.batches
    run = trainer(root, *callbacks, logger=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(model, DataLoader(dataset, batch_size=None))


def by_halt_on_nan(case: Case, root: Path, *, masked: bool) -> Named | None:
    try:
        fit(made(case, masked=masked), case, root, HaltOnNaN(save_step=False, save_last_good=False))
    except NonFiniteError as error:
        found = error.explanation
        return None if found is None else {"operation": found.operation, "line": found.line}
    return None


def by_detect_anomaly(case: Case, root: Path, *, masked: bool) -> Named | None:
    model = made(case, masked=masked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset: Any = case.batches
        try:
            trainer(root, logger=False, detect_anomaly=True).fit(model, DataLoader(dataset, batch_size=None))
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            function = re.findall(r"Function '(\w+)'", str(error))[0]
            text = "".join(str(each.message) for each in caught if "Error detected in" in str(each.message))
            lines = re.findall(rf'File "{re.escape(gallery.__file__)}", line (\d+)', text)
            function = re.sub(r"Backward\d*$", "", function)
            is_users = function.startswith("_")
            operation = function if is_users else "aten." + re.sub(r"(?<!^)(?=[A-Z])", "_", function).lower()
            return {"operation": operation, "line": int(lines[-1]) if lines else None}
    return None


def named(case: Case, *, masked: bool = False) -> dict[str, Named | None]:
    """Return what each way names for a model."""
    with tempfile.TemporaryDirectory() as folder:
        by = (by_halt_on_nan, by_detect_anomaly)
        return {way: how(case, Path(folder), masked=masked) for way, how in zip(WAYS, by, strict=True)}


def summary(failing: dict[str, dict[str, bool | None]], healthy: dict[str, dict[str, bool]]) -> dict[str, Any]:
    """Return how often each way is right, and which models it does not name rightly.

    Args:
        failing: For each failing model, whether each way is right; None where it names nothing.
        healthy: For each healthy one, whether each way names something.
    """
    return {"failing": len(failing), "healthy": len(healthy)} | {
        way: {
            "right": sum(row[way] is True for row in failing.values()),
            "wrong": [name for name, row in failing.items() if row[way] is False],
            "named_nothing": [name for name, row in failing.items() if row[way] is None],
            "false_alarms": [name for name, row in healthy.items() if row[way]],
        }
        for way in WAYS
    }


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    failing: dict[str, dict[str, bool | None]] = {}
    for name, case in FAILING.items():
        for masked in (False, True) if name in BODY_IS_MASKED else (False,):
            wanted = {"operation": case.operation, "line": case.line}
            failing[f"{name}, with a mask" if masked else name] = {
                way: None if one is None else one == wanted or one["operation"] == gallery.BAD_FUNCTION
                for way, one in named(case, masked=masked).items()
            }
    healthy = {name: {way: bool(one) for way, one in named(case).items()} for name, case in HEALTHY.items()}
    save("nan_cause", summary(failing, healthy))


if __name__ == "__main__":
    main()
