"""BatchSizeTuner in whole runs on simulated devices."""

from __future__ import annotations

import copy
import math
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_memtools import MemoryMonitor, VirtualDevice
from lightning_memtools.callbacks._batch_size.probe import Probe
from lightning_memtools.callbacks._batch_size.runner import TrialRunner
from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner, tune_batch_size
from lightning_memtools.memory.sizes import MIB
from tests.batch_size_models import Samples
from tests.lightning_models import trainer

WIDTH = 65_536  # a sample is 256 KiB
N = 200


class Data(Samples):
    def __init__(self, n=N):
        super().__init__(n, WIDTH)


class Small(L.LightningModule):
    """Some 1.5 MiB of activations per sample, little work, and everything that leaves traces."""

    def __init__(self, batch_size: int = 4, n: int = N) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.norm = nn.BatchNorm1d(1)
        self.dropout = nn.Dropout(0.2)
        self.seen: list[int] = []
        self.val_factor = 1

    def loss(self, x: Tensor) -> Tensor:
        hidden = (x * self.scale).tanh()
        loss: Tensor = self.norm(self.dropout(hidden.mean(1, keepdim=True))).square().mean() + hidden.square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch))
        loss = self.loss(batch + 0.1 * torch.rand(len(batch), 1))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hold = [batch.tanh() for _ in range(self.val_factor)]
        self.log("val_loss", sum((x.mean() for x in hold), torch.zeros(())), batch_size=len(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(len(batch))
        self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch))
        return self.loss(batch)

    def train_dataloader(self) -> Any:
        return DataLoader(Data(self.hparams["n"]), batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Data(self.hparams["n"]), batch_size=self.hparams["batch_size"])

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Constant(Small):
    """Without a schedule."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.125)


def Tuner(**arguments: Any) -> BatchSizeTuner:  # noqa: N802, stands for the class
    """With fewer trials: how near it comes is the benchmark's matter."""
    return BatchSizeTuner(**({"max_trials": 3} | arguments))


def fit(root: Path, tuner: BatchSizeTuner | None, model: L.LightningModule | None = None, *callbacks: L.Callback,
        capacity: str = "128MiB", loaders: Any = None, val_loaders: Any = None, datamodule: Any = None,
        **options: Any) -> tuple[L.LightningModule, L.Trainer]:  # fmt: skip
    with VirtualDevice(capacity):
        L.seed_everything(0, verbose=False)
        model = model or Small()
        validates = tuner is None or "val" in tuner.stages
        defaults = {"logger": False, "limit_val_batches": 2 * validates, "num_sanity_val_steps": 1}
        run = trainer(root, *([tuner] if tuner else []), *callbacks, **(defaults | options))
        run.fit(model, loaders, val_loaders, datamodule=datamodule)
    return model, run


def everything_of(model, run):
    return {
        **{f"weight {name}": value for name, value in model.state_dict().items()},
        **{f"moment {i} {name}": value for i, state in run.optimizers[0].state_dict()["state"].items()
           for name, value in state.items()},
        "numbers": torch.get_rng_state(),
        "rates": torch.tensor([group["lr"] for group in run.optimizers[0].param_groups]),
        "scheduler": torch.tensor([config.scheduler.total_steps for config in run.lr_scheduler_configs]),
    }  # fmt: skip


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_fit_goes_on_as_if_the_size_had_been_given_by_hand(tmp_path):
    tuner = Tuner()
    tuned, run = fit(tmp_path, tuner)
    size = tuner.result.sizes["train"]
    assert size > 30
    assert tuned.hparams["batch_size"] == size
    assert set(tuned.seen) == {size, N % size}, "only batches of the fit are left in the module's list"
    assert run.global_step == -(-N // size)
    by_hand, other = fit(tmp_path, None, Small(batch_size=size))
    assert_same(everything_of(tuned, run), everything_of(by_hand, other))


def test_every_size_was_run_and_kept_the_margin(tmp_path):
    tuner = Tuner(margin=0.2)
    fit(tmp_path, tuner)
    result = tuner.result
    for stage, size in result.sizes.items():
        (trial,) = [trial for trial in result.trials if trial.stage == stage and trial.size == size]
        assert trial.fits
        assert trial.readings[0].peak == result.peaks[stage] <= 0.8 * 128 * MIB
        assert trial.readings[0].limit == int(0.8 * 128 * MIB)
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


class Spy(L.Callback):
    """Sees everything, changes its own attributes, and keeps memory on the device."""

    def __init__(self):
        self.steps = 0
        self.history = {"sizes": []}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.kept = torch.empty(8 * MIB, dtype=torch.uint8)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        self.history["sizes"].append(len(batch))
        Path(trainer.default_root_dir, f"step{self.steps}").touch()
        if trainer.logger:
            trainer.logger.log_metrics({"spied": 1.0}, self.steps)


def test_nothing_remains_of_a_search_without_a_fit(tmp_path):
    with VirtualDevice("128MiB") as device:
        L.seed_everything(0, verbose=False)
        spy, model = Spy(), Small()
        loader = DataLoader(Data(), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
        run = trainer(tmp_path, spy, ModelCheckpoint(tmp_path / "checkpoints"), logger=CSVLogger(tmp_path),
                      enable_checkpointing=True)  # fmt: skip
        device.track(model)
        before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), loader.generator.get_state()
        callbacks = run.callbacks
        result = tune_batch_size(run, model, train_dataloaders=loader)
        assert result.sizes["train"] > 30
        assert_same(before[0], dict(model.state_dict()))
        assert torch.equal(loader.generator.get_state(), before[2])
        assert loader.batch_size == 4
        assert (model.seen, spy.steps, spy.history, hasattr(spy, "kept")) == ([], 0, {"sizes": []}, False)
        assert all(p.grad is None for p in model.parameters())
        assert model.training
        assert run.global_step == run.current_epoch == 0
        assert run.fit_loop.epoch_loop.batch_progress.total.ready == 0
        assert not any(optimizer.state for optimizer in run.optimizers)
        assert run.callbacks is callbacks
        assert not any("step" in path.name for path in tmp_path.rglob("*"))
        assert not [*tmp_path.rglob("*.ckpt")]
        assert "spied" not in "".join(path.read_text() for path in tmp_path.rglob("metrics.csv"))
        run.fit(model, DataLoader(Data(), result.sizes["train"]))
        assert spy.steps == run.global_step > 0


def test_the_random_numbers_after_a_search_are_those_before(tmp_path):
    with VirtualDevice("128MiB"):
        model = Constant()
        L.seed_everything(3, verbose=False)
        before = torch.get_rng_state()
        tune_batch_size(trainer(tmp_path, logger=False), model)
        assert torch.equal(torch.get_rng_state(), before)


def test_allocated_is_as_before_after_every_trial(tmp_path, monkeypatch):
    allocated = []
    original = TrialRunner.run

    def run(runner, *arguments):
        reader = VirtualDevice.current()
        before = reader.stats()
        trial = original(runner, *arguments)
        after = reader.stats()
        allocated.append((trial.outcome, before.allocated, after.allocated, after.reserved - before.reserved))
        return trial

    monkeypatch.setattr(TrialRunner, "run", run)
    fit(tmp_path, Tuner(init_val=100, max_trials=5))
    assert "out of memory" in {outcome for outcome, *_ in allocated}
    assert "fits" in {outcome for outcome, *_ in allocated}
    assert all(before == after and grown <= 0 for _, before, after, grown in allocated)


def test_validation_has_its_own_size_and_is_really_tried(tmp_path):
    model = Small()
    model.val_factor = 16
    tuner = Tuner()
    fit(tmp_path, tuner, model)
    sizes = tuner.result.sizes
    assert sizes["val"] < 0.7 * sizes["train"]
    assert any(trial.stage == "val" and not trial.fits for trial in tuner.result.trials) or sizes["val"] > 1


def test_validation_keeps_its_size_when_it_is_not_tuned(tmp_path):
    seen = []

    class Watching(Small):
        def validation_step(self, batch, batch_idx):
            seen.append(len(batch))

    fit(tmp_path, Tuner(stages=("train",)), Watching(), limit_val_batches=2)
    assert set(seen) == {4}


@pytest.mark.parametrize("max_val", [1, 10, 33])
def test_max_val_is_never_passed(tmp_path, max_val):
    class NoNorm(Small):
        def __init__(self, batch_size=4, n=N):
            super().__init__(batch_size, n)
            self.norm = nn.Identity()

    tuner = Tuner(max_val=max_val, stages=("train",))
    fit(tmp_path, tuner, NoNorm())
    assert tuner.result.sizes == {"train": max_val}
    assert max(trial.size for trial in tuner.result.trials) == max_val


def test_multiple_of(tmp_path):
    tuner = Tuner(multiple_of=8, stages=("train",))
    fit(tmp_path, tuner)
    assert all(trial.size % 8 == 0 for trial in tuner.result.trials)


def test_nothing_fits_and_the_model_is_untouched(tmp_path):
    model = Small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"No batch size fits for train: already 2 does not .*at least .*MiB"):
        fit(tmp_path, Tuner(), model, capacity="3MiB")
    assert_same(before, dict(model.state_dict()))
    assert model.hparams["batch_size"] == 4
    assert model.seen == []


def test_in_the_middle_of_training_the_state_is_kept(tmp_path):
    class Grows(Constant):
        """Takes twice the memory from epoch 1 on."""

        def loss(self, x):
            extra = (x * self.scale).tanh() * (x * self.scale).sigmoid() if self.current_epoch else x
            return super().loss(extra)

    class State(L.Callback):
        """The state at the beginning of each epoch, before and after the tuner's turn."""

        def __init__(self, into):
            self.into = into

        def on_train_epoch_start(self, trainer, pl_module):
            state = {name: value.clone() for name, value in pl_module.state_dict().items()}
            moments = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
            self.into.append((state, moments, trainer.global_step, torch.get_rng_state()))

    before, after = [], []
    tuner = Tuner(at_epochs=(1,), stages=("train",))
    with VirtualDevice("128MiB"):
        L.seed_everything(0, verbose=False)
        model = Grows(n=200)
        run = trainer(tmp_path, State(before), tuner, State(after), logger=False, max_epochs=2, limit_val_batches=0)
        run.fit(model)
    first, second = {trial.size for trial in tuner.result.trials}, tuner.result.sizes["train"]
    assert second in first
    sizes = sorted(set(model.seen), reverse=True)
    assert second in sizes
    assert second < 0.8 * sizes[0]
    one, other = before[1], after[1]
    assert_same(one[0], other[0])
    for index, values in one[1].items():
        assert_same(values, other[1][index])
    assert one[2] == other[2] == -(-200 // sizes[0])
    assert run.global_step == one[2] + -(-200 // second)
    assert torch.equal(one[3], other[3])


def test_a_schedule_for_a_number_of_steps_is_renewed_in_the_middle_of_training(tmp_path):
    class Grows(Small):
        """Takes twice the memory from epoch 1 on."""

        def loss(self, x):
            return super().loss((x * self.scale).tanh() * (x * self.scale).sigmoid() if self.current_epoch else x)

    tuner = Tuner(at_epochs=(1,), stages=("train",))
    _, run = fit(tmp_path, tuner, Grows(n=100), max_epochs=2)
    steps = -(-100 // tuner.result.sizes["train"])
    assert run.global_step < 2 * steps, "the first epoch had fewer"
    scheduler = run.lr_scheduler_configs[0].scheduler
    (optimizer,) = run.optimizers
    assert scheduler.optimizer is optimizer
    assert scheduler.total_steps == 2 * steps
    assert scheduler.last_epoch == 2 * steps, "it ends with the training"
    anew = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    other = torch.optim.lr_scheduler.OneCycleLR(anew, 1e-2, total_steps=2 * steps)
    for _ in range(2 * steps):
        anew.step()
        other.step()
    for name in ("lr", "min_lr"):
        assert optimizer.param_groups[0][name] == anew.param_groups[0][name]
    assert all(state["step"] == run.global_step for state in optimizer.state.values())


def test_callbacks_take_part_but_those_that_watch(tmp_path):
    present = []

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            present.append([type(callback).__name__ for callback in trainer.callbacks])

    average = WeightAveraging(avg_fn=lambda old, new, n: old)
    fit(tmp_path, Tuner(), None, average, Looks(), EarlyStopping("val_loss"), MemoryMonitor())
    in_trials = [names for names in present if "Probe" in names]
    assert in_trials
    assert all(set(names) == {"WeightAveraging", "Looks", "Room", "Probe"} for names in in_trials)
    assert "Probe" not in present[-1]
    assert {"BatchSizeTuner", "EarlyStopping", "MemoryMonitor"} <= set(present[-1])


def test_a_callbacks_memory_counts(tmp_path):
    class Holds(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.kept = torch.empty(50 * MIB, dtype=torch.uint8)

    sizes = []
    for callbacks in ((), (Holds(),)):
        tuner = Tuner(stages=("train",))
        fit(tmp_path, tuner, None, *callbacks)
        sizes.append(tuner.result.sizes["train"])
    assert sizes[1] < 0.75 * sizes[0]


def test_what_on_fit_start_prepares_is_there_in_trials(tmp_path):
    calls = []

    class Prepares(Small):
        def on_fit_start(self):
            calls.append(hasattr(self, "factor"))
            self.factor = 1.0

        def loss(self, x):
            return super().loss(x) * self.factor

    fit(tmp_path, Tuner(stages=("train",)), Prepares())
    assert not any(calls), "each call found the module as it was"


def test_accumulation_does_not_multiply_the_work(tmp_path):
    n_batches = []

    class Counts(Small):
        def training_step(self, batch, batch_idx):
            if any(isinstance(c, Probe) for c in self.trainer.callbacks):
                n_batches.append(len(batch))
            return super().training_step(batch, batch_idx)

    tuner = Tuner(stages=("train",))
    _, run = fit(tmp_path, tuner, Counts(), accumulate_grad_batches=50)
    assert run.accumulate_grad_batches == 50
    assert len(n_batches) <= 4 * len(tuner.result.trials), "two steps of two micro-batches"


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
            with pytest.raises(RuntimeError, match=f"already {n} does not"):
                trainer(tmp_path, check, logger=False, accumulate_grad_batches=effective // n).fit(Small())
    assert run.global_step == -(-N // size // result.accumulate) or run.global_step == -(-N // effective)


def test_an_error_that_is_not_about_memory_surfaces_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)

    class Breaks(Small):
        def training_step(self, batch, batch_idx):
            raise KeyError("from the user's step")

    model = Breaks()
    with pytest.raises(KeyError, match="from the user's step"):
        fit(tmp_path, Tuner(), model)
    assert not [*(tmp_path / "temporary").iterdir()]
    assert model.hparams["batch_size"] == 4


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("kind", ["raised from", "swallowed", "MemoryError", "cuBLAS"])
def test_every_way_to_run_out_of_memory_is_a_failed_trial(tmp_path, kind):
    class Fails(Small):
        def training_step(self, batch, batch_idx):
            try:
                if len(batch) > 20 and kind == "MemoryError":
                    raise MemoryError
                if len(batch) > 20 and kind == "cuBLAS":
                    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
                return super().training_step(batch, batch_idx)
            except torch.OutOfMemoryError as error:
                if kind == "swallowed":
                    return None
                raise ValueError("forward failed") from error

    tuner = Tuner(stages=("train",), init_val=200, max_trials=6)
    fit(tmp_path, tuner, Fails())
    assert tuner.result.trials[0].outcome == "out of memory"
    size = tuner.result.sizes["train"]
    assert size <= 20 if kind in {"MemoryError", "cuBLAS"} else size > 30


class Killer(Dataset[Tensor]):
    """Its workers are killed when a batch would be larger than 10, as the kernel does when the host has no memory."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.ones(WIDTH)


def kill(samples):
    if len(samples) > 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.stack(samples)


@pytest.mark.filterwarnings("ignore:.*os.fork.*:DeprecationWarning")
def test_a_killed_worker_is_a_failed_trial(tmp_path):
    loader = DataLoader(Killer(), 2, num_workers=1, collate_fn=kill)
    tuner = Tuner(stages=("train",), max_trials=5)
    fit(tmp_path, tuner, None, loaders=loader)
    assert "a data-loader worker was killed" in {trial.outcome for trial in tuner.result.trials}
    assert tuner.result.sizes["train"] <= 10


def test_fast_dev_run_skips_with_a_message(tmp_path, capsys):
    tuner = Tuner()
    model, _ = fit(tmp_path, tuner, fast_dev_run=True)
    assert tuner.result is None
    assert model.hparams["batch_size"] == 4
    assert "skipped, because fast_dev_run=True" in " ".join(capsys.readouterr().out.split())


def test_a_device_without_statistics_keeps_the_size(tmp_path, capsys):
    tuner = Tuner()
    trainer(tmp_path, tuner, logger=False).fit(Small(n=8))
    assert tuner.result is None
    assert "a CPU keeps no memory statistics" in " ".join(capsys.readouterr().out.split())


class Module(L.LightningDataModule):
    def __init__(self, per_step=4, val_per_step=4):
        super().__init__()
        self.per_step, self.val_per_step = per_step, val_per_step

    def train_dataloader(self):
        return DataLoader(Data(), self.per_step)

    def val_dataloader(self):
        return DataLoader(Data(), self.val_per_step)


def test_an_attribute_of_the_data_module_and_several_names(tmp_path):
    data = Module()
    tuner = Tuner(batch_arg_name=["per_step", "val_per_step"])
    model, _ = fit(tmp_path, tuner, datamodule=data)
    assert data.per_step == tuner.result.sizes["train"]
    assert data.val_per_step == tuner.result.sizes["val"]
    assert set(model.seen) == {data.per_step, N % data.per_step}


def test_loaders_passed_to_fit_are_rebuilt_in_the_same_order(tmp_path):
    def loader(size):
        return DataLoader(Data(), size, shuffle=True, generator=torch.Generator().manual_seed(7))

    tuner = Tuner()
    tuned, run = fit(tmp_path, tuner, loaders=loader(4), val_loaders=DataLoader(Data(), 4))
    size = tuner.result.sizes["train"]
    by_hand, other = fit(tmp_path, None, Small(batch_size=size), loaders=loader(size),
                         val_loaders=DataLoader(Data(), 4))  # fmt: skip
    assert tuned.seen == by_hand.seen
    assert_same(everything_of(tuned, run), everything_of(by_hand, other))


class Stream(IterableDataset[Tensor]):
    def __init__(self, n=100):
        self.n = n

    def __iter__(self):
        return (torch.full((WIDTH,), i / self.n) for i in range(self.n))


def test_an_iterable_dataset_and_one_smaller_than_the_batch(tmp_path):
    for n, expected in ((1000, None), (23, 23)):
        tuner = Tuner(stages=("train",))
        fit(tmp_path, tuner, Constant(), loaders=DataLoader(Stream(n), 4, drop_last=n == 1000),
            limit_val_batches=0)  # fmt: skip
        size = tuner.result.sizes["train"]
        assert size == expected if expected else size > 30


def test_a_dataset_smaller_than_the_batch_gives_one_batch(tmp_path):
    tuner = Tuner()
    _, run = fit(tmp_path, tuner, Small(n=20))
    assert tuner.result.sizes == {"train": 20, "val": 20}
    assert run.global_step == 1
    assert any("number of samples" in note for note in tuner.result.notes)


def test_no_last_batch_of_one_sample_in_front_of_batchnorm(tmp_path):
    tuner = Tuner(max_val=24, stages=("train",))
    model, _ = fit(tmp_path, tuner, Small(n=49))  # 49 = 2 * 24 + 1
    assert tuner.result.sizes == {"train": 23}
    assert 1 not in model.seen
    assert any("BatchNorm" in note for note in tuner.result.notes)


def test_an_interval_of_validation_in_batches_still_works(tmp_path):
    tuner = Tuner()
    _, run = fit(tmp_path, tuner, Small(n=100), val_check_interval=5)
    assert run.num_training_batches >= 5


def test_workers_shared_memory_caps_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_memtools.batchsize.limits.free_shared_memory", lambda: 10 * MIB)
    tuner = Tuner(stages=("train",))
    fit(tmp_path, tuner, loaders=DataLoader(Data(), 2, num_workers=1, prefetch_factor=2), limit_val_batches=0)
    assert tuner.result.sizes["train"] <= 13  # 10 MiB / 3 batches / 256 KiB
    assert any("shared memory" in note for note in tuner.result.notes)


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_evaluation_calls_find_their_own_size(tmp_path, call):
    stage = {"validate": "val"}.get(call, call)
    seen = []

    class Watching(Small):
        def validation_step(self, batch, batch_idx):
            seen.append(len(batch))
            self.loss(batch)

    with VirtualDevice("64MiB"):
        model = Watching()
        tuner = Tuner(stages=(stage,))
        run = trainer(tmp_path, tuner, logger=False)
        outputs = getattr(run, call)(model)
        size = tuner.result.sizes[stage]
    batches = model.seen or seen[-math.ceil(N / size) :]
    assert size > 30
    assert sum(batches) == N
    assert set(batches) == {size, N % size} - {0}
    if call == "predict":
        assert len(outputs) == -(-N // size)
    assert model.training


def test_a_rerun_verifies_the_cached_size_with_one_trial(tmp_path):
    cache = str(tmp_path / "sizes.json")
    first, second, third = (Tuner(cache=cache) for _ in range(3))
    fit(tmp_path, first)
    tuned, run = fit(tmp_path, second)
    assert second.result.sizes == first.result.sizes
    assert [trial.stage for trial in second.result.trials] == ["train", "val"]
    by_hand, other = fit(tmp_path, None, Small(batch_size=second.result.sizes["train"]))
    assert_same(everything_of(tuned, run), everything_of(by_hand, other))
    fit(tmp_path, third, capacity="96MiB")  # another device
    assert third.result.sizes != first.result.sizes


def test_a_cached_size_that_no_longer_fits_is_searched_anew(tmp_path):
    cache = tmp_path / "sizes.json"
    first, second = Tuner(cache=str(cache)), Tuner(cache=str(cache), max_trials=6)
    fit(tmp_path, first)
    cache.write_text(cache.read_text().replace(f'"train": {first.result.sizes["train"]}', f'"train": {N}'))
    fit(tmp_path, second)
    assert second.result.trials[0].size == N
    assert second.result.sizes["train"] > 30


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


def test_the_result_is_told_everywhere(tmp_path, capsys):
    tuner = Tuner()
    board = TensorBoardLogger(tmp_path, name="", version="board")
    fit(tmp_path, tuner, logger=board)
    size = tuner.result.sizes["train"]
    assert f"train {size}" in capsys.readouterr().out
    (report,) = tmp_path.rglob("batch_size.md")
    assert tuner.result.table() in report.read_text()
    assert "simulated" in report.read_text()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    (text,) = events.Tensors("memtools/batch_size/text_summary")
    assert tuner.result.table() in text.tensor_proto.string_val[0].decode()
    assert f"batch_size: {size}" in next(tmp_path.rglob("hparams.yaml")).read_text()


def test_an_unchanged_learning_rate_is_said_once(tmp_path):
    tuner = Tuner(stages=("train",))

    fit(tmp_path, tuner, Constant())
    notes = [note for note in tuner.result.notes if "learning rate is still 0.125" in note]
    assert len(notes) == 1
    assert f"from 4 to {tuner.result.sizes['train']} samples" in notes[0]


def test_the_largest_samples_are_used_in_trials(tmp_path):
    class Longer(Dataset):
        lengths = [1 + (i % 50) for i in range(500)]  # noqa: RUF012, read only

        def __len__(self):
            return 500

        def __getitem__(self, index):
            return torch.ones(self.lengths[index] * 1311)

    longest = []

    class Watching(Small):
        def training_step(self, batch, batch_idx):
            if any(isinstance(c, Probe) for c in self.trainer.callbacks):
                longest.append((len(batch), batch.shape[1]))
            return super().training_step(nn.functional.pad(batch, (0, WIDTH - batch.shape[1])), batch_idx)

    def collate(samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    tuner = Tuner(stages=("train",))
    fit(tmp_path, tuner, Watching(), loaders=DataLoader(Longer(), 2, collate_fn=collate))
    assert {length for _, length in longest} == {50 * 1311}


def test_no_such_attribute(tmp_path):
    class Other(Small):
        def __init__(self):
            super().__init__()
            self.batchsize = 4
            del self.hparams["batch_size"]

        def train_dataloader(self):
            return DataLoader(Data(), self.batchsize)

    with pytest.raises(ValueError, match=r"No 'batch_size' in model, model.hparams. Similar names there: batchsize"):
        fit(tmp_path, Tuner(), Other())


def test_a_loader_that_does_not_follow_the_attribute(tmp_path):
    class Stubborn(Small):
        def train_dataloader(self):
            return DataLoader(Data(), 8)

    with pytest.raises(ValueError, match="train_dataloader gives batches of 8 whatever batch_size is"):
        fit(tmp_path, Tuner(), Stubborn())


def test_a_passed_loader_that_cannot_be_resized(tmp_path):
    with pytest.raises(ValueError, match="it has batch_size=None"):
        fit(tmp_path, Tuner(), loaders=DataLoader(Data(), batch_size=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"margin": 1.0}, r"margin=1.0 must be a share in \[0, 1\)"),
        ({"margin": -0.1}, "margin=-0.1"),
        ({"margin": "5"}, "Not a size"),
        ({"init_val": 0}, "init_val=0 is below 1"),
        ({"max_trials": 0}, "max_trials=0 is below 1"),
        ({"stages": ("train", "valid")}, "stages=.*must be a sequence of some of train, val, test, predict"),
        ({"stages": "train"}, "must be a sequence"),
        ({"max_val": 4, "multiple_of": 8}, "max_val=4 is below multiple_of=8"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchSizeTuner(**arguments)


def test_tune_batch_size_says_when_it_cannot(tmp_path):
    with pytest.raises(RuntimeError, match="the device keeps no memory statistics"):
        tune_batch_size(trainer(tmp_path, logger=False), Small(n=8))


def test_two_validation_loaders(tmp_path):
    class Two(Small):
        def val_dataloader(self):
            return [DataLoader(Data(40), self.hparams["batch_size"]), DataLoader(Data(300), self.hparams["batch_size"])]

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            hold = [batch.tanh() for _ in range(12 * dataloader_idx)]  # the second one takes the memory
            self.log("val_loss", sum((x.mean() for x in hold), batch.mean()), batch_size=len(batch))

    tuner = Tuner()
    fit(tmp_path, tuner, Two())
    assert 1 < tuner.result.sizes["val"] < tuner.result.sizes["train"]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
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


def test_tensors_in_datasets_stay(tmp_path):
    data = TensorDataset(torch.ones(60, WIDTH))

    class Pairs(Small):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    tuner = Tuner(stages=("train",))
    fit(tmp_path, tuner, Pairs(), loaders=DataLoader(data, 4))
    assert 30 < tuner.result.sizes["train"] <= 60
