"""BatchSizeTuner in whole runs on simulated devices."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner
from lightning_memtools.memory.sizes import MIB
from tests.event_files import texts_of
from tests.lightning_models import assert_same_bits, trainer
from tests.tuner_runs import Constant, N, Small, Tuner, everything_of, fit


def test_fit_gives_the_same_bits_as_with_the_size_set_by_hand(tmp_path):
    tuner = Tuner()
    tuned, run = fit(tmp_path, tuner)
    size = tuner.result.sizes["train"]
    assert size > 30
    assert tuned.hparams["batch_size"] == size
    assert set(tuned.seen) == {size, N % size}, "only batches of the fit are left in the module's list"
    assert run.global_step == -(-N // size)
    by_hand, other = fit(tmp_path, None, Small(batch_size=size))
    assert_same_bits(everything_of(tuned, run), everything_of(by_hand, other))


def test_every_found_size_was_run_within_the_margin(tmp_path):
    tuner = Tuner(margin=0.2)
    fit(tmp_path, tuner)
    result = tuner.result
    for stage, size in result.sizes.items():
        (trial,) = [trial for trial in result.trials if trial.stage == stage and trial.size == size]
        assert trial.fits
        assert trial.peak == result.peaks[stage] <= 0.8 * 128 * MIB
        assert trial.limit == int(0.8 * 128 * MIB)
    assert len([trial for trial in result.trials if trial.stage == "train"]) <= 8


def test_a_margin_in_bytes_and_memory_of_other_processes_count(tmp_path):
    sizes = []
    for margin, others in (("0MiB", "0MiB"), ("64MiB", "0MiB"), ("0MiB", "64MiB")):
        tuner = Tuner(margin=margin, stages=("train",))
        with VirtualDevice("192MiB", used_by_others=others):
            L.seed_everything(0, verbose=False)
            trainer(tmp_path, tuner, logger=False, limit_val_batches=0).fit(Small())
        sizes.append(tuner.result.sizes["train"])
        assert tuner.result.peaks["train"] <= (128 if margin == "64MiB" else 192) * MIB
    assert sizes[1] == sizes[2] < 0.8 * sizes[0]


def test_validation_has_its_own_size_and_is_run_in_trials(tmp_path):
    model = Small()
    model.val_factor = 16
    tuner = Tuner()
    fit(tmp_path, tuner, model)
    sizes = tuner.result.sizes
    assert sizes["val"] < 0.7 * sizes["train"]
    assert any(trial.stage == "val" and not trial.fits for trial in tuner.result.trials) or sizes["val"] > 1


def test_the_model_is_unchanged_when_no_size_fits(tmp_path):
    model = Small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"fits for train: not even 2 .*at least .*MiB"):
        fit(tmp_path, Tuner(), model, capacity="3MiB")
    assert_same_bits(before, dict(model.state_dict()))
    assert model.hparams["batch_size"] == 4
    assert model.seen == []


@pytest.mark.parametrize("effective", [96, 60])
def test_the_effective_batch_is_kept_exactly(tmp_path, effective):
    tuner = Tuner(effective_batch_size=effective, stages=("train",), max_trials=8)
    _, run = fit(tmp_path, tuner)
    result = tuner.result
    size = result.sizes["train"]
    assert size * result.accumulate == effective == result.effective_batch_size
    assert run.accumulate_grad_batches == result.accumulate
    larger = [n for n in range(size + 1, effective + 1) if effective % n == 0]
    with VirtualDevice("128MiB"):
        for n in larger[:1]:  # the next divisor does not fit
            check = Tuner(init_val=n, max_val=n, max_trials=1, stages=("train",))
            with pytest.raises(RuntimeError, match=f"not even {n} fits"):
                trainer(tmp_path, check, logger=False, accumulate_grad_batches=effective // n).fit(Small())
    assert run.global_step == -(-N // size // result.accumulate) or run.global_step == -(-N // effective)


def test_a_device_without_statistics_keeps_the_size(tmp_path, capsys):
    tuner = Tuner()
    trainer(tmp_path, tuner, logger=False).fit(Small(n=8))
    assert tuner.result is None
    assert "no memory statistics" in " ".join(capsys.readouterr().out.split())


def test_a_resumed_run_uses_the_stored_size(tmp_path):
    first, second = Tuner(), Tuner()
    _, run = fit(tmp_path, first, Constant())
    with VirtualDevice("128MiB"):
        run.save_checkpoint(tmp_path / "half.ckpt")
        model = Constant()
        resumed = trainer(tmp_path, second, logger=False, max_epochs=2, limit_val_batches=1)
        resumed.fit(model, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert second.result is None
    assert set(model.seen) == {first.result.sizes["train"], N % first.result.sizes["train"]}
    assert model.hparams["batch_size"] == first.result.sizes["train"]


def test_the_result_is_printed_logged_and_written(tmp_path, capsys):
    tuner = Tuner()
    board = TensorBoardLogger(tmp_path, name="", version="board")
    fit(tmp_path, tuner, logger=board)
    size = tuner.result.sizes["train"]
    assert f"train {size}" in capsys.readouterr().out
    (report,) = tmp_path.rglob("batch_size.md")
    assert tuner.result.table() in report.read_text()
    assert "simulated" in report.read_text()
    (text,) = texts_of(tmp_path / "board")["memtools/batch_size"]
    assert tuner.result.table() in text
    assert f"batch_size: {size}" in next(tmp_path.rglob("hparams.yaml")).read_text()


@pytest.mark.parametrize(("capacity", "context"), [(192, 0), (692, 500)])
def test_a_peak_is_what_the_monitor_logs_and_of_a_failed_trial_a_lower_bound(tmp_path, capacity, context):
    """Without what the CUDA context takes, which the limit leaves out too."""

    class Reserved(L.Callback):
        def on_train_batch_end(self, *args):
            peaks.append(VirtualDevice.current().stats().peak_reserved)

    peaks, tuner = [], Tuner(stages=("train",), init_val=150, max_trials=4, margin="24MiB")
    with VirtualDevice(f"{capacity}MiB", used_by_others="32MiB", context=f"{context}MiB"):
        L.seed_everything(0, verbose=False)
        run = trainer(tmp_path, tuner, Reserved(), logger=False, limit_val_batches=0)
        run.fit(Small())
    result = tuner.result
    assert result.peaks["train"] == max(peaks[-3:])
    assert result.trials[0].limit == (capacity - 32 - context) * MIB - 24 * MIB
    assert "| out of memory | " in result.table()


class Finder(LearningRateFinder):
    """Looks for a rate in ten steps, and notes the size of the batches that it sees."""

    def __init__(self):
        super().__init__(num_training_steps=10, early_stop_threshold=None, update_attr=False)
        self.sizes = []

    def lr_find(self, trainer, pl_module):
        before = len(pl_module.seen)
        super().lr_find(trainer, pl_module)
        self.sizes += pl_module.seen[before:]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_learning_rate_finder_looks_with_the_batches_that_were_found(tmp_path, is_first):
    class Tunable(Constant):
        lr = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    tuner, finder = Tuner(stages=("train",)), Finder()
    with VirtualDevice("128MiB"):
        callbacks = [finder, tuner] if is_first else [tuner, finder]
        trainer(tmp_path, *callbacks, logger=False, limit_val_batches=0, max_steps=1).fit(Tunable())
    size = tuner.result.sizes["train"]
    assert size > 30
    assert set(finder.sizes) <= {size, N % size}
    assert size in finder.sizes
    assert any(f"belongs to steps of {size} samples" in note for note in tuner.result.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"margin": 1.0}, r"margin=1.0 must be a share in \[0, 1\)"),
        ({"margin": -0.1}, "margin=-0.1"),
        ({"margin": "5"}, "Not a size"),
        ({"init_val": 0}, "init_val=0 must be a whole number"),
        ({"max_trials": 0}, "max_trials=0 must be a whole number"),
        ({"stages": ("train", "valid")}, "stages=.*must be a sequence of some of train, val"),
        ({"stages": "train"}, "must be a sequence"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_tuner_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchSizeTuner(**arguments)


@pytest.mark.cuda_memory
def test_on_a_gpu_the_found_size_keeps_the_margin(tmp_path):
    torch.cuda.set_per_process_memory_fraction(1.0)

    class Big(Small):
        def loss(self, x):
            for _ in range(16):
                x = self.dropout(x * self.scale).tanh()
            return x.square().mean()

    L.seed_everything(0)
    tuner = Tuner(stages=("train",), margin=0.3)
    tuner_trainer = trainer(tmp_path, tuner, logger=False, accelerator="gpu", devices=1, limit_train_batches=2,
                            limit_val_batches=0)  # fmt: skip
    tuner_trainer.fit(Big(n=50_000))
    result = tuner.result
    assert result.sizes["train"] > 1
    assert result.peaks["train"] <= 0.7 * torch.cuda.get_device_properties(0).total_memory
