"""Callbacks that only watch: an error in their own code is one warning, and training ends in the same bits."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memtools import (
    EmptyCache,
    HaltOnNaN,
    LossCurves,
    LossSpikes,
    MemoryMonitor,
    OOMReport,
    TrainingDoctor,
    VirtualDevice,
)
from lightning_memtools.callbacks import guarded
from lightning_memtools.callbacks.guarded import WatchingCallback
from lightning_memtools.reporting.ranks import PostedByRank
from tests.event_files import texts_of
from tests.lightning_models import Regression, assert_same_bits, loader, trainer

WATCHING: list[type[WatchingCallback]] = [
    *(HaltOnNaN, LossSpikes, OOMReport, TrainingDoctor, MemoryMonitor, LossCurves, EmptyCache)
]
# Functions that the hooks of a healthy run reach: one for each hook.
PLACES = {
    HaltOnNaN: [
        "callbacks.halt_on_nan.HaltRun.__init__", "callbacks.halt_on_nan.HaltRun.start_training",
        "callbacks.halt_on_nan.HaltRun.read_rest", "callbacks.halt_on_nan.HaltRun.warn_if_blind",
        "callbacks.halt_on_nan.HaltRun.end_evaluation",
        "nonfinite.step_guard.StepGuard.begin", "nonfinite.step_guard.StepGuard.loss",
        "nonfinite.step_guard.StepGuard.check", "nonfinite.step_guard.StepGuard.before_update",
        "nonfinite.step_guard.StepGuard.end_batch", "nonfinite.step_guard.StepGuard.close",
    ],
    LossSpikes: [
        "callbacks.loss_spikes.report_directory", "callbacks.loss_spikes.SpikeWindow.judge",
        "callbacks.loss_spikes.LossSpikes._take_point", "callbacks.loss_spikes.is_accumulating",
    ],
    OOMReport: [
        "oom.failure_capture.FailureCapture.__init__", "oom.failure_capture.FailureCapture.begin_batch",
        "oom.failure_capture.FailureCapture.end_batch", "oom.failure_capture.FailureCapture.begin_evaluation",
        "oom.failure_capture.FailureCapture.stop",
    ],
    TrainingDoctor: [
        "callbacks.training_doctor.TrainingDoctor._publish",
        *(f"doctor.examination.Examination.{name}" for name in ("__init__", "tell", "stop")),
    ],
    MemoryMonitor: [
        f"reporting.memory_run.MemoryRun.{name}" for name in (
            "__init__", "begin_training", "enter", "leave", "switch_phase", "leave_backward", "add_point",
            "write_arrived", "summary",
        )
    ],
    LossCurves: [f"reporting.mean_curves.MeanCurves.{name}" for name in ("begin", "add", "log", "finish")],
    EmptyCache: [f"callbacks.empty_cache.EmptyCache.{name}" for name in ("_release", "_end_evaluation")],
}  # fmt: skip


def weights_after(root: Any, *callbacks: L.Callback) -> Any:
    L.seed_everything(0, verbose=False)
    model = Regression()
    saver = ModelCheckpoint(root / "kept", every_n_train_steps=2)
    with VirtualDevice():
        trainer(root, *callbacks, saver, logger=False, max_epochs=2, enable_checkpointing=True).fit(
            model, loader(64), loader(16)
        )
    return model.state_dict()


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return weights_after(tmp_path_factory.mktemp("bare"))


@pytest.mark.parametrize(("callback", "place"), [(kind, place) for kind in PLACES for place in PLACES[kind]])
def test_an_error_of_ours_is_one_warning_and_training_ends_in_the_same_bits(
    callback, place, bare, tmp_path, monkeypatch
):
    def fails(*_: Any, **__: Any) -> Any:
        raise RecursionError("of ours")

    monkeypatch.setattr(f"lightning_memtools.{place}", fails)
    with pytest.warns(UserWarning, match=f"{callback.__name__} failed itself.*RecursionError: of ours") as warned:
        ended = weights_after(tmp_path, callback())
    assert_same_bits(ended, bare)
    said = [str(each.message) for each in warned if "failed itself" in str(each.message)]
    assert len(said) == 1
    assert f"docs/{callback.page}.md" in said[0]


class Fails(WatchingCallback):
    """Fails in a hook, as if it were one of ours."""

    __module__ = "lightning_memtools.of_a_test"

    def __init__(self) -> None:
        self.stopped = 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise ValueError("broken")

    def on_train_batch_start(self, *_: Any) -> None:
        raise AssertionError("it is off")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        raise ValueError("broken again")

    def stop_watching(self) -> None:
        self.stopped += 1


def test_a_callback_that_failed_is_off_until_the_next_run(tmp_path):
    callback = Fails()
    for n in (1, 2):
        with pytest.warns(UserWarning, match="Fails failed itself.*ValueError: broken"):
            trainer(tmp_path, callback, logger=False).fit(Regression(), loader())
        assert (callback.is_off, callback.stopped) == (True, n)


def test_a_failure_beside_another_error_is_a_note_on_that(tmp_path):
    error = KeyError("of the user")
    Fails().on_exception(trainer(tmp_path), Regression(), error)
    assert "ValueError: broken again" in error.__notes__[0]


class Posts:
    """What a rank sees whose neighbour has switched off."""

    def __init__(self, _name: str) -> None:
        self.mine: dict[str, Any] = {}

    def post(self, values: dict[str, Any]) -> None:
        self.mine |= values

    def read(self) -> list[PostedByRank]:
        return [PostedByRank(self.mine), PostedByRank({"off": "ValueError: broken"})]


def test_what_is_off_on_a_rank_is_off_on_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(guarded, "RankPosts", Posts)
    callback, run = HaltOnNaN(), trainer(tmp_path)
    monkeypatch.setattr(type(run), "world_size", 2)
    callback.switch_on(run)
    with pytest.warns(UserWarning, match="on another rank, ValueError: broken"):
        callback.on_train_epoch_end(run, Regression())
    assert callback.is_off


class Broken(Regression):
    def training_step(self, batch, batch_idx):
        raise ValueError("no such file\nmore")


@pytest.mark.parametrize("names", [WATCHING, [HaltOnNaN], [MemoryMonitor]])
def test_how_a_run_ended_is_logged_once_whatever_ended_it(names, tmp_path):
    run = trainer(tmp_path, *(name() for name in names))
    with pytest.raises(ValueError, match="no such file"):
        run.fit(Broken(), loader())
    assert texts_of(run.log_dir)["memtools/ended"] == ["ValueError: no such file"]
    with pytest.raises(ValueError, match="no such file"):
        run.fit(Broken(), loader())
    assert texts_of(run.log_dir)["memtools/ended"] == ["ValueError: no such file"] * 2  # once a call


def test_nothing_of_a_run_is_held_after_its_error(tmp_path):
    run, model = trainer(tmp_path, HaltOnNaN()), Broken()
    with contextlib.suppress(ValueError):
        run.fit(model, loader())
    held = weakref.ref(run), weakref.ref(model)
    del run, model
    gc.collect()
    assert [each() for each in held] == [None, None]
