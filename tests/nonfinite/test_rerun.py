"""Running the bad step again leaves no trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memtools import HaltOnNaN
from lightning_memtools.nonfinite.bad_step import NonFiniteCause, NonFiniteError
from tests.lightning_models import half, trainer
from tests.nonfinite.observe import differences, state_bits
from tests.nonfinite.replay_models import BAD, Everything, ManualEverything, batches


class Counting(Everything):
    """Counts, measures, prints and writes to the logger in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seen: list[int] = []
        self.metric = torchmetrics.MeanMetric()
        self.own_numbers = np.random.default_rng(3)
        self.cache: dict[str, Any] = {"last": torch.zeros(2)}

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.seen.append(batch_idx)
        self.cache["last"] = batch[:2].clone()
        self.metric(batch.sum())
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.log("draw", self.own_numbers.random(), on_epoch=True)
        self.logger.log_metrics({"by hand": self.count}, step=batch_idx)
        print(f"step {batch_idx}")  # noqa: T201, it must not be printed again
        return super().training_step(batch, batch_idx)


class CountingManual(Counting, ManualEverything):
    def __init__(self) -> None:
        Counting.__init__(self)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return ManualEverything.configure_optimizers(self)


def halt(model: L.LightningModule, root: Path, **options: Any) -> tuple[NonFiniteError, L.Trainer]:
    arguments = options.pop("arguments", {})
    run = trainer(root, HaltOnNaN(save_last_good=False, directory=str(root / "memtools"), **arguments), **options)
    dataset: Any = batches()
    with pytest.raises(NonFiniteError) as caught:
        run.fit(model, DataLoader(dataset, batch_size=None))
    return caught.value, run


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"plugins": 1}, {"model": CountingManual}])
def test_everything_is_restored_after_the_step_was_run_again(options, tmp_path, capsys):
    """As compared with a run that does not run the step again."""
    ends = []
    for name, asked in (("with", True), ("without", False)):
        more = dict(options)
        if "plugins" in more:
            more["plugins"] = half()
        L.seed_everything(0, verbose=False)
        model = more.pop("model", Counting)()
        logger = CSVLogger(tmp_path / name, flush_logs_every_n_steps=1)
        error, run = halt(model, tmp_path, logger=logger, arguments={"explain": asked, "save_step": asked}, **more)
        assert (error.explanation is not None) == asked
        gradients = {f"gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        plain = {
            "count": model.count, "seen": list(model.seen), "temperature": float(model.temperature),
            "training": [part.training for part in model.modules()],
            "requires_grad": [p.requires_grad for p in model.parameters()],
            "metric": float(model.metric.mean_value), "own numbers": model.own_numbers.bit_generator.state,
            "last": model.cache["last"].tolist(),
            "python": random.getstate(), "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002, the global one
            "metrics": {key: float(value) for key, value in run.callback_metrics.items()},
            "epoch": {
                name: (float(each.value), float(each.cumulated_batch_size))
                for name, each in run.fit_loop.epoch_loop._results.items() if each.is_tensor
            },
            "log": [path.read_text() for path in sorted((tmp_path / name).rglob("metrics.csv"))],
            "printed": [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")],
            "attributes": sorted(vars(model)),
            "has its trainer": model.trainer is run,
        }  # fmt: skip
        ends.append(({**state_bits(model, run.optimizers), **gradients, "rng": torch.get_rng_state()}, plain))
    assert differences(ends[0][0], ends[1][0]) == []
    assert {key: (ends[0][1][key], ends[1][1][key]) for key in ends[0][1] if ends[0][1][key] != ends[1][1][key]} == {}
    assert ends[0][1]["epoch"].keys() >= {"training_step.loss", "training_step.draw"}
    assert ends[0][1]["count"] == len(ends[0][1]["printed"]) == BAD + 1


def test_a_step_that_is_finite_again_for_another_reason_is_no_hardware_fault(tmp_path):
    class Changes(Everything):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch.clone(), batch_idx)
            if batch_idx == BAD:  # if the first steps had written to theirs, it would have been copied
                batch.add_(1)
            return loss

    error, _ = halt(Changes(), tmp_path, logger=False)
    assert error.cause == NonFiniteCause.UNKNOWN
    assert "could not be run exactly: The step writes batch 7" in str(error)


def test_a_step_that_fails_when_it_is_run_again_does_not_hide_the_halt(tmp_path, monkeypatch):
    class Once(Everything):
        calls = 0

        def training_step(self, batch, batch_idx):
            type(self).calls += 1
            if type(self).calls > BAD + 1:
                raise ValueError("only once\nin two lines")
            return super().training_step(batch, batch_idx)

    error, _ = halt(Once(), tmp_path, logger=False)
    assert error.step == BAD
    assert "ValueError: only once in two lines" in str(error)
    assert "detect_anomaly" in str(error)
    assert "detect_anomaly" not in str(halt(Everything(), tmp_path, logger=False)[0])


class Recomputed(Everything):
    """Its log is recomputed in backward."""

    def bad(self, x):
        return checkpoint(super().bad, x, use_reentrant=False)


def test_a_step_that_recomputes_activations_is_explained(tmp_path):
    error, _ = halt(Recomputed(), tmp_path, logger=False)
    assert (error.explanation.operation, error.explanation.backward) == ("aten.log", False)
    assert Path(error.explanation.file).name == "replay_models.py"


def test_what_the_trainer_knows_is_there_when_the_step_is_run_again(tmp_path, monkeypatch):
    class Asks(Everything):
        def training_step(self, batch, batch_idx):
            assert isinstance(self.trainer.callback_metrics, dict)
            assert self.trainer.train_dataloader is not None
            assert self.trainer.datamodule is None
            assert self.trainer.num_training_batches == 8
            assert self.trainer.max_epochs == 1
            seen.append((self.global_step, float(self.trainer.callback_metrics.get("loss", -1)), self.trainer.my_own))
            return super().training_step(batch, batch_idx)

    seen: list[Any] = []
    model = Asks()
    monkeypatch.setattr(L.Trainer, "my_own", "attribute", raising=False)
    error, _ = halt(model, tmp_path, logger=False)
    assert error.explanation is not None, str(error)
    assert error.explanation.operation == "aten.log"
    step, *again = seen[BAD:]
    assert len(again) > 2
    assert [(one[0], one[2]) for one in again] == [(step[0], step[2])] * len(again)
    assert all(one[1] == again[0][1] > 0 for one in again), "the metrics of the run, not of the replay"
