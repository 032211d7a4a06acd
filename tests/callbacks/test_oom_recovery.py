"""Runs that run out of memory and go on: they end where a run on a larger device ends."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memtools import OOMRecovery, OOMReport, VirtualDevice, default_callbacks, release_failed_step
from lightning_memtools._torch import clear_cublas_workspaces
from tests.callbacks.recovery_runs import (
    TIGHT,
    TRIED,
    FailsOnce,
    Sequences,
    Timed,
    Watched,
    batches,
    close,
    fit,
    one_step,
    prepared,
    same,
)
from tests.lightning_models import trainer


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 3},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
    ],
    ids=["plain", "clipping", "accumulation", "accumulation_of_4_and_clipping", "bf16"],
)
def test_a_run_that_dies_without_it_ends_with_it_as_on_a_larger_device(optimizer, options, tmp_path):
    capacity = "4MiB" if "precision" in options else TIGHT
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, Sequences(optimizer=optimizer), capacity=capacity, **options)
    model, recovery = Sequences(optimizer=optimizer), OOMRecovery(on_recover="ignore")
    run = fit(tmp_path, model, recovery, capacity=capacity, **options)
    larger = Sequences(optimizer=optimizer)
    other = fit(tmp_path, larger, **options)
    if "precision" in options:  # 8 bits of mantissa in another order
        for a, b in zip(model.parameters(), larger.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)
    else:
        close(model, larger)
    assert run.global_step == other.global_step
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == other.lr_scheduler_configs[0].scheduler.last_epoch
    assert 4 in model.seen or 8 in model.seen


class Unscheduled(Sequences):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class SchedulesLater(L.Callback):
    """Makes a scheduler while the fit runs."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.9)

    def on_train_batch_end(self, *_args: Any) -> None:
        self.schedule.step()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("scheduler", ["of weight averaging", "of the user"])
def test_schedulers_made_during_the_fit_are_served(scheduler, is_first, tmp_path):
    ends = []
    for capacity, recoveries in [(None, []), (TIGHT, [OOMRecovery(on_recover="ignore")])]:
        averaging = StochasticWeightAveraging(1e-2, swa_epoch_start=1, device=None)
        other = averaging if scheduler == "of weight averaging" else SchedulesLater()
        callbacks = [*recoveries, other] if is_first else [other, *recoveries]
        ends.append(Unscheduled())
        fit(tmp_path, ends[-1], *callbacks, capacity=capacity, max_epochs=3)
    close(*ends)


@pytest.mark.parametrize("has_hook", [False, True], ids=["plain", "gradient_hook"])
def test_the_gradient_scaler_sees_one_step_for_each_batch(has_hook, tmp_path):
    ends, scaled = [], []

    def halve(gradient: Tensor) -> Tensor:
        scaled.append(float(gradient.abs().max()))
        return gradient / 2

    for capacity in (None, "4MiB"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        model, recovery = Sequences(), OOMRecovery(on_recover="ignore")
        if has_hook:  # it sees the scaled gradients of each part, as of accumulated batches
            model.net[0].weight.register_hook(halve)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        run = fit(tmp_path, model, recovery, capacity=capacity, plugins=precision)
        ends.append((model, scaler.state_dict(), run.global_step))
    (larger, its_state, its_step), (model, state, step) = ends
    assert recovery.recoveries.n_recovered == 1
    assert state == its_state
    assert state["scale"] == 2.0 ** (4 + 3)  # six steps without Inf
    assert step == its_step == 6
    for a, b in zip(model.parameters(), larger.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.002)  # 11 bits of mantissa in another order


def by_hand(model: Any, batch: Any, sizes: list[int]) -> None:
    """One SGD step over micro-batches of these sizes, as anyone would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
        (F.mse_loss(model.net(x), y) * (len(x) / sum(sizes))).backward()
    optimizer.step()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("at", [12, -6], ids=["forward", "end_of_backward"])
def test_the_bits_are_those_of_micro_batches_by_hand(at, dropout, tmp_path):
    if at < 0:
        counted = FailsOnce(prepared(dropout=dropout), 10**9)
        with counted:
            trainer(tmp_path, logger=False).fit(counted.model, DataLoader(batches((8,)), batch_size=None))
        at += counted.n
    model, hand = prepared(dropout=dropout), prepared(dropout=dropout)
    failing = one_step(tmp_path, model, OOMRecovery(on_recover="ignore", loss="mean"), at=at).failing
    assert model.seen == [16, 8, 8]
    assert failing.n_added == (0 if at == 12 else 4)  # of six parameters
    assert torch.equal(model.streams[0], model.streams[1])  # the parts draw from where the batch began
    torch.set_rng_state(model.streams[0])
    by_hand(hand, batches((8,))[0], [8, 8])
    assert same(model, hand)
    assert torch.equal(model.streams[-1], torch.get_rng_state())


def test_parts_of_ones_own_are_weighted_by_their_sizes(tmp_path):
    def uneven(batch: Any, n_parts: int) -> Any:
        assert n_parts == 2
        return [[one[:10] for one in batch], [one[10:] for one in batch]]

    model, hand = prepared(), prepared()
    one_step(tmp_path, model, OOMRecovery(on_recover="ignore", loss="mean", split_batch=uneven), at=12)
    assert model.seen == [16, 10, 6]
    by_hand(hand, batches((8,))[0], [10, 6])
    assert same(model, hand)


@pytest.mark.parametrize(("loss", "stride"), [("mean", 1), ("auto", 13)])  # the trials of "auto" fail too, in places
def test_wherever_memory_runs_out_in_a_step_the_run_goes_on(loss, stride, tmp_path):
    with VirtualDevice() as device:
        healthy = prepared()
        one_step(tmp_path, healthy, at=None)
        gc.collect()
        allocated = device.stats().allocated
    at, recovered = 0, 0
    gc.freeze()  # collections look at what comes from now on
    while True:
        with VirtualDevice() as device:
            model = prepared()
            run = one_step(tmp_path, model, OOMRecovery(on_recover="ignore", loss=loss), at=at)
            gc.collect()
            assert device.stats().allocated == allocated, at
        for a, b in zip(model.gradients[0], healthy.gradients[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        close(model.net, healthy.net)
        metrics = run.callback_metrics
        assert float(metrics["metric"]) == pytest.approx(float(metrics["loss_epoch"]))
        assert run.global_step == 1
        if run.failing.n <= at:
            break  # no operator is left
        recovered += 16 in model.seen[:-1]
        at += stride
    gc.unfreeze()
    assert recovered > 30 // stride


def test_logged_values_are_those_of_the_whole_batch(tmp_path):
    with VirtualDevice():
        ends = [one_step(tmp_path, prepared(), OOMRecovery(on_recover="ignore"), at=at) for at in (None, 15)]
    one, other = (run.callback_metrics for run in ends)
    assert one.keys() == other.keys() == {"loss", "loss_step", "loss_epoch", "metric"}
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-7)


def run_of_two(root: Path, model: Any, at: int | None) -> None:
    """Two batches of one optimizer step; memory runs out at an operator of the second."""
    run = trainer(root, OOMRecovery(on_recover="ignore", loss="mean"), logger=False, accumulate_grad_batches=2)
    with FailsOnce(model, 10**9 if at is None else at, batch=1):
        run.fit(model, DataLoader(batches((8, 8)), batch_size=None))


def test_gradients_of_earlier_batches_stay_right_wherever_memory_runs_out_in_a_later_one(tmp_path):
    whole, seen = prepared(), set()
    run_of_two(tmp_path, whole, None)
    for at in range(0, 200, 3):
        model = prepared()
        run_of_two(tmp_path, model, at)
        for a, b in zip(model.gradients[0], whole.gradients[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        close(model.net, whole.net)
        seen.add(tuple(model.seen))
        if model.seen == [16, 16]:
            break  # no operator is left
    assert seen == {(16, 16), (16, 16, 8, 8)}


class Reentrant(Watched):
    """The weights of a layer get two gradients, each in a backward pass of its own within the one of the loss."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[:2](batch[0])
        for _ in range(2):
            hidden = checkpoint(self.net[3:5], hidden, use_reentrant=True)
        return F.mse_loss(self.net[5](hidden), batch[1])


def test_gradients_that_may_be_incomplete_are_not_kept(tmp_path):
    torch.manual_seed(3)
    whole, notes = Reentrant(), []
    run_of_two(tmp_path, whole, None)
    for at in range(0, 200, 7):
        torch.manual_seed(3)
        model = Reentrant()
        try:
            run_of_two(tmp_path, model, at)
        except torch.OutOfMemoryError as error:
            notes += error.__notes__
            continue
        close(model.net, whole.net)
        if model.seen == [16, 16]:
            break
    assert notes
    assert all("with reentrant checkpointing" in note for note in notes)


class Normalized(Timed):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1][..., 0])


def test_batch_norm_is_refused_unless_it_is_allowed(tmp_path):
    torch.manual_seed(3)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        one_step(tmp_path, Normalized(), OOMRecovery(), at=12)
    said = "net.2 normalizes"
    assert said in caught.value.__notes__[0]
    torch.manual_seed(3)
    model = Normalized()
    one_step(tmp_path, model, OOMRecovery(allow_batch_norm=True, on_recover="ignore", loss="mean"), at=12)
    torch.manual_seed(3)
    hand = Normalized()
    by_hand(hand, [batches((8,))[0][0], batches((8,))[0][1][..., 0]], [8, 8])
    assert {name: torch.equal(value, hand.state_dict()[name]) for name, value in model.state_dict().items()} == (
        dict.fromkeys(model.state_dict(), True)
    )


def test_a_sum_is_added_and_a_loss_over_pairs_refused(tmp_path):
    class Sums(Watched):
        reduction = "sum"

    class Pairs(Watched):
        def loss(self, batch: Any) -> Tensor:
            out = self.net[:5](batch[0])[:, 0]
            return F.cross_entropy(out @ out.T, torch.arange(len(out)))  # each sample is to be told from the others

    ends = []
    for at in (None, 12):
        torch.manual_seed(3)
        model = Sums()
        one_step(tmp_path, model, OOMRecovery(on_recover="ignore"), at=at)
        ends.append(model)
    for a, b in zip(ends[0].gradients[0], ends[1].gradients[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.manual_seed(3)
    said = r"differs from the \w+ of theirs by \d+\.\d%"
    n_operators = one_step(tmp_path, Pairs(), OOMRecovery(), at=None).failing.n
    with pytest.raises(torch.OutOfMemoryError, match=said):
        one_step(tmp_path, Pairs(), OOMRecovery(), at=n_operators - 10)
    torch.manual_seed(3)
    model = Sums()
    one_step(tmp_path, model, OOMRecovery(on_recover="ignore", loss="sum"), at=12)
    assert model.seen == [16, 8, 8]
    for a, b in zip(ends[0].gradients[0], model.gradients[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("n_given", "said"),
    [
        (lambda n: n, "max_splits=2 parts are too large"),
        (lambda n: 2 * n, "split_batch returned 4 parts, and max_splits=2"),
    ],
)
def test_a_batch_that_needs_more_parts_than_max_splits_is_refused_with_the_number(n_given, said, tmp_path):
    def quarters(batch: Any, n_parts: int) -> Any:
        return list(zip(*(one.tensor_split(n_given(n_parts)) for one in batch), strict=True))

    recovery = OOMRecovery(max_splits=2, split_batch=quarters, loss="mean")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(tmp_path, Sequences(), recovery, data=batches((64, 1024)), capacity=TIGHT)
    assert said in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_the_parts_that_split_batch_made_are_counted(tmp_path):
    def quarters(batch: Any, n_parts: int) -> Any:
        return list(zip(*(one.tensor_split(2 * n_parts) for one in batch), strict=True))

    model, recovery = prepared(), OOMRecovery(on_recover="ignore", loss="mean", split_batch=quarters)
    one_step(tmp_path, model, recovery, at=12)
    assert model.seen == [16, 4, 4, 4, 4]
    assert recovery.recoveries.n_parts == 4
    assert "was run again in 4 parts" in recovery.recoveries.latest


class Leaves(Sequences):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_a_batch_that_fits_in_no_parts_is_skipped_or_refused(tmp_path):
    data = batches((64, 100_000, 64), n_rows=1)
    model, without = Sequences(), Leaves()
    logger = CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match="A batch was skipped"):
        fit(tmp_path, model, OOMRecovery(skip_batch=True), data=data, capacity="30MiB", logger=logger)
    assert "memory/oom_skipped_batches" in (Path(logger.log_dir) / "metrics.csv").read_text()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned `None`")  # Lightning says so once per process
        fit(tmp_path, without, data=data)
    assert same(model, without)
    report = OOMReport(directory=str(tmp_path / "reports"), snapshot=False)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(tmp_path, Sequences(), OOMRecovery(), report, data=data, capacity="30MiB")
    reason = "each of its 1 samples"
    assert reason in caught.value.__notes__[0]
    (page,) = (tmp_path / "reports").glob("*.md")
    assert reason in page.read_text()


def test_batches_as_large_are_split_from_the_beginning(tmp_path):
    model = Sequences()
    fit(tmp_path, model, OOMRecovery(on_recover="ignore", loss="mean"), capacity=TIGHT)
    # Of six batches the third and the fifth are long; only the third had to fail.
    assert model.seen[:3] == [16, 16, 16]
    assert model.seen.count(16) == 5
    n_parts = 16 // model.seen[-2]
    assert model.seen[-1 - n_parts :] == [16 // n_parts] * n_parts + [16]


def test_evaluation_batches_are_split_and_their_outputs_joined(tmp_path):
    data = DataLoader(batches((512, 512)), batch_size=None)
    outputs, values = [], []
    for callbacks, capacity in (([], "10GiB"), ([OOMRecovery(on_recover="ignore")], "3MiB")):
        torch.manual_seed(3)
        model = Sequences()
        run = trainer(tmp_path, *callbacks, logger=False)
        with VirtualDevice(capacity):
            values.append(run.validate(model, data, verbose=False)[0]["val"])
            assert run.test(model, data, verbose=False)[0]["val"] == pytest.approx(values[-1])
            outputs.append(run.predict(model, data))
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one["out"], other["out"])
        torch.testing.assert_close(one["mean"], other["mean"])
    torch.manual_seed(3)
    with VirtualDevice("3MiB"), pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, logger=False).predict(Sequences(), data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_splits": 1}, "max_splits .* at least 2, got 1"),
        ({"loss": "max"}, "loss .* got 'max'"),
        ({"loss": "sum", "loss_weight": len}, 'loss_weight .* loss="sum"'),
        ({"on_recover": "shout"}, "on_recover .* got 'shout'"),
    ],
)
def test_bad_arguments_of_the_recovery_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OOMRecovery(**arguments)
    for name, wrong in (("max_splits", "2"), ("loss_weight", 3), ("split_batch", "halves")):
        with pytest.raises(TypeError, match=f"{name} .* got {wrong!r}"):
            OOMRecovery(**{name: wrong})


class RegistersHook(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy.model, DistributedDataParallel)
        trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


@pytest.mark.parametrize(
    ("options", "other", "message"),
    [
        (
            {"find_unused_parameters": True},
            L.Callback,
            "find_unused_parameters=True",
        ),
        ({"static_graph": True}, L.Callback, "static_graph=True"),
        ({}, RegistersHook, "a communication hook is registered"),
    ],
)
def test_what_ranks_say_to_each_other_in_a_step_is_refused(options, other, message, tmp_path):
    run = trainer(tmp_path, other(), OOMRecovery(), logger=False, strategy=DDPStrategy(**options), devices=1)
    try:
        with pytest.raises(ValueError, match=message):
            run.fit(Sequences(), DataLoader(batches((8,)), batch_size=None))
    finally:
        torch.distributed.destroy_process_group()


def test_a_batch_without_samples_and_parts_that_do_not_add_up_are_quoted(tmp_path, capsys):
    class Scalars(Watched):
        def loss(self, batch: Any) -> Any:
            return self.net(torch.ones(8) * batch["x"]).sum()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.now = batch_idx
            return self.loss(batch)

    class Loses(Watched):
        def split_batch(self, batch: Any, n_parts: int) -> Any:
            return [[one[:4] for one in batch]]

    def fails(batch: Any, n_parts: int) -> Any:
        raise KeyError("x")

    for model, options, data, said in (
        (Scalars(), {}, [{"x": torch.ones(())}], "a dict of tensors of [[]]"),
        (Loses(), {}, None, "parts of [4] samples"),
        (prepared(), {"split_batch": lambda *_: None}, None, "split_batch returned None for 2 parts"),
        (prepared(), {"split_batch": fails}, None, "split_batch raised KeyError: 'x'"),
    ):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            one_step(tmp_path, model, OOMRecovery(**options), at=5, data=data)
        assert said in caught.value.__notes__[0]
        assert said in " ".join(capsys.readouterr().out.split())


# MemoryMonitor warns of the full device, and rightly so.
@pytest.mark.filterwarnings("ignore:Allocation retries have begun", "ignore:Peak reserved memory is")
def test_beside_the_default_callbacks_the_run_ends_as_on_a_larger_device(tmp_path):
    model, larger = Sequences(), Sequences()
    run = fit(tmp_path, model, *default_callbacks(), OOMRecovery(on_recover="ignore"), capacity=TIGHT)
    fit(tmp_path, larger)
    close(model, larger)
    assert run.global_step == 6
    assert not [*tmp_path.rglob("oom-*")]  # memory that ran out and was recovered is no report


class OnCuda(Sequences):
    """Its loss is that of a wide network: 512 samples do not fit into 1 GiB, and 64 do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))

    def loss(self, batch: Any) -> Any:
        return self.net(batch[0]).mean()


@pytest.mark.cuda_memory
@pytest.mark.parametrize(
    ("precision", "loss", "n_parts"),
    [("32-true", "mean", 4), ("32-true", "auto", 4), ("bf16-mixed", "mean", 2), ("16-mixed", "mean", 2)],
)
def test_on_pytorchs_cuda_allocator(precision, loss, n_parts, tmp_path):
    gc.collect()
    clear_cublas_workspaces()  # of other tests; a recovery frees them too
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(free - 2**30, dtype=torch.uint8, device="cuda")  # leaves 1 GiB
    base = torch.cuda.memory_allocated()
    model = OnCuda()
    sizes: Any = [[torch.zeros(n, 256, 64)] for n in (64, 512, 64, 512)]
    data = DataLoader(sizes, batch_size=None)
    plain = trainer(tmp_path, logger=False, accelerator="cuda", devices=1, precision=precision)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        plain.fit(OnCuda(), data)
    release_failed_step(caught.value)
    del plain, caught
    gc.collect()
    assert torch.cuda.memory_allocated() == base
    recovery = OOMRecovery(on_recover="ignore", loss=loss)
    run = trainer(tmp_path, recovery, logger=False, accelerator="cuda", devices=1, precision=precision)
    run.fit(model, data)
    parts = [512 // n_parts] * n_parts
    tried = TRIED if loss == "auto" else []  # the losses and gradients of a dry run are zeros
    failed = [512 // 2**power for power in range(1, n_parts.bit_length() - 1)]
    assert model.seen == [64, 512, *tried, *failed, *parts, 64, *tried, *parts]
    assert run.global_step == 4
    del run, recovery, model
    gc.collect()
    assert torch.cuda.memory_allocated() == base
    del taken


def test_a_recovery_is_warned_of_and_logged(tmp_path):
    logger = CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match="A batch of 16 samples"):
        fit(tmp_path, Sequences(), OOMRecovery(), capacity=TIGHT, logger=logger)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "memory/oom_recoveries" in rows
    assert "memory/micro_batches" in rows
