"""Which of three ways names the operation and the line that made the first bad value, on the gallery of the tests.

HaltOnNaN, `Trainer(detect_anomaly=True)`, and "the first operation with NaN or Inf in the bad step". Every failing
model once as it is and once with a causal mask of -inf in its body; and the healthy ones, where there is nothing to
name. What is right stands in the gallery; of a torch.autograd.Function, its name is right too. Nothing is timed.

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
from lightning_memtools.nonfinite.operation_trace import OperationTrace
from tests.lightning_models import trainer
from tests.nonfinite import gallery
from tests.nonfinite.gallery import BODY_IS_MASKED, FAILING, HEALTHY, Case

WAYS = ("HaltOnNaN", "detect_anomaly", "first bad operation")
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


def by_halt_on_nan(case: Case, root: Path, *, masked: bool) -> tuple[Named | None, int | None]:
    try:
        fit(made(case, masked=masked), case, root, HaltOnNaN(save_step=False, save_last_good=False))
    except NonFiniteError as error:
        found = error.explanation
        if found is None:
            return None, error.step
        return {"operation": found.operation, "line": found.line}, error.step
    return None, None


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


class FirstOfStep(L.Callback):
    """Records the bad operations of one training step, in the order in which they ran."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.trace: OperationTrace | None = None
        self.context: Any = None
        self.named: Named | None = None

    def on_train_batch_start(self, _trainer: Any, pl_module: Any, _batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step or self.step is None:
            self.trace = OperationTrace(pl_module)
            self.context = self.trace.watching()
            self.context.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.context is None or self.trace is None:
            return
        self.context.__exit__(None, None, None)
        self.context = None
        if self.trace.events and self.named is None:
            first = self.trace.events[0]
            self.named = {"operation": first.of_forward or first.operation, "line": first.place and first.place.line}


def by_first_operation(case: Case, root: Path, step: int | None, *, masked: bool) -> Named | None:
    watch = FirstOfStep(step)
    fit(made(case, masked=masked), case, root, watch)
    return watch.named


def measure(name: str, *, masked: bool) -> dict[str, Any]:
    """What each way names for a failing model of the gallery."""
    case = FAILING[name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ours, step = by_halt_on_nan(case, root, masked=masked)
        anomaly = by_detect_anomaly(case, root, masked=masked)
        first = by_first_operation(case, root, step, masked=masked)
    wanted = {"operation": case.operation, "line": case.line}
    row: dict[str, Any] = {"model": name, "masked": masked, "right": case.operation}
    for way, found in zip(WAYS, (ours, anomaly, first), strict=True):
        operation = found and found["operation"]
        row[way] = {"operation": operation, "is_right": found == wanted or operation == gallery.BAD_FUNCTION}
    return row


def false_alarms(name: str) -> dict[str, Any]:
    """What each way names for a healthy one."""
    case = HEALTHY[name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ours, step = by_halt_on_nan(case, root, masked=False)
        assert step is None
        named = [ours, by_detect_anomaly(case, root, masked=False), by_first_operation(case, root, None, masked=False)]
    return {"model": name} | {way: found and found["operation"] for way, found in zip(WAYS, named, strict=True)}


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = [measure(name, masked=masked) for name in FAILING for masked in (False, True)
            if not masked or name in BODY_IS_MASKED]  # fmt: skip
    healthy = [false_alarms(name) for name in HEALTHY]
    totals = {
        way: {
            "right": sum(row[way]["is_right"] for row in rows),
            "right with a mask": sum(row[way]["is_right"] for row in rows if row["masked"]),
            "named nothing": sum(row[way]["operation"] is None for row in rows),
            "false alarms": sum(each[way] is not None for each in healthy),
        }
        for way in WAYS
    }
    of = {"models": len(rows), "with a mask": len(rows) - len(FAILING), "healthy": len(healthy)}
    save("nan_cause", {"of": of, "totals": totals, "failing": rows, "healthy": healthy})


if __name__ == "__main__":
    main()
