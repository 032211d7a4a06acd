"""HaltOnNaN in whole runs of the Trainer."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks import halt_on_nan
from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite import step_guard
from lightning_memtools.nonfinite.bad_step import NonFiniteCause, NonFiniteError
from tests.batch_size_models import Samples
from tests.event_files import scalars
from tests.lightning_models import half, trainer
from tests.nonfinite.observe import Observer, differences, state_bits

BAD = 9  # this batch holds one NaN


def batches(*bad: int, n: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(8, 4, generator=generator) for _ in range(n)]
    for index in bad:
        made[index][3, 2] = torch.nan
    return made


def loader(*bad: int, n: int = 16) -> DataLoader[Any]:
    dataset: Any = batches(*bad, n=n)
    return DataLoader(dataset, batch_size=None)


OPTIMIZERS = {
    "sgd": lambda ps, fused: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1, fused=fused),
    "adamw": lambda ps, fused: torch.optim.AdamW(ps, lr=0.05, fused=fused),
    "adagrad": lambda ps, fused: torch.optim.Adagrad(ps, lr=0.05, weight_decay=0.1, fused=fused),
}


class Net(L.LightningModule):
    """Linear layers and BatchNorm, a learning rate that falls in every step, a loss that is logged."""

    def __init__(self, optimizer: str = "adamw", *, fused: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer, self.fused = optimizer, fused

    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters(), self.fused)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def halted(run: L.Trainer, model: L.LightningModule, *data: Any) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        run.fit(model, *data)
    return caught.value


def assert_finite(path: Path) -> dict[str, Any]:
    """Every number of weights, buffers and optimizer state in the file is finite."""
    saved: dict[str, Any] = torch.load(path, weights_only=False)
    values = list(saved["state_dict"].values())
    for optimizer in saved.get("optimizer_states", ()):
        values += [v for state in optimizer["state"].values() for v in state.values()]
    assert all(torch.isfinite(value).all() for value in values), path
    return saved


def assert_all_finite(root):
    """Each checkpoint below `root` is finite; how many there are."""
    return len([assert_finite(path) for path in root.rglob("*.ckpt")])


fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


@pytest.fixture(autouse=True)
def _fused_steps_are_flagged_as_on_a_gpu(request, monkeypatch):
    """On the CPU a fused step is read before its update, too."""
    if "fused" in getattr(getattr(request.node, "callspec", None), "params", {}):
        monkeypatch.setattr(step_guard, "reads_at_once", lambda _gradients: False)


@pytest.mark.parametrize("accumulate", [1, 4])
@fused_or_not
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [0, BAD])
def test_state_is_bitwise_that_before_the_bad_step_and_checkpoints_are_finite(
    bad, optimizer, fused, accumulate, tmp_path
):
    ends = []
    for callback in (Observer(), HaltOnNaN(directory=str(tmp_path / "memtools"))):
        L.seed_everything(0, verbose=False)
        model = Net(optimizer, fused=fused)
        savers = [
            ModelCheckpoint(tmp_path / "every", every_n_train_steps=1, save_top_k=-1, save_last=True,
                            save_on_exception=True),
            ModelCheckpoint(tmp_path / "best", monitor="train_loss", save_top_k=2, every_n_train_steps=1,
                            filename="{step}", save_on_exception=True),
        ]  # fmt: skip
        is_guarded = isinstance(callback, HaltOnNaN)
        options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0, "enable_checkpointing": is_guarded}
        run = trainer(tmp_path, callback, *(savers if is_guarded else ()), logger=False, **options)
        if is_guarded:
            error = halted(run, model, loader(bad))
        else:
            run.fit(model, loader(bad))
        ends.append((callback, model, run))
    observer, _, _ = ends[0]
    _, model, run = ends[1]
    assert error.step == observer.first_bad == bad // accumulate
    assert error.batch_idx == bad
    assert error.cause == NonFiniteCause.DIRTY_DATA
    assert differences(observer.before, state_bits(model, run.optimizers)) == []
    assert run.global_step == bad // accumulate
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == bad // accumulate
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9 ** (bad // accumulate))
    assert assert_all_finite(tmp_path) >= 1 + (bad // accumulate > 0)
    last_good = assert_finite(error.checkpoint_path)
    counts = last_good["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    assert counts["zero_grad"]["total"]["completed"] == counts["step"]["total"]["ready"] == bad // accumulate
    assert last_good["global_step"] == bad // accumulate
    before = {name.removeprefix("model."): v for name, v in observer.before.items() if name.startswith("model.")}
    assert differences(before, last_good["state_dict"]) == []


@fused_or_not
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("every_n_train_steps", [1, 100])
def test_skipped_steps_leave_no_trace(every_n_train_steps, optimizer, fused, tmp_path):
    """The end is bit for bit that of a plain loop which leaves the bad batches out, the first of all among them."""
    bad = (0, 5, 6)
    L.seed_everything(0, verbose=False)
    model = Net(optimizer, fused=fused)
    callback = HaltOnNaN(max_skips=3)
    saver = ModelCheckpoint(tmp_path / "every", every_n_train_steps=every_n_train_steps, save_top_k=-1)
    run = trainer(tmp_path, callback, saver, logger=TensorBoardLogger(tmp_path), enable_checkpointing=True)
    run.fit(model, loader(*bad))
    assert_all_finite(tmp_path / "every")

    L.seed_everything(0, verbose=False)
    plain = Net(optimizer, fused=fused)
    configured = plain.configure_optimizers()
    reference, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for index, batch in enumerate(batches(*bad)):
        if index not in bad:
            reference.zero_grad()
            plain.loss(batch).backward()
            reference.step()
        else:
            reference._opt_called = True  # else the scheduler warns
        scheduler.step()
    assert differences(state_bits(plain, [reference]), state_bits(model, run.optimizers)) == []
    assert run.global_step == 16
    assert scalars(run.logger.log_dir)["nonfinite/skipped"] == [(0, 1.0), (5, 2.0), (6, 3.0)]


@fused_or_not
def test_one_bad_step_more_than_max_skips_halts(fused, tmp_path):
    model = Net(fused=fused)
    error = halted(trainer(tmp_path, HaltOnNaN(max_skips=2)), model, loader(1, 2, 7))
    assert (error.step, error.batch_idx) == (7, 7)
    assert "Bad steps skipped before: 1 (batches [1]), 2 (batches [2])" in str(error)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


# Lightning warns of every loader without a state.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@fused_or_not
@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_goes_on_from_the_last_good_checkpoint(fused, accumulate, tmp_path):
    def run(callback, data, resume=None):
        L.seed_everything(0, verbose=False)
        model = Net("adamw", fused=fused)
        fit = trainer(tmp_path, callback, accumulate_grad_batches=accumulate)
        try:
            fit.fit(model, data, ckpt_path=resume, weights_only=False)
        except NonFiniteError as error:
            fit.checkpoint = error.checkpoint_path
        return fit, model

    stopped, _ = run(HaltOnNaN(), loader(BAD))
    n_done = BAD // accumulate * accumulate
    made = batches()
    # Resumed in the middle of an epoch, Lightning counts on but begins the loader anew: give it the rest first.
    rest: Any = made[n_done:] + made[:n_done]
    resumed, model = run(HaltOnNaN(), DataLoader(rest, batch_size=None), stopped.checkpoint)
    straight, reference = run(HaltOnNaN(), loader())
    assert resumed.global_step == straight.global_step == 16 // accumulate
    assert differences(state_bits(reference, straight.optimizers), state_bits(model, resumed.optimizers)) == []
    assert resumed.fit_loop.epoch_loop._batches_that_stepped == straight.fit_loop.epoch_loop._batches_that_stepped


def test_the_message_names_everything(tmp_path):
    model = Net()
    run = trainer(tmp_path, HaltOnNaN(), accumulate_grad_batches=4, logger=CSVLogger(tmp_path))
    error = halted(run, model, loader(BAD))
    text = str(error)
    first, *_, last = text.splitlines()
    assert first.startswith("loss is nan at step 2 (batch 9 of batches 8 to 11, rank 0)")
    assert "1 NaN in 32 elements, in sample 3" in text
    with torch.no_grad():  # on the weights before the step, which are those of now
        loss = float(copy.deepcopy(model).train().loss(batches()[8]))
    assert f"{loss:.6g} (batch 8), nan (batch 9), " in text
    assert "net.0.weight (32 NaN of 32, 100%)" in text
    assert "net.3.weight (8 NaN of 8, 100%) and 1 more" in text
    assert "before the step: none" in text
    assert f"Learning rate: {0.05 * 0.9**2:g}" in text
    assert "those samples" in last
    assert last.endswith(f"memtools replay {error.step_path} --model {__name__}:Net")
    assert "first used by torch.addmm in net.0 (" in text
    assert "sample 0 in the place of sample 3" in text
    assert len(error.losses) == len(error.norms) == 3
    assert [str(bad).split()[0] for bad in error.parameters] == [name for name, _ in model.named_parameters()]
    assert error.path.parent == Path(run.log_dir) / "memtools"
    assert "net.0.weight (32 NaN of 32, 100%)" in error.path.read_text()


def test_losses_and_norms_of_the_last_twenty_steps_are_those_of_training(tmp_path):
    class Recorder(L.Callback):
        def __init__(self):
            self.losses, self.norms = [], []

        def on_before_backward(self, trainer, pl_module, loss):
            self.losses.append(loss.item())

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.norms.append(float(nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])))

    for fused in (False, True):
        recorder = Recorder()
        error = halted(trainer(tmp_path, recorder, HaltOnNaN()), Net(fused=fused), loader(30, n=40))
        assert len(error.losses) == len(error.norms) == 20
        assert error.losses[:19] == pytest.approx(recorder.losses[11:30])
        assert error.norms[:19] == pytest.approx(recorder.norms[11:30])
        assert error.losses[19] != error.losses[19]


@fused_or_not
def test_a_float64_loss_beyond_float32_is_finite(fused, tmp_path):
    class Large(Net):
        def loss(self, batch):
            return super().loss(batch) * 1e40

    run = trainer(tmp_path, HaltOnNaN(), precision="64-true", logger=False)
    run.fit(Large(fused=fused), loader())
    assert run.global_step == 16


class Big(Net):
    """Gradients near 1000: beyond float16 once they are scaled by 2**16."""

    factor: float = 1

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().mean() * 1000 * self.factor

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, fused=self.fused)


@fused_or_not
def test_skips_of_the_gradient_scaler_are_normal_at_first(fused, tmp_path):
    scaler, model = half(2.0**16), Big(fused=fused)  # the default scale
    model.factor = 20
    run = trainer(tmp_path, HaltOnNaN(), plugins=scaler)
    run.fit(model, loader())
    assert run.global_step == 16
    assert 1 <= scaler.scaler.get_scale() <= 2.0**6  # ten skips at least


@fused_or_not
def test_too_many_skips_of_the_scaler_in_a_row_halt(fused, tmp_path):
    model = Big(fused=fused)
    before = state_bits(model, [])
    run = trainer(tmp_path, HaltOnNaN(amp_patience=3), plugins=half(2.0**24))
    error = halted(run, model, loader())
    assert error.step == 2
    assert error.cause == NonFiniteCause.LOW_PRECISION
    assert "skipped 3 steps in a row" in str(error)
    assert "a scale of 4.1943e+06" in str(error)
    assert "amp_patience" in str(error)
    weights = [name for name in before if name.endswith(("weight", "bias"))]
    assert not set(weights) & set(differences(before, state_bits(model, [])))


@pytest.mark.parametrize("kind", ["dirty batch", "loss alone"])
@fused_or_not
def test_bad_steps_can_be_skipped_with_a_scaler_too(fused, kind, tmp_path):
    class Bad(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch.nan_to_num() if kind == "loss alone" else batch)
            return loss + torch.inf if batch_idx == BAD and kind == "loss alone" else loss

    observer = Observer()
    L.seed_everything(0, verbose=False)
    trainer(tmp_path, observer, plugins=half(2.0**4), max_epochs=None, max_steps=BAD + 1).fit(
        Bad(fused=fused), loader(BAD)
    )
    L.seed_everything(0, verbose=False)
    model = Bad(fused=fused)
    run = trainer(tmp_path, HaltOnNaN(max_skips=1), plugins=half(2.0**4), max_epochs=None, max_steps=BAD + 1)
    run.fit(model, loader(BAD))
    changed = differences(observer.before, state_bits(model, run.optimizers))
    assert changed == ["optimizer0.lr0"], "the scheduler counts the step"
    again = trainer(tmp_path, HaltOnNaN(max_skips=1), plugins=half(2.0**4))
    again.fit(model.train(), loader(BAD))
    assert again.global_step == 16


@fused_or_not
def test_a_skip_at_a_scale_below_one_is_not_normal(fused, tmp_path):
    class Worse(Big):
        def on_train_batch_start(self, batch, batch_idx):
            self.factor = 1e8 if batch_idx == 4 else 1

    error = halted(trainer(tmp_path, HaltOnNaN(), plugins=half(0.5)), Worse(fused=fused), loader())
    assert (error.step, error.cause) == (4, NonFiniteCause.LOW_PRECISION)
    assert "is at a scale of 0.5" in str(error)


class Evaluated(Net):
    """Validation and test log what they are told to."""

    losses: Any = 0.0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(self.losses if batch_idx == 2 else 1.0))
        self.log("recall", torch.nan)
        return {"logits": torch.tensor([0.0, -torch.inf])}

    test_step = validation_step


def test_a_bad_logged_loss_of_an_evaluation_run_halts(tmp_path):
    model = Evaluated()
    model.losses = torch.inf
    saver = ModelCheckpoint(tmp_path / "best", every_n_epochs=1)
    run = trainer(tmp_path, HaltOnNaN(), saver, num_sanity_val_steps=0, enable_checkpointing=True)
    error = halted(run, model, loader(), loader(n=4))
    assert "val_loss = inf (rank 0)" in str(error)
    assert "recall" not in str(error), "other metrics may be NaN by right"
    assert error.stage == "val"
    assert run.global_step == 16
    assert not [*(tmp_path / "best").glob("*.ckpt")], "what is bad is not the best"
    with pytest.raises(NonFiniteError) as caught:
        run.test(model, loader(n=4), verbose=False)
    assert caught.value.stage == "test"
    assert "val_loss" in error.path.read_text()


@fused_or_not
def test_a_bad_last_step_is_found_before_the_evaluation_and_the_end_of_the_epoch(fused, tmp_path):
    seen = []

    class Watch(L.Callback):
        def on_validation_batch_start(self, *args):
            seen.append("validation")

        def on_train_end(self, *args):
            seen.append("end")

    for data in ((loader(15), loader(n=2)), (loader(15),)):
        run = trainer(tmp_path, Watch(), HaltOnNaN(), num_sanity_val_steps=0)
        assert halted(run, Evaluated(fused=fused), *data).step == 15
        assert (seen, run.global_step) == ([], 15)


class Averaged(Net):
    """Keeps an average of its outputs, which is divided by zero in one step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.lerp_(outputs["loss"], 0.1).div_(1 - int(batch_idx == 3)).sub_(self.average * int(batch_idx == 3))


class Corrupted(Net):
    """Writes NaN into one entry of Adam's state that the next update would read."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3:
            self.trainer.optimizers[0].state[self.net[3].weight]["exp_avg"][0, 0] = torch.nan


@pytest.mark.parametrize(("model", "name"), [(Averaged, "average"), (Corrupted, "exp_avg of net.3.weight")])
def test_a_bad_buffer_or_state_beside_finite_weights_is_not_blamed_on_the_update(tmp_path, model, name):
    saver = ModelCheckpoint(tmp_path / "every", every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    error = halted(trainer(tmp_path, HaltOnNaN(), saver, enable_checkpointing=True), model(), loader())
    assert error.cause == NonFiniteCause.STATE
    assert error.parameters[0].name == name
    assert "learning rate" not in str(error)
    assert_all_finite(tmp_path / "every")


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "XLAStrategy"])
def test_strategies_that_hide_gradients_are_refused_at_setup(name, tmp_path):
    strategy = type(name, (SingleDeviceStrategy,), {})(device="cpu")
    run = trainer(tmp_path, HaltOnNaN(), strategy=strategy)
    with pytest.raises(ValueError, match=f"{name}: .*gradients"):
        run.fit(Net(), loader())
    assert run.global_step == 0


def test_an_unwritable_directory_does_not_stop_the_halt(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = Net()
    error = halted(trainer(tmp_path, HaltOnNaN(directory=str(tmp_path / "file" / "reports"))), model, loader(BAD))
    assert error.step == BAD
    assert (error.path, error.checkpoint_path) == (None, None)
    text = str(error)
    assert text.count("could not be written") == 2
    assert "no checkpoint that it could begin with" in text
    assert "batch 9 holds 1 NaN" in text
    assert "Next: repair those samples" in text


@pytest.mark.parametrize("arguments", [{"max_skips": -1}, {"amp_patience": 0}])
def test_bad_arguments_fail_with_their_value(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value} "):
        HaltOnNaN(**arguments)


@pytest.mark.parametrize("kind", ["tensorboard", "none", "fast_dev_run"])
def test_every_logger(kind, tmp_path):
    options = {"fast_dev_run": 12} if kind == "fast_dev_run" else {"logger": False}
    if kind == "tensorboard":
        options = {"logger": [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]}
    error = halted(trainer(tmp_path, HaltOnNaN(), **options), Net(), loader(BAD))
    assert error.step == BAD
    if kind == "tensorboard":
        assert "dirty data" in error.path.read_text()
        events = b"".join(file.read_bytes() for file in tmp_path.rglob("*.tfevents.*"))
        assert b"memtools/nonfinite_report" in events
        assert b"first used by torch.addmm in net.0" in events
    else:
        assert error.path is None
        assert f"keeps no files ({'logger=False' if kind == 'none' else kind})" in str(error)
        assert not [*tmp_path.rglob("*.ckpt")]


@pytest.mark.parametrize("accumulate", [1, 4])
@fused_or_not
def test_it_adds_at_most_half_a_percent_and_one_batch_to_the_peak(fused, accumulate, tmp_path):
    peaks = []
    for callbacks in ((), (HaltOnNaN(),)):
        with VirtualDevice() as device:
            model = Net(fused=fused)  # large enough for half a percent to mean something
            model.net = nn.Sequential(
                nn.Linear(768, 2048), nn.Tanh(), nn.Linear(2048, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
            )
            run = trainer(tmp_path, *callbacks, logger=False, accumulate_grad_batches=accumulate)
            run.fit(model, DataLoader(Samples(12, 64, 768), batch_size=None))
        peaks.append(device.stats().peak_allocated)
    without, with_it = peaks
    assert with_it - without <= 0.005 * without + 64 * 768 * 4
    if not fused and accumulate == 1:
        assert with_it - without <= 0.0005 * without, "no batch is held there, and buffers are small"


class FailsOfItself(Net):
    at = 3

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == self.at:
            raise KeyError("of the user")


@fused_or_not
@pytest.mark.parametrize(
    ("model", "data", "error"),
    [(Net, loader(), None), (Net, loader(BAD), NonFiniteError), (FailsOfItself, loader(), KeyError)],
)
def test_nothing_is_left_behind(model, data, error, fused, tmp_path):
    made, callback = model(fused=fused), HaltOnNaN()
    run = trainer(tmp_path, callback)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        run.fit(made, data)
    assert "save_checkpoint" not in vars(run)
    assert not hasattr(run.optimizers[0], "found_inf")
    fresh = vars(HaltOnNaN())
    assert {name: vars(callback)[name] for name in fresh} == fresh
    pickle.dumps(callback)
    callback.on_exception(run, made, KeyError())  # undoing twice
    callback.teardown(run, made, "fit")


def test_another_error_right_after_a_step_that_was_held_back_leaves_a_clean_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(step_guard, "reads_at_once", lambda _gradients: False)  # as on a GPU
    observer = Observer()
    L.seed_everything(0, verbose=False)
    trainer(tmp_path, observer).fit(Net("sgd", fused=True), loader(BAD))
    L.seed_everything(0, verbose=False)
    model = FailsOfItself("sgd", fused=True)
    model.at = BAD
    saver = ModelCheckpoint(tmp_path / "last", every_n_epochs=1, save_on_exception=True)
    run = trainer(tmp_path, HaltOnNaN(), saver, enable_checkpointing=True)
    with pytest.raises(KeyError), pytest.warns(UserWarning, match=f"Step {BAD} .*undone"):
        run.fit(model, loader(BAD))
    (file,) = (tmp_path / "last").glob("*.ckpt")
    assert assert_finite(file)["global_step"] == BAD
    assert differences(observer.before, state_bits(model, run.optimizers)) == []


class ReplacesBuffer(Net):
    """Replaces a buffer in each step; another one holds NaN before the bad step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))

    def training_step(self, batch, batch_idx):
        self.centre = self.centre * 0.9 + batch.mean(0) * 0.1
        return self.loss((batch - self.centre) * self.scale)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == BAD - 1:
            self.scale = torch.full((4,), torch.nan)


def test_a_nan_buffer_is_named_beside_one_that_the_step_replaces(tmp_path):
    model = ReplacesBuffer()
    error = halted(trainer(tmp_path, HaltOnNaN()), model, loader())
    assert error.cause == NonFiniteCause.BAD_PARAMETER
    assert "scale (4 NaN of 4, 100%) was already NaN or Inf before this step" in str(error)
    assert model.scale.isnan().all(), "nothing was written into it"
    assert model.centre.isfinite().all()


BROKEN = [
    "examine", "run_again", "step_as_plain", "write_checkpoint", "StepRerun", "bad_state", "torch.save",
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_whatever_fails_in_a_diagnosis_the_error_of_the_bad_step_is_raised(broken, tmp_path, monkeypatch):
    def fails(*_args, **_options):
        raise RecursionError("of ours")

    class BreaksLate(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == BAD:
                monkeypatch.setattr(torch if "." in broken else halt_on_nan, broken.rpartition(".")[2], fails)

    model = Net()
    error = halted(trainer(tmp_path, BreaksLate(), HaltOnNaN()), model, loader(BAD))
    assert (error.step, error.batch_idx if broken != "examine" else BAD) == (BAD, BAD)
    if broken not in {"bad_state", "examine"}:
        assert "RecursionError: of ours" in str(error)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
