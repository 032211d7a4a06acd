"""GradientCheckpointing in real Trainers: one process and two, every logger, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.optim import LBFGS

from lightning_memtools._torch import FakeTensor
from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memtools.memory.virtual import VirtualDevice
from tests.lightning_models import Adversaries, Regression, assert_same_bits, half, loader, trainer


class Deep(Regression):
    """Wide hidden layers, so that activations are worth recomputing."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(5)]
        self.net = nn.Sequential(nn.Linear(4, 32), *blocks, nn.Linear(32, 1))


def fit(root: Path, *callbacks: L.Callback, model: Any = Deep, **options) -> Any:
    L.seed_everything(0, verbose=False)
    made = model()
    trainer(root, *callbacks, **options).fit(made, loader(512, 64), loader(16))
    return made


def measured_share(root: Path) -> float:
    """The difference between measured and predicted peak in the plan's report, as percent of the predicted one."""
    (report,) = root.rglob("checkpoint_plan.md")
    (line,) = (line for line in report.read_text().splitlines() if "measured peak" in line)
    return float(line.split("(")[1].split("%")[0])


@pytest.mark.parametrize(
    ("options", "model"),
    [
        *(({}, Deep), ({"precision": "bf16-mixed"}, Deep), ({"accumulate_grad_batches": 3}, Deep)),
        *(({"gradient_clip_val": 0.1}, Deep), ({"max_epochs": 2}, Deep), ({}, Adversaries)),
    ],
    ids=str,
)
def test_training_ends_in_the_same_bits(options, model, tmp_path):
    callback = GradientCheckpointing(bn_dropout="skip" if model is Deep else "recompute")
    with_it = fit(tmp_path, callback, model=model, logger=False, **options)
    assert callback.plan.refused is None
    assert_same_bits(with_it.state_dict(), fit(tmp_path, model=model, logger=False, **options).state_dict())
    assert all("forward" not in vars(one) for one in with_it.modules())


def test_the_plan_is_in_every_logger_a_file_and_the_console_with_the_measured_peak(tmp_path, capsys):
    loggers = [TensorBoardLogger(tmp_path, name="", version="board"), CSVLogger(tmp_path, name="", version="table")]
    callback = GradientCheckpointing()
    with VirtualDevice():
        fit(tmp_path, callback, logger=loggers)
    assert callback.plan is not None
    text = (tmp_path / "board" / "memtools" / "checkpoint_plan.md").read_text()
    printed = " ".join(capsys.readouterr().out.split())
    assert "(Dropout never runs twice)" in text
    for word in ("Recompute net.", "extra computation", "predicted peak (simulated)", "measured peak"):
        assert word in text
        assert word in printed
    assert abs(measured_share(tmp_path)) <= 2


def test_a_failing_step_leaves_nothing_behind(tmp_path):
    class Fails(Deep):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx:
                raise RuntimeError("from the user's code")

    model = Fails()
    with pytest.raises(RuntimeError, match="from the user's code"):
        trainer(tmp_path, GradientCheckpointing(), logger=False).fit(model, loader(512, 64))
    assert all(not {"forward", "__getstate__"} & set(vars(one)) for one in model.modules())


class Manual(Deep):
    """Optimizes by itself, and frees gradients before it returns."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class TakingApart(Deep):
    """Takes the batch apart, and changes a tensor of it."""

    def training_step(self, batch, batch_idx):
        y = batch.pop()
        x = batch.pop()
        x.unsqueeze_(0)
        return self.loss((x[0], y))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((Deep, {}), (Deep, {"precision": "bf16-mixed"})),
        # Lightning itself would take bfloat16 on a CPU. The scale is small, so that no step is skipped.
        (Deep, {"plugins": half(2.0)}),
        *((Deep, {"accumulate_grad_batches": 2}), (Manual, {}), (TakingApart, {})),
    ],
    ids=["plain", "bfloat16", "float16", "accumulated", "manual", "taking the batch apart"],
)
def test_the_predicted_peak_is_the_measured_one_whatever_the_step_does(model, options, tmp_path):
    with VirtualDevice(cuda_like=True):
        callback = GradientCheckpointing(memory_budget=0.8, bn_dropout="recompute")
        fit(tmp_path, callback, model=model, **options)
    assert callback.plan.planned.peak_bytes < callback.plan.plain.peak_bytes
    assert abs(measured_share(tmp_path)) <= 1


class Failing(Deep):
    """Fails with an error of the type that bad options have, in the trace alone."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch[0], FakeTensor):
            raise ValueError("not in a trace")  # noqa: TRY004, the type of error that is meant
        return super().training_step(batch, batch_idx)


class FailsTheSecondTime(Deep):
    """Expects one call for each batch."""

    calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        assert self.calls == batch_idx + 1
        return super().training_step(batch, batch_idx)


class Closures(Deep):
    def configure_optimizers(self):
        return LBFGS(self.parameters(), max_iter=2)


LINE = r"Change .*test_gradient_checkpointing.py:\d+, or plan the part"
CASES = [(Failing, f"ValueError: not in.*{LINE}"), (FailsTheSecondTime, LINE), (Closures, r"LBFGS.*\. Plan the part")]


@pytest.mark.parametrize(("model", "said"), CASES)
def test_a_step_that_cannot_be_traced_leaves_the_model_unchanged_with_a_warning(model, said, tmp_path):
    with pytest.warns(UserWarning, match=said):
        with_it = fit(tmp_path, GradientCheckpointing(), model=model, logger=False)
    assert_same_bits(with_it.state_dict(), fit(tmp_path, model=model, logger=False).state_dict())


class NoLossAtFirst(Deep):
    """Its first call gives no loss."""

    calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        return None if self.calls == 1 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_is_planned_when_it_gives_a_loss_for_the_first_time(tmp_path):
    with VirtualDevice(cuda_like=True):
        callback = GradientCheckpointing(memory_budget=0.8, bn_dropout="recompute")
        planned = fit(tmp_path, callback, model=NoLossAtFirst)
    assert callback.plan.planned.peak_bytes < callback.plan.plain.peak_bytes
    assert abs(measured_share(tmp_path)) <= 1
    assert planned.calls == 8
    assert_same_bits(planned.state_dict(), fit(tmp_path, model=NoLossAtFirst).state_dict())
