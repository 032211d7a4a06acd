"""TrainingDoctor in real runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn

from lightning_memtools import TrainingDoctor, TrainingMistakeError
from lightning_memtools.batch_size.trainer.trial_runner import takes_part
from lightning_memtools.doctor import examination
from tests.event_files import scalars, texts_of
from tests.lightning_models import Regression, assert_same_bits, loader, trainer


class Flat(Regression):
    """Its targets are flat, and its predictions a column."""

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1])


class Sums(Regression):
    """Adds up losses with their graphs."""

    total: Any = 0.0

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        self.total = self.total + loss
        return loss


def fit(root: Path, model: L.LightningModule, doctor: TrainingDoctor, **options: Any) -> L.Trainer:
    run = trainer(root, doctor, **options)
    run.fit(model, loader(64), loader(16))
    return run


def test_a_finding_is_printed_written_and_logged(tmp_path, capsys):
    doctor = TrainingDoctor(steps=4)
    warned = pytest.warns(UserWarning, match="TrainingDoctor found 1 serious mistake.* loss_broadcast")
    with pytest.warns(UserWarning, match="Using a target size"), warned:
        fit(tmp_path, Flat(), doctor, logger=TensorBoardLogger(tmp_path))
    (finding,) = doctor.report.serious
    assert "MseLoss at tests/callbacks" in finding.place
    out = " ".join(capsys.readouterr().out.split())
    assert "error" in out
    assert "loss_broadcast" in out
    (path,) = tmp_path.rglob("memtools/doctor.json")
    assert json.loads(path.read_text())["serious"] == 1
    markdown = path.with_suffix(".md").read_text()
    assert finding.place in markdown
    assert markdown in "\n".join(texts_of(next(tmp_path.rglob("*.tfevents.*")).parent)["memtools/doctor"])


def test_a_sum_of_losses_is_found_and_logged_as_a_leak(tmp_path):
    doctor, logger = TrainingDoctor(steps=8), TensorBoardLogger(tmp_path)
    with pytest.warns(UserWarning, match="retained_graphs"):
        fit(tmp_path, Sums(), doctor, logger=logger, max_epochs=2)
    (finding,) = doctor.report.serious
    assert finding.place == "Sums.total"
    assert [value for _, value in scalars(logger.log_dir)["memory/leaks"]] == [1.0]


def test_a_sum_over_the_batch_is_found_though_lightning_divides_it_for_an_accumulation(tmp_path):
    class Summed(Regression):
        def loss(self, batch: Any) -> Any:
            return F.mse_loss(self.net(batch[0]), batch[1], reduction="sum")

    doctor = TrainingDoctor()
    with pytest.warns(UserWarning, match="loss_sum"):
        fit(tmp_path, Summed(), doctor, accumulate_grad_batches=4, logger=False)
    assert [finding.check for finding in doctor.report.serious] == ["loss_sum"]


def test_healthy_training_prints_nothing(tmp_path, capsys):
    doctor = TrainingDoctor()
    fit(tmp_path, Regression(), doctor, logger=CSVLogger(tmp_path))
    assert "doctor" not in capsys.readouterr().out.lower()
    assert not doctor.report.serious
    (path,) = tmp_path.rglob("memtools/doctor.md")
    assert "serious: 0" in path.read_text() or "Nothing was found" in path.read_text()


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_raise_ends_training_after_the_first_step_where_that_tells(tmp_path):
    model = Flat()
    with pytest.raises(TrainingMistakeError, match=r"loss_broadcast .*MseLoss at tests/callbacks") as caught:
        fit(tmp_path, model, TrainingDoctor(on_finding="raise"), num_sanity_val_steps=0)
    assert len(model.train_losses) == 1
    assert [one.check for one in caught.value.report.serious] == ["loss_broadcast"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0 watches nothing"),
        ({"on_finding": "shout"}, "on_finding='shout' is neither 'warn' nor 'raise'"),
        ({"checks": ["los_sum"]}, "no check 'los_sum'.* loss_sum"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainingDoctor(**arguments)


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(table) for part in model.modules() for name, table in vars(part).items() if name.endswith("hooks") and table
    )


def test_after_its_steps_it_holds_nothing_and_does_nothing(tmp_path):
    class Looks(L.Callback):
        def __init__(self, doctor: TrainingDoctor) -> None:
            self.doctor = doctor
            self.seen: list[tuple[bool, int, bool, list[str]]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            calls: list[str] = []
            loss = torch.zeros(())
            sys.setprofile(lambda _, event, __: calls.append(event) if event.endswith("call") else None)
            try:
                self.doctor.on_before_backward(trainer, module, loss)
            finally:
                sys.setprofile(None)
            self.seen.append((self.doctor._examination is None, hooks_of(module), torch.is_anomaly_enabled(), calls))

    doctor = TrainingDoctor(steps=3)
    looks = Looks(doctor)
    run = trainer(tmp_path, doctor, looks)
    run.fit(Regression(), loader(64), loader(16))
    assert [gone for gone, *_ in looks.seen] == [False] * 2 + [True] * 6
    assert {(hooks, notes_lines) for _, hooks, notes_lines, _ in looks.seen} == {(0, False)}
    # A few calls of Python: the hook, what Lightning or torch wraps it in, and setprofile itself.
    assert max(len(calls) for *_, calls in looks.seen[3:]) <= 4
    assert doctor.report.steps == 3


def test_trials_of_the_batch_size_leave_it_out():
    assert not takes_part(TrainingDoctor())


def weights_after(root: Path, *callbacks: L.Callback) -> dict[str, torch.Tensor]:
    L.seed_everything(0, verbose=False)
    model = Regression()
    trainer(root, *callbacks, max_epochs=2).fit(model, loader(64), loader(16))
    return model.state_dict()


def test_each_check_may_fail_and_the_others_go_on(tmp_path, monkeypatch):
    expected = weights_after(tmp_path)
    n_functions = len(examination.CHECKS)
    broken = tuple((name, event, lambda *_: [].pop()) for name, event, _ in examination.CHECKS)
    monkeypatch.setattr(examination, "CHECKS", broken)
    doctor = TrainingDoctor(steps=3)
    with pytest.warns(UserWarning, match="TrainingDoctor leaves out checks that failed") as caught:
        seen = weights_after(tmp_path, doctor)
    said = " ".join(str(one.message) for one in caught)
    assert said.count("IndexError: pop from empty list") == n_functions
    assert_same_bits(seen, expected)
