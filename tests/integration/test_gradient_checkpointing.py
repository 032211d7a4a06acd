"""GradientCheckpointing in real Trainers: one process and two, every logger, failures."""

from __future__ import annotations

import functools
import itertools
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_memtools._torch import FakeTensor
from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memtools.checkpointing.repetition_proof import RecomputationDiffersWarning
from lightning_memtools.ending_signals import ended_by_signals
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.known_values import ValueReaders, values_known
from tests.checkpointing.models import encoder
from tests.integration import long_planning_run
from tests.lightning_models import Adversaries, Regression, half, loader, opaque, trainer
from tests.two_processes import run_script, started_script


class Deep(Regression):
    """Wide hidden layers, so that activations are worth recomputing."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(5)]
        self.net = nn.Sequential(nn.Linear(4, 32), *blocks, nn.Linear(32, 1))


class Encoder(Regression):
    """A pre-norm encoder in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 512), nn.Unflatten(1, (16, 32)), *encoder(4), nn.Flatten(), nn.Linear(512, 1)
        )


def fit(root: Path, *callbacks: L.Callback, model: Any = Deep, **options) -> Any:
    L.seed_everything(0, verbose=False)
    made = model()
    trainer(root, *callbacks, **options).fit(made, loader(512, 64), loader(16))
    return made


def assert_same_bits(one: L.LightningModule, other: L.LightningModule) -> None:
    for (name, value), twin in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, twin), name


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
    assert_same_bits(with_it, fit(tmp_path, model=model, logger=False, **options))
    assert all("forward" not in vars(one) for one in with_it.modules())


def test_the_table_is_in_every_logger_a_file_and_the_console_with_the_measured_peak(tmp_path, capsys):
    loggers = [TensorBoardLogger(tmp_path, name="", version="board"), CSVLogger(tmp_path, name="", version="table")]
    callback = GradientCheckpointing()
    with VirtualDevice():
        fit(tmp_path, callback, logger=loggers)
    assert callback.plan is not None
    text = (tmp_path / "board" / "memtools" / "checkpoint_plan.md").read_text()
    printed = " ".join(capsys.readouterr().out.split())
    for word in ("Dropout never runs twice", "extra computation", "predicted peak (simulated)", "measured peak"):
        assert word in text
        assert word.split()[-1] in printed
    assert "measured peak" in printed
    (line,) = (line for line in text.splitlines() if "measured peak" in line)
    share = float(line.split("(")[1].split("%")[0])
    assert abs(share) <= 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("model", [Deep, Encoder])
def test_the_predicted_peak_is_that_of_the_planned_training_at_any_precision(model, precision, tmp_path):
    class Peak(L.Callback):
        def on_train_batch_start(self, *args):
            device.reset_peaks()

        def on_train_batch_end(self, *args):
            peaks.append(device.stats().peak_allocated)

    callback, peaks = GradientCheckpointing(), []
    # Lightning itself would take bfloat16 instead of float16 on a CPU. A small scale, so that no step is skipped: the
    # optimizer has its state from the first step on.
    options = {"plugins": half(2.0)} if precision == "16-mixed" else {"precision": precision}
    with VirtualDevice() as device:
        fit(tmp_path, callback, Peak(), model=model, logger=False, limit_train_batches=4, **options)
    assert callback.plan.refused is None
    assert callback.plan.peak_bytes == pytest.approx(max(peaks[1:]), rel=0.02)


def test_planning_fetches_no_batch(tmp_path):
    class Counts(torch.utils.data.TensorDataset):
        fetched = 0

        def __getitem__(self, index):
            self.fetched += 1
            return super().__getitem__(index)

    data = Counts(*loader(512, 64).dataset.tensors)
    trainer(tmp_path, GradientCheckpointing(), logger=False).fit(Deep(), torch.utils.data.DataLoader(data, 64))
    assert data.fetched == len(data)


def test_a_checkpoint_saved_within_training_is_that_of_the_plain_model(tmp_path):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert any("forward" in vars(one) for one in pl_module.modules())
            trainer.save_checkpoint(tmp_path / "model.ckpt")

    with_it = fit(tmp_path, GradientCheckpointing(), Saves(), logger=False)
    saved = torch.load(tmp_path / "model.ckpt", weights_only=False)["state_dict"]
    assert list(saved) == list(with_it.state_dict())


def test_a_failing_step_leaves_nothing_behind(tmp_path):
    class Fails(Deep):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx:
                raise RuntimeError("from the user's code")

    model = Fails()
    with pytest.raises(RuntimeError, match="from the user's code"):
        trainer(tmp_path, GradientCheckpointing(), logger=False).fit(model, loader(512, 64))
    assert all(not {"forward", "__getstate__"} & set(vars(one)) for one in model.modules())


def test_the_traced_step_changes_none_of_the_users_objects(tmp_path):
    model = fit(tmp_path, GradientCheckpointing(), logger=False)
    assert len(model.train_losses) == 8


def test_a_budget_that_no_plan_fits_raises_in_fit(tmp_path):
    with pytest.raises(ValueError, match="The smallest reachable peak is"):
        fit(tmp_path, GradientCheckpointing(memory_budget="1KiB"), logger=False)


def test_a_compiled_model_is_left_unchanged_with_a_warning(tmp_path):
    L.seed_everything(0, verbose=False)
    model = torch.compile(Deep(), backend="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer(tmp_path, GradientCheckpointing(), logger=False).fit(model, loader(64, 32))
    assert any("unchanged: it is compiled" in str(one.message) for one in said)


@pytest.mark.parametrize("case", ["off", "on", "fsdp2"])
def test_two_ranks_recompute_the_same_and_end_in_the_same_bits(case, tmp_path):
    """DDP with find_unused_parameters off and on; FSDP 2, where nothing is gathered more often than without."""
    run_script(Path(__file__).with_name("checkpointing_ddp_run.py"), tmp_path, case, timeout_s=240)
    found = {
        (name, rank): torch.load(tmp_path / f"{case}-{name}-{rank}.pt", weights_only=False)
        for name in ("plain", "checkpointed")
        for rank in (0, 1)
    }
    plans = [found["checkpointed", rank]["plan"] for rank in (0, 1)]
    assert plans[0] == plans[1]
    recomputed = [chain for chain in plans[0] if chain.ranges]
    assert recomputed
    if case == "fsdp2":
        sharded = {f"net.{at}" for at in (0, 2, 3, 4, 5, 7)}
        assert {f"net.{at}" for at in range(2, 6)} & {chain.name for chain in recomputed}
        for chain in recomputed:
            again = {chain.layers[at] for one in chain.ranges for at in range(one.start, one.stop)}
            assert chain.is_module or not again & sharded
    for rank in (0, 1):
        assert found["checkpointed", rank]["gathered"] == found["plain", rank]["gathered"]
        for name, value in found["plain", rank]["weights"].items():
            assert torch.equal(value, found["checkpointed", rank]["weights"][name]), name


@pytest.mark.parametrize("case", ["off-offloaded", "fsdp2-offloaded"])
def test_two_ranks_offload_the_same_and_end_in_the_same_bits(case, tmp_path):
    run_script(Path(__file__).with_name("checkpointing_ddp_run.py"), tmp_path, case, timeout_s=240)
    plans = []
    for rank in (0, 1):
        plain, offloaded = (
            torch.load(tmp_path / f"{case}-{name}-{rank}.pt", weights_only=False) for name in ("plain", "checkpointed")
        )
        plans.append(offloaded["plan"])
        assert offloaded["peak"] < 0.8 * plain["peak"]
        assert offloaded["gathered"] == plain["gathered"]
        for name, value in plain["weights"].items():
            assert torch.equal(value, offloaded["weights"][name]), name
    assert plans[0] == plans[1]
    assert any(chain.offloaded for chain in plans[0])


def test_a_plan_made_before_sharding_gathers_no_parameter_more_often_and_ends_in_the_same_bits(tmp_path):
    run_script(Path(__file__).with_name("checkpointing_ddp_run.py"), tmp_path, "fsdp2-planned-before", timeout_s=240)
    for rank in (0, 1):
        plain, planned = (
            torch.load(tmp_path / f"fsdp2-planned-before-{name}-{rank}.pt", weights_only=False)
            for name in ("plain", "checkpointed")
        )
        assert planned["gathered"] == plain["gathered"] > 0
        for name, value in plain["weights"].items():
            assert torch.equal(value, planned["weights"][name]), name


@pytest.mark.cuda_memory
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_measured_peak_on_a_gpu_is_near_the_predicted_one(dropout):
    from lightning_memtools.checkpointing.planning import plan_checkpoints  # noqa: PLC0415

    model = encoder(12, dropout).cuda()
    x = torch.randn(256, 64, 32, device="cuda")
    plan = plan_checkpoints(model, x)
    peaks = []
    for chains in (False, True):
        handle = plan.apply(model) if chains else None
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            loss = model(x).sum()
            model.zero_grad()
            loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        if handle is not None:
            handle.remove()
    workspace = 2 * 32 * 2**20  # cuBLAS, forward and backward
    assert peaks[1] < peaks[0]
    assert plan.peak_bytes == pytest.approx(peaks[1], rel=0.1, abs=workspace)


def measured_share(root: Path) -> float:
    """The difference between measured and predicted peak in the plan's report, as percent of the predicted one."""
    (report,) = root.rglob("checkpoint_plan.md")
    (line,) = (line for line in report.read_text().splitlines() if "measured peak" in line)
    return float(line.split("(")[1].split("%")[0])


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


class Sparse(Deep):
    """Looks up rows of an embedding, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 4, sparse=True)

    def loss(self, batch):
        x, y = batch
        rows = x[:, 0].mul(64).long().clamp(-256, 255) + 256
        return super().loss((x + self.embedding(rows), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_sparse_gradients_are_those_of_the_plain_run(tmp_path):
    class Gradients(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            made.append(pl_module.embedding.weight.grad.clone())

    gradients, runs = [], []
    for callbacks in ([callback := GradientCheckpointing(bn_dropout="recompute")], []):
        gradients.append(made := [])
        runs.append(fit(tmp_path, *callbacks, Gradients(), model=Sparse, logger=False))
    assert callback.plan.refused is None
    assert len(gradients[0]) == len(gradients[1]) == 8
    for one, other in zip(*gradients, strict=True):
        assert one.layout is torch.sparse_coo
        assert torch.equal(one.coalesce().indices(), other.coalesce().indices())
        assert torch.equal(one.coalesce().values(), other.coalesce().values())
    assert_same_bits(*runs)


@pytest.mark.parametrize(
    ("model", "others", "options"),
    [
        (Deep, (), {}),
        (Deep, (), {"accumulate_grad_batches": 2}),
        (Deep, (WeightAveraging,), {}),
        (Manual, (), {}),
        (TakingApart, (), {}),
        (Sparse, (), {}),
    ],
    ids=["plain", "accumulated", "averaged", "manual", "taking the batch apart", "sparse"],
)
def test_the_predicted_peak_is_the_measured_one_whatever_the_step_does(model, others, options, tmp_path):
    with VirtualDevice(cuda_like=True):
        callback = GradientCheckpointing(memory_budget=0.8, bn_dropout="recompute")
        fit(tmp_path, callback, *(make() for make in others), model=model, **options)
    assert callback.plan.planned.peak_bytes < callback.plan.plain.peak_bytes
    assert abs(measured_share(tmp_path)) <= 1


class Opaque(Deep):
    def training_step(self, batch, batch_idx):
        opaque(batch[0])
        return super().training_step(batch, batch_idx)


class Failing(Deep):
    """Fails with an error of the type that bad options have, in the trace alone."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch[0], FakeTensor):
            raise ValueError("not in a trace")  # noqa: TRY004, the type of error that is meant
        return super().training_step(batch, batch_idx)


class CountsOutside(Deep):
    """Fails at every second call, which a closure counts that no one can see, and which cannot be put back."""

    def __init__(self) -> None:
        super().__init__()
        calls = itertools.count(1)
        self.count = lambda: next(calls)

    def training_step(self, batch, batch_idx):
        if self.count() % 2 == 0 and isinstance(batch[0], FakeTensor):
            raise RuntimeError("an even call")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Opaque, "unchanged: a step could not be traced"),
        (Failing, r"ValueError: not in a trace, at .*test_gradient_checkpointing.py:\d+"),
        (CountsOutside, "RuntimeError when it was traced"),
    ],
)
def test_a_model_whose_step_cannot_be_traced_is_left_unchanged_with_a_warning_and_the_run_goes_on(
    model, said, tmp_path
):
    with pytest.warns(UserWarning, match=said):
        with_it = fit(tmp_path, GradientCheckpointing(), model=model, logger=False)
    assert_same_bits(with_it, fit(tmp_path, model=model, logger=False))


class CountsItsCalls(Deep):
    """Counts the calls of its step: `kind` says at which it gives no loss, or fails."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.calls, self.kind = 0, kind

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        assert self.kind != "one for each batch" or self.calls == batch_idx + 1
        gives_none = {"none at every second": self.calls % 2 == 0, "none at the first": self.calls == 1}
        return None if gives_none.get(self.kind) else loss


NO_LOSS = pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")


@NO_LOSS
@pytest.mark.parametrize(
    ("kind", "note", "zeroed"),
    [
        ("one for each batch", "AssertionError", False),
        ("none at every second", "no loss", True),
        ("none at the first", None, False),
    ],
)
def test_a_step_that_counts_its_calls_is_planned_by_the_first_that_gives_a_loss(kind, note, zeroed, tmp_path):
    make = functools.partial(CountsItsCalls, kind)
    with VirtualDevice(cuda_like=True):
        callback = GradientCheckpointing(memory_budget=0.8, bn_dropout="recompute")
        planned = fit(tmp_path, callback, model=make)
    assert callback.plan.planned.peak_bytes < callback.plan.plain.peak_bytes
    assert len(callback.plan.notes) == (note is not None)
    assert all(note in one and "traced a second time" in one for one in callback.plan.notes)
    # After a step without a loss, Lightning has freed the gradients: the forward pass has none of them.
    freed = 100 * callback.plan.planned.gradient_bytes / callback.plan.planned.peak_bytes if zeroed else 0
    assert -freed - 1 <= measured_share(tmp_path) <= 1
    assert planned.calls == 8
    assert_same_bits(planned, fit(tmp_path, model=make))


class NeverALoss(Deep):
    """Gives no loss at all."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


@NO_LOSS
def test_a_step_that_never_gives_a_loss_is_left_alone_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="no loss for any of the first 11"):
        fit(tmp_path, GradientCheckpointing(memory_budget=0.8), model=NeverALoss, max_epochs=2)


class Drifting(nn.Module):
    """Multiplies by what no one can see or put back: how often it was called, in a closure."""

    def __init__(self) -> None:
        super().__init__()
        calls = itertools.count(1)
        self.factor = lambda: 1 + next(calls) / 100

    def forward(self, x):
        return torch.nn.functional.gelu(x * self.factor())


class DeepAndDrifting(Deep):
    """One of its layers gives something else at every call."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(4, 32), blocks[0], Drifting(), nn.Linear(128, 32), *_joined(blocks[1:]))


def _joined(blocks):
    return [*(one for block in blocks for one in (block, nn.Linear(128, 32))), nn.Linear(32, 1)]


def test_a_layer_that_does_not_repeat_itself_is_left_out_from_the_second_step_on(tmp_path):
    callback = GradientCheckpointing(bn_dropout="recompute", segments=3)
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append([[str(one) for one in chain.ranges] for chain in callback.plan.chains])

    with pytest.warns(RecomputationDiffersWarning, match=r"The layer net\.\d+ did not do the same"):
        fit(tmp_path, callback, Watch(), model=DeepAndDrifting, logger=CSVLogger(tmp_path, name="", version="x"))
    (chain,) = callback.plan.chains
    left_out = {chain.layers[at]: why for at, why in chain.outside.items()}
    assert list(left_out) == ["net.2"]
    assert "not do the same" in left_out["net.2"]
    assert chain.ranges
    assert seen[0] != seen[1]
    assert all(one == seen[1] for one in seen[1:])
    assert "net.2" not in seen[1]
    text = (tmp_path / "x" / "memtools" / "checkpoint_plan.md").read_text()
    assert "not do the same" in text


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_long_planning_says_so_and_is_ended_by_a_signal(sent, tmp_path):
    with started_script(Path(long_planning_run.__file__), tmp_path) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("GradientCheckpointing is "):
                break
        process.send_signal(sent)
        said += process.communicate(timeout=300)[0].splitlines()
    assert re.search(r"GradientCheckpointing is (tracing a step|choosing what).* \(\d+ s so far\)", "".join(said)), said
    assert not {"a step ran", "fit is over"} & set(said)  # planning itself was ended
    assert process.returncode == (0 if sent == signal.SIGTERM else 1), said  # as Lightning ends between two batches


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("in_torch", [True, False])
def test_a_signal_ends_traced_work_at_its_next_torch_function_or_at_its_end(in_torch, sent):
    noted, after = [], []
    before = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    ended = SIGTERMException if sent == signal.SIGTERM else KeyboardInterrupt
    try:
        with pytest.raises(ended), ended_by_signals(SIGTERMException), values_known() as known, ValueReaders(known):  # noqa: PT012
            signal.raise_signal(sent)
            after.append("signal")  # the handler itself raises nothing: torch's C++ may be above it
            if in_torch:
                torch.zeros(2)
                after.append("torch")
        with ended_by_signals(SIGTERMException):
            after.append("next")
        signal.raise_signal(signal.SIGTERM)  # as before again: only noted
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert after == ["signal", "next"]
    assert noted == [signal.SIGTERM] * (1 + (sent == signal.SIGTERM))


def test_a_second_interrupt_ends_traced_work_at_once():
    after = []
    with pytest.raises(KeyboardInterrupt), ended_by_signals(SIGTERMException):  # noqa: PT012, what runs is noted
        signal.raise_signal(signal.SIGINT)
        after.append(1)
        signal.raise_signal(signal.SIGINT)
        after.append(2)
    assert after == [1]
