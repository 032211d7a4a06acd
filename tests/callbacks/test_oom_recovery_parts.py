"""Surviving a full device: what a step leaves behind, optimizers' updates, reports, and memory that comes back."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_memtools import MemoryMonitor, OOMRecovery, OOMReport, VirtualDevice, release_failed_step
from lightning_memtools.memory.readers import allocated_bytes
from lightning_memtools.recovery.step_recovery import StepRecovery
from lightning_memtools.recovery.step_start import BatchStep
from tests.callbacks.recovery_runs import (
    TIGHT,
    FailsOnce,
    NoLog,
    Sequences,
    StepResult,
    Watched,
    batches,
    close,
    fit,
    one_step,
    prepared,
)
from tests.lightning_models import trainer


def test_a_batch_is_freed_without_a_garbage_collection(tmp_path):
    class Looks(Sequences):
        def __init__(self) -> None:
            super().__init__()
            self.seen_batches: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen_batches.append(weakref.ref(batch[0].untyped_storage()))
            return super().training_step([batch[0].clone(), batch[1]], batch_idx)

    model = Looks()
    data: Any = [lambda: batches((8,))[0]] * 6
    loader: Any = DataLoader(data, batch_size=None, collate_fn=lambda make: make())
    gc.collect()
    gc.disable()
    try:
        trainer(tmp_path, OOMRecovery(), logger=False).fit(model, loader)
        alive = sum(reference() is not None for reference in model.seen_batches)
    finally:
        gc.enable()
    assert alive <= 2  # those that the loader fetched last


class Counts(Watched):
    """Writes a buffer in every step from the given one on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since = since
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= self.since:
            self.steps += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("since", [0, 3])
def test_a_buffer_that_steps_write_is_restored(since, tmp_path):
    model, data = Counts(since), batches((8,) * 4)
    run = trainer(tmp_path, OOMRecovery(on_recover="ignore", loss="mean"), logger=False)
    with FailsOnce(model, 0, batch=3, name="mse_loss"):
        run.fit(model, DataLoader(data, batch_size=None))
    assert float(model.steps) == 3 - since + 2  # the failed attempt is taken back, and two parts have written


# --- the optimizer's step


class Wide(Sequences):
    """Its parameters are most of what it needs."""

    def __init__(self, make: Any, n_groups: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
        self.make, self.n_groups = make, n_groups
        self.updates = 0

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": parameters[index :: self.n_groups]} for index in range(self.n_groups)]
        optimizer = self.make(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.updates += 1


OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
}


class FailsInUpdate(TorchDispatchMode):
    """Memory runs out at one operator of the first update, as long as it runs on lists of tensors."""

    def __init__(self, model: Wide, at: int, *, always: bool = False) -> None:
        super().__init__()
        self.model, self.at, self.n, self.has_failed, self.always = model, at, 0, False, always

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_update = self.model.updates == 1 and self.model.trainer.global_step == 0
        is_own = any(name in str(func) for name in ("_foreach", "zeros_like", "lerp", "sqrt", "addc"))
        if is_update and is_own and (self.always or not self.has_failed):
            self.n += 1
            if self.n > self.at:
                self.has_failed = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_runs_out_of_memory_anywhere_is_run_again_from_the_same_weights(name, tmp_path):
    ends = []
    for at in (None, *range(0, 14, 2)):
        recovery = OOMRecovery(on_recover="ignore")
        with VirtualDevice("10MiB"):  # memory is short: the weights take 1 MiB
            torch.manual_seed(3)
            model = Wide(OPTIMIZERS[name], n_groups=2)
            run = trainer(tmp_path, recovery, logger=False)
            with FailsInUpdate(model, 10**9 if at is None else at) as failing:
                run.fit(model, DataLoader(batches((8, 8)), batch_size=None))
        assert run.global_step == model.updates == 2
        ends.append((model, failing.has_failed, recovery.memory_remark, run.optimizers[0]))
    (whole, _, nothing, _), *others = ends
    assert nothing == ""
    failed = [one for one in others if one[1]]
    assert len(failed) > 1
    for model, _, remark, optimizer in failed:
        assert f"The step of {name} " in remark
        assert "run again with foreach=False" in remark
        close(model, whole)
        assert [group["foreach"] for group in optimizer.param_groups] == [False, False]


def test_an_update_that_fits_in_no_way_leaves_the_weights_as_they_were(tmp_path):
    model = Wide(OPTIMIZERS["AdamW"])
    before: list[Tensor] = []
    for at in (0, 6, 9):
        model.updates = 0
        with VirtualDevice("10MiB"):
            run = trainer(tmp_path, OOMRecovery(), logger=False)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with FailsInUpdate(model, at, always=True), pytest.raises(torch.OutOfMemoryError) as caught:
                run.fit(model, DataLoader(batches((8,)), batch_size=None))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert not run.optimizers[0].state
        assert run.optimizers[0].param_groups[0]["foreach"] is True
        assert "are as before it" in caught.value.__notes__[0]
        assert "8-bit optimizers" in caught.value.__notes__[0]


def test_half_updated_weights_are_named_where_no_copy_was_made(tmp_path):
    model = Wide(OPTIMIZERS["AdamW"])
    with VirtualDevice(), FailsInUpdate(model, 12, always=True), pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(tmp_path, OOMRecovery(), logger=False).fit(model, DataLoader(batches((8,)), batch_size=None))
    assert "may be half-updated" in caught.value.__notes__[0]


class Deep(Sequences):
    """256 MiB of weights, and hardly any activations."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [2048, 4096] * 4 + [2048]
        self.net = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))
        self.optimizer = "AdamW"

    def loss(self, batch: Any) -> Any:
        return self.net(batch[0]).mean()


@pytest.mark.cuda_memory
def test_adamw_fits_without_temporaries_on_pytorchs_cuda_allocator(tmp_path):
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of other tests; a recovery frees them too
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    # Weights, gradients and two states take 1 GiB, and temporaries for all weights a quarter more.
    taken = torch.empty(torch.cuda.mem_get_info()[0] - 1200 * 2**20, dtype=torch.uint8, device="cuda")
    model, recovery = Deep(), OOMRecovery(on_recover="ignore")
    data: Any = [[torch.zeros(4, 2048)]] * 3
    run = trainer(tmp_path, recovery, logger=False, accelerator="cuda", devices=1)
    run.fit(model, DataLoader(data, batch_size=None))
    assert run.global_step == 3
    assert "run again with foreach=False" in recovery.memory_remark
    del run, model, recovery
    gc.collect()
    assert torch.cuda.memory_allocated() - taken.nbytes == base
    del taken


@pytest.mark.cuda_memory
def test_a_caught_error_gives_memory_of_a_gpu_back():
    gc.collect()
    torch.cuda.empty_cache()
    model = nn.Linear(1024, 1024, bias=False, device="cuda")
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    base = torch.cuda.memory_allocated() - model.weight.nbytes  # with cuBLAS's workspace
    kept = []

    def step() -> None:
        hidden = model(torch.zeros(1024, 1024, device="cuda"))
        kept.append(hidden.detach())
        torch.empty(torch.cuda.mem_get_info()[1] * 2, dtype=torch.uint8, device="cuda")

    try:
        step()
    except torch.OutOfMemoryError as error:
        released = release_failed_step(error)
    assert model.weight.grad is None
    assert torch.cuda.memory_allocated() == released.allocated_bytes == base + kept[0].nbytes
    assert any("`kept`" in holder for holder in released.holders)


# --- what is told


@pytest.mark.filterwarnings("ignore:Allocation retries have begun", "ignore:Peak reserved memory is")
def test_the_first_recovery_is_reported_with_what_was_done_and_the_summary_counts_all(tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    callbacks = [MemoryMonitor(), OOMReport(), OOMRecovery(on_recover="ignore")]
    fit(tmp_path, Sequences(), *callbacks, capacity=TIGHT, logger=logger)
    (report,) = tmp_path.rglob("oom-*.md")
    text = report.read_text()
    assert report.name == "oom-train-step2.md"
    assert re.search("The run goes on.* 16 samples .* again in", text)
    assert "(train, step 2, batch 2, forward)" in text.replace("during ", "") or "step 2" in text
    (summary,) = tmp_path.rglob("memory_summary_fit.md")
    assert re.search("OOMRecovery: 1 batch .* again in up to", summary.read_text())
    assert "The run goes on." in capsys.readouterr().out

    # --- after a crash


def test_a_caught_error_gives_its_memory_back_and_names_who_holds_the_rest():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, 512)
            self.outputs: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            self.outputs.append(x * 2)
            return torch.cat([hidden] * 40)

    with VirtualDevice("64MiB") as device:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        F.mse_loss(model.layer(torch.ones(2, 512)), torch.zeros(2, 512)).backward()
        optimizer.step()
        weights = allocated_bytes(device) - model.layer.weight.nbytes - 2048  # without gradients
        batch = torch.zeros(1024, 512)
        try:
            model(batch).sum().backward()
        except torch.OutOfMemoryError as error:
            released = release_failed_step(error)
        assert model.layer.weight.grad is None
        assert released.allocated_bytes == allocated_bytes(device)
        assert released.freed_bytes > 2 * 2**20
        assert released.owned_bytes == weights
        text = str(released)
        assert "2.00 MiB by Net.outputs[0]" in text
        assert "2.00 MiB by `batch` in test_a_caught_error" in text
        assert released.allocated_bytes == weights + 2 * batch.nbytes


def test_after_a_run_that_failed_only_weights_and_states_are_left(tmp_path):
    gc.collect()
    with VirtualDevice(TIGHT) as device:
        model = Sequences()
        run = trainer(tmp_path, OOMReport(directory=str(tmp_path)), logger=False)
        data = DataLoader(batches(), batch_size=None)
        try:
            run.fit(model, data)
        except torch.OutOfMemoryError as error:
            released = release_failed_step(error)
        assert released.allocated_bytes == allocated_bytes(device)
        assert released.owned_bytes == 40 * 2**10  # weights and momentum
        # The batch is the loader's own, and numbers that Lightning logged take a block each.
        others = [holder for holder in released.holders if not ("dataset" in holder or "['batch']" in holder)]
        assert all(holder.startswith("512 B") for holder in others), others


def test_a_recovered_step_leaves_nothing_on_the_device(tmp_path):
    left = []
    for at in (None, 20):
        with VirtualDevice() as device:
            model = prepared()
            one_step(tmp_path, model, OOMRecovery(on_recover="ignore"), at=at)
            gc.collect()
            left.append(device.stats().allocated)
    assert left[0] == left[1]


def test_a_lower_number_of_parts_is_tried_after_a_while_also_by_batches_larger_than_those_that_are_known():
    model, sizes = nn.Linear(1, 1), []

    def forward(batch):
        sizes.append(len(batch))
        if len(batch) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return StepResult(model(batch).mean())

    def tries_whole(recovery, n):
        sizes.clear()
        model.zero_grad()
        batch = torch.ones(n, 1)
        recovery.run(BatchStep(batch, forward, NoLog(), backward=lambda loss: loss.backward(), zero_grad=lambda: None))
        return n in sizes

    for n in (12, 16):
        recovery = StepRecovery(
            model, torch.device("cpu"), max_splits=8, skip_batch=False, loss="mean", allow_batch_norm=False
        )
        assert tries_whole(recovery, 12)
        assert [i for i in range(1, 151) if tries_whole(recovery, n)] == [50, 150]
