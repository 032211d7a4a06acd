"""LossSpikes in real fits: what is found, and that skipping and rolling back leave no trace."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memtools import HaltOnNaN, LossSpikeError, LossSpikes, NonFiniteError
from lightning_memtools.nonfinite import step_guard
from tests.callbacks.spike_models import AT, SpikeCase, Spiking, SpikingGan, as_loader, batches, labels_times, with_bad
from tests.event_files import scalars, texts_of
from tests.lightning_models import half, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Spike at step:UserWarning")


def bad_labels() -> Any:
    return with_bad(labels_times(30))


CASES = {
    "bad batch": SpikeCase(Spiking, bad_labels),
    "burst of wrong labels": SpikeCase(
        Spiking, lambda: with_bad(labels_times(-8), range(AT, AT + 4)), tuple(range(AT, AT + 4))
    ),
    "learning rate": SpikeCase(lambda: Spiking("learning rate"), batches, tuple(range(AT, AT + 5))),
    "gradient alone": SpikeCase(lambda: Spiking("gradient"), batches),
    "fused optimizer": SpikeCase(lambda: Spiking(optimizer="fused"), bad_labels),
    "accumulation": SpikeCase(Spiking, bad_labels, (AT // 2,), trainer=lambda: {"accumulate_grad_batches": 2}),
    "half precision": SpikeCase(Spiking, bad_labels, trainer=lambda: {"plugins": half(2.0**4)}),
    "half precision, skipped": SpikeCase(Spiking, bad_labels, (), trainer=lambda: {"plugins": half(2.0**12)}),
    "two optimizers": SpikeCase(SpikingGan, bad_labels),
}


def fit(root: Path, model: L.LightningModule, made: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    run = trainer(root, *callbacks, **options)
    run.fit(model, as_loader(made))
    return run


def fitted(
    root: Path, case: SpikeCase, *callbacks: L.Callback, made: Any = None
) -> tuple[L.LightningModule, L.Trainer]:
    torch.manual_seed(0)
    model = case.model()
    return model, fit(root, model, case.batches() if made is None else made, *callbacks, **case.trainer())


def equal(one: L.LightningModule, other: L.LightningModule) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_spike_is_named_at_its_step(name, tmp_path):
    case, spikes = CASES[name], LossSpikes(warm_up=30)
    fitted(tmp_path, case, spikes)
    steps = [spike.step for spike in spikes.spikes]
    if name == "two optimizers":  # the network goes wrong with the bad batch's update, and stays so for some steps
        steps = sorted(set(steps))[:1]
    assert steps == list(case.steps)
    if not steps:
        return
    first = spikes.spikes[0]
    assert first.batches == ((AT, AT + 1) if name == "accumulation" else (AT,))
    assert first.done == "report"
    assert (first.loss_spike is None) == (name == "gradient alone")


class OwnHook(Spiking):
    """With code between backward and update."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Do nothing."""


class Keep(L.Callback):
    """Keeps weights, buffers and Adam's moments before and after batch AT."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = {name: each.clone() for name, each in pl_module.state_dict().items()}
        moments = [each["exp_avg"].clone() for each in trainer.optimizers[0].state.values()]
        if batch_idx == AT - 1:
            self.before = state | {str(i): each for i, each in enumerate(moments)}
        elif batch_idx == AT:
            self.after = state | {str(i): each for i, each in enumerate(moments)}


# A fused optimizer gets its gradients scaled, and the scaler skips those that are filled with Inf.
@pytest.mark.parametrize(("optimizer", "scales"), [("adam", False), ("adam", True), ("fused", True)])
def test_a_skipped_step_changes_neither_weights_nor_buffers_nor_the_optimizer(optimizer, scales, tmp_path):
    spikes, keep = LossSpikes(action="skip"), Keep()
    case = SpikeCase(
        lambda: OwnHook(optimizer=optimizer), bad_labels,
        trainer=lambda: {"plugins": half(2.0**4)} if scales else {},
    )  # fmt: skip
    _, run = fitted(tmp_path, case, spikes, keep)
    assert [(spike.step, spike.done) for spike in spikes.spikes] == [(AT, "skip")]
    assert run.global_step == len(batches())  # a skipped step counts, as with HaltOnNaN
    assert all(torch.equal(each, keep.after[name]) for name, each in keep.before.items())


ROLLED_BACK = {name: CASES[name] for name in ("bad batch", "accumulation", "half precision", "fused optimizer")}
ROLLED_BACK["two optimizers"] = CASES["two optimizers"]


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_a_rollback_equals_bit_for_bit_a_run_that_never_saw_the_batches(name, tmp_path):
    case, spikes = ROLLED_BACK[name], LossSpikes(action="rollback", every_n_steps=20, max_actions=2)
    rolled, run = fitted(tmp_path, case, spikes)
    spike = spikes.spikes[0]
    per_step = run.accumulate_grad_batches
    first = AT - spike.taken_back * per_step // (2 if name == "two optimizers" else 1)
    made = case.batches()
    never, other = fitted(tmp_path, case, made=made[:first] + made[AT + per_step :])
    assert 0 <= spike.taken_back <= 40
    assert equal(rolled, never)
    assert run.global_step == other.global_step
    rates = [[group["lr"] for each in trained.optimizers for group in each.param_groups] for trained in (run, other)]
    assert rates[0] == rates[1]
    assert {s.done for s in spikes.spikes} == {"rollback"}


class Shards(torch.utils.data.Dataset[Any]):
    """Counts what was read of it."""

    n_read = 0


class ReadsShards(Spiking):
    """Keeps its data, and a list of the batches that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.shards, self.seen = Shards(), list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shards.n_read += 1
        self.seen.append(batch_idx)
        return super().training_step(batch, batch_idx)


def test_a_rollback_takes_the_modules_attributes_back_and_not_its_data(tmp_path):
    spikes = LossSpikes(action="rollback", every_n_steps=20)
    torch.manual_seed(0)
    model = ReadsShards()
    fit(tmp_path, model, bad_labels(), spikes)
    n_back = spikes.spikes[0].taken_back
    assert model.shards.n_read == len(batches())
    assert model.seen == [index for index in range(len(batches())) if not AT - n_back <= index <= AT]


def test_the_spike_after_max_actions_ends_the_run_before_its_update(tmp_path):
    made = with_bad(labels_times(30), (60, 90, AT))
    spikes, torch_state = LossSpikes(action="skip", max_actions=2), {}

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            torch_state.update({name: each.clone() for name, each in pl_module.state_dict().items()})

    torch.manual_seed(0)
    model = Spiking()
    run = trainer(tmp_path, spikes, Keep())
    with pytest.raises(LossSpikeError) as error:
        run.fit(model, as_loader(made))
    assert error.value.spike.step == AT
    assert error.value.spike.done == "halt"
    assert f"step {AT}" in str(error.value)
    assert [spike.done for spike in spikes.spikes] == ["skip", "skip", "halt"]
    assert run.global_step == AT
    assert all(torch.equal(each, torch_state[name]) for name, each in model.state_dict().items())


def test_a_spike_is_told_once_and_logged_each_time(tmp_path):
    case, spikes = CASES["burst of wrong labels"], LossSpikes()
    with pytest.warns(UserWarning, match=f"Spike at step {AT} ") as warned:
        _, run = fitted(tmp_path, case, spikes)
    assert len([each for each in warned if "Spike at step" in str(each.message)]) == 1
    assert scalars(run.log_dir)["spikes/found"] == [(step, float(n)) for n, step in enumerate(case.steps, start=1)]
    report = spikes.spikes[0].report
    assert report.name == f"loss-spike-step{AT}-report.md"
    assert f"{spikes.spikes[0].loss:.4g}" in report.read_text()
    assert (
        "look at the samples and labels of its batches. If they are right, a lower learning rate" in report.read_text()
    )
    assert [spike.report for spike in spikes.spikes[1:]] == [None] * 3
    assert texts_of(run.log_dir)["memtools/loss_spike"] == [report.read_text()]


def test_spikes_under_a_fused_optimizer_are_found_with_and_without_an_action(tmp_path, monkeypatch):
    monkeypatch.setattr(step_guard, "reads_at_once", lambda _gradients: False)  # as on a GPU
    spikes = LossSpikes()
    fitted(tmp_path, CASES["fused optimizer"], spikes)
    assert [spike.step for spike in spikes.spikes] == [AT]
    again = LossSpikes(action="skip")
    fitted(tmp_path, CASES["fused optimizer"], again)
    assert [spike.step for spike in again.spikes] == [AT]


def test_it_shares_the_trainers_halt_on_nan_or_brings_one_for_the_fit(tmp_path):
    halt, spikes = HaltOnNaN(), LossSpikes()
    run = fit(tmp_path, Spiking(), batches(60), spikes, halt)
    assert [type(each) for each in run.callbacks].count(HaltOnNaN) == 1
    assert halt.watch is None
    alone = trainer(tmp_path, LossSpikes(), ModelCheckpoint(tmp_path / "kept"), enable_checkpointing=True)
    made: Any = batches(60)
    made[50] = (made[50][0] * torch.nan, made[50][1])
    with pytest.raises(NonFiniteError):
        alone.fit(Spiking(), as_loader(made))
    assert not [each for each in alone.callbacks if isinstance(each, HaltOnNaN)]


def test_no_files_are_kept_without_a_logger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spikes = LossSpikes()
    fit(tmp_path, Spiking(), bad_labels(), spikes, logger=False)
    assert [(spike.step, spike.report) for spike in spikes.spikes] == [(AT, None)]
    assert list(tmp_path.iterdir()) == []


def test_a_healthy_fit_is_silent(tmp_path):
    spikes = LossSpikes(action="rollback")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Spike")
        fit(tmp_path, Spiking(), batches(), spikes)
    assert spikes.spikes == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"action": "stop"}, "action"),
        ({"max_actions": -1}, "max_actions"),
        ({"window": 3}, "window"),
        ({"warm_up": 200}, "warm_up"),
        ({"sensitivity": 0.5}, "sensitivity"),
        ({"least_ratio": "2"}, "least_ratio"),
        ({"every_n_steps": 0}, "every_n_steps"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, named):
    with pytest.raises((ValueError, TypeError), match=named):
        LossSpikes(**arguments)
