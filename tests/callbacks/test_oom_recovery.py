"""Runs that run out of memory and go on: they end where a run on a larger device ends."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memtools import OOMRecovery, OOMReport, VirtualDevice, default_callbacks, release_failed_step
from tests.callbacks.recovery_runs import (
    TIGHT,
    FailsOnce,
    Sequences,
    Timed,
    Watched,
    batches,
    close,
    fit,
    one_step,
    prepared,
    recovery,
)
from tests.lightning_models import trainer

pytestmark = pytest.mark.filterwarnings("ignore:OOMRecovery. A batch")


def by_hand(model: Any, batch: Any, sizes: list[int]) -> None:
    """One SGD step over micro-batches of these sizes, as anyone would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
        (F.mse_loss(model.net(x), y) * (len(x) / sum(sizes))).backward()
    optimizer.step()


def test_wherever_memory_runs_out_in_a_step_the_run_goes_on(tmp_path):
    with VirtualDevice() as device:
        healthy = prepared()
        one_step(tmp_path, healthy, at=None)
        gc.collect()
        allocated = device.stats().allocated
    at, n_recovered = 0, 0
    gc.freeze()  # collections look at what comes from now on
    while True:
        with VirtualDevice() as device:
            model = prepared()
            run = one_step(tmp_path, model, recovery(), at=at)
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
        n_recovered += 16 in model.seen[:-1]
        at += 2
    gc.unfreeze()
    assert n_recovered > 15


class Logs(Timed):
    """Logs a mean, a sum and an extreme, and returns something else than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("given", loss, batch_size=len(batch[0]), on_step=False, on_epoch=True)
        self.log("total", loss * len(batch[0]), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss, "rows": batch[2]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs = outputs


def test_means_of_an_epoch_are_those_of_whole_batches_though_parts_are_unequal(tmp_path):
    data = [[x, y, torch.arange(5)] for x, y in batches((8, 8, 8), n_rows=5)]
    ends = []
    # Never, in the forward pass, and in the backward pass, when the step has logged its values.
    for failing in ({"at": 10**9}, {"at": 12}, {"at": 0, "name": "mse_loss_backward"}):
        torch.manual_seed(3)
        model, called = Logs(), trainer(tmp_path, recovery(), logger=False)
        with FailsOnce(model, batch=1, **failing):
            called.fit(model, DataLoader(data, batch_size=None))
        ends.append((model, called.callback_metrics))
    (whole, expected), *recovered = ends
    assert whole.seen == [5, 5, 5]
    assert whole.outputs["rows"].tolist() == [0, 1, 2, 3, 4]
    for parts, metrics in recovered:
        assert parts.seen == [5, 5, 2, 3, 2, 3]
        for name in ("loss_epoch", "given", "total", "largest"):
            torch.testing.assert_close(metrics[name], expected[name], rtol=1e-5, atol=1e-7)
        # The loss of a step that is returned is that of the whole batch, and all else that of the last part.
        torch.testing.assert_close(parts.outputs["loss"], whole.outputs["loss"])
        assert parts.outputs["rows"].tolist() == [2, 3, 4]


def run_of_two(root: Path, model: Any, at: int | None) -> None:
    """Two batches of one optimizer step; memory runs out at an operator of the second."""
    run = trainer(root, recovery(), logger=False, accumulate_grad_batches=2)
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

    use_reentrant = True

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[:2](batch[0])
        for _ in range(2):
            hidden = checkpoint(self.net[3:5], hidden, use_reentrant=self.use_reentrant)
        return F.mse_loss(self.net[5](hidden), batch[1])


def test_gradients_that_may_be_incomplete_are_not_kept(tmp_path):
    torch.manual_seed(3)
    whole, notes, refused = Reentrant(), [], []
    run_of_two(tmp_path, whole, None)
    for at in range(0, 200, 7):
        torch.manual_seed(3)
        model = Reentrant()
        try:
            run_of_two(tmp_path, model, at)
        except torch.OutOfMemoryError as error:
            notes += error.__notes__
            refused.append(at)
            continue
        close(model.net, whole.net)
        if model.seen == [16, 16]:
            break
    assert notes
    assert all("with reentrant checkpointing" in note and "use_reentrant=False helps" in note for note in notes)
    for at in refused[:3]:  # it does
        torch.manual_seed(3)
        model = Reentrant()
        model.use_reentrant = False
        run_of_two(tmp_path, model, at)
        close(model.net, whole.net)


class Normalized(Timed):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1][..., 0])


def test_batch_norm_is_refused_unless_it_is_allowed(tmp_path):
    torch.manual_seed(3)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        one_step(tmp_path, Normalized(), OOMRecovery(loss="mean"), at=12)
    assert "net.2 normalizes" in caught.value.__notes__[0]
    assert "allow_batch_norm=True accepts that" in caught.value.__notes__[0]
    torch.manual_seed(3)
    model = Normalized()
    one_step(tmp_path, model, recovery(allow_batch_norm=True), at=12)
    torch.manual_seed(3)
    hand = Normalized()
    by_hand(hand, [batches((8,))[0][0], batches((8,))[0][1][..., 0]], [8, 8])
    assert {name: torch.equal(value, hand.state_dict()[name]) for name, value in model.state_dict().items()} == (
        dict.fromkeys(model.state_dict(), True)
    )


def test_a_batch_that_needs_more_parts_than_max_splits_is_refused_with_the_number(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(tmp_path, Sequences(), recovery(max_splits=2), data=batches((64, 1024)), capacity=TIGHT)
    assert "max_splits=2 parts are too large" in caught.value.__notes__[0]


def test_a_batch_whose_samples_alone_are_too_large_is_refused(tmp_path):
    data = batches((64, 100_000, 64), n_rows=1)
    report = OOMReport(directory=str(tmp_path / "refused"), snapshot=False)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(tmp_path, Sequences(), recovery(), report, data=data, capacity="30MiB")
    reason = "each of its 1 samples"
    assert reason in caught.value.__notes__[0]
    (page,) = (tmp_path / "refused").glob("*.md")
    assert reason in page.read_text()


def test_batches_of_evaluation_are_left_alone(tmp_path):
    class Evaluates(Sequences):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    with VirtualDevice(TIGHT), pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(tmp_path, recovery(), logger=False).validate(Evaluates(), DataLoader(batches((2048,)), batch_size=None))
    assert not hasattr(caught.value, "__notes__")


def test_bad_arguments_of_the_recovery_are_refused():
    with pytest.raises(ValueError, match=r"loss .* got 'max'"):
        OOMRecovery(loss="max")
    for name, wrong in (("max_splits", "2"), ("loss_weight", 3), ("split_batch", "halves")):
        with pytest.raises(ValueError, match=f"{name} .* got {wrong!r}"):
            OOMRecovery(loss="mean", **{name: wrong})


class RegistersHook(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy.model, DistributedDataParallel)
        trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


@pytest.mark.parametrize(
    ("options", "other", "message"),
    [
        ({"find_unused_parameters": True}, L.Callback, "find_unused_parameters=True"),
        ({"static_graph": True}, L.Callback, "static_graph=True"),
        ({}, RegistersHook, "a communication hook is registered"),
    ],
)
def test_what_ranks_say_to_each_other_in_a_step_is_refused(options, other, message, tmp_path):
    run = trainer(tmp_path, other(), OOMRecovery(loss="mean"), logger=False, strategy=DDPStrategy(**options), devices=1)
    try:
        with pytest.raises(ValueError, match=message):
            run.fit(Sequences(), DataLoader(batches((8,)), batch_size=None))
    finally:
        torch.distributed.destroy_process_group()


# MemoryMonitor warns of the full device, and rightly so.
@pytest.mark.filterwarnings("ignore:Allocation retries have begun", "ignore:Peak reserved memory is")
def test_a_run_that_dies_without_it_ends_with_it_as_on_a_larger_device(tmp_path):
    """Beside the default callbacks. Its bits are those of test_oom_recovery_by_hand.py."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, Sequences(), capacity=TIGHT)
    model, larger = Sequences(), Sequences()
    run = fit(tmp_path, model, *default_callbacks(), recovery(), capacity=TIGHT)
    other = fit(tmp_path, larger)
    close(model, larger)
    assert {4, 8} & {*model.seen}
    assert run.global_step == other.global_step == 6
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == other.lr_scheduler_configs[0].scheduler.last_epoch
    assert not [*tmp_path.rglob("oom-*")]  # memory that ran out and was recovered is no report


class OnCuda(Sequences):
    """Its loss is that of a wide network: 512 samples do not fit into 1 GiB, and 64 do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))

    def loss(self, batch: Any) -> Any:
        return self.net(batch[0]).mean()


@pytest.mark.cuda_memory
@pytest.mark.parametrize(("precision", "n_parts"), [("32-true", 4), ("bf16-mixed", 2), ("16-mixed", 2)])
def test_on_pytorchs_cuda_allocator(precision, n_parts, tmp_path):
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of other tests; a recovery frees them too
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
    run = trainer(tmp_path, recovery(), logger=False, accelerator="cuda", devices=1, precision=precision)
    run.fit(model, data)
    parts = [512 // n_parts] * n_parts
    failed = [512 // 2**power for power in range(1, n_parts.bit_length() - 1)]
    assert model.seen == [64, 512, *failed, *parts, 64, *parts]
    assert run.global_step == 4
    del run, model
    gc.collect()
    assert torch.cuda.memory_allocated() == base
    del taken
