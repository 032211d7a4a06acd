"""`memtools run` and MEMTOOLS=1: which Trainers get which callbacks, what stays as it was, and what is left behind."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import lightning_memtools
from lightning_memtools import HaltOnNaN, MemoryMonitor, OOMReport
from lightning_memtools.cli import run as run_command
from lightning_memtools.cli.main import main
from lightning_memtools.memory.peaks import PhaseClock
from lightning_memtools.verdict.in_trainer.run_summary import RunSummary
from tests.lightning_models import assert_same_bits
from tests.two_processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
DEFAULTS = [type(each).__name__ for each in lightning_memtools.default_callbacks()]
QUIET = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


@pytest.fixture(autouse=True)
def asked(installed, monkeypatch):
    monkeypatch.setenv("MEMTOOLS", "1")
    return monkeypatch


def trainer(**options):
    return L.Trainer(
        accelerator="cpu", **QUIET | {"max_epochs": 1, "limit_train_batches": 12, "logger": False} | options
    )


def ours(run) -> Counter[str]:
    kinds = [type(each) for each in run.callbacks]
    return Counter(kind.__name__ for kind in kinds if kind.__module__.startswith("lightning_memtools."))


def summaries(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("summary*.json"))]


# --- whose Trainers, and which callbacks


@pytest.mark.parametrize("value", ["", "0", "off", "False"])
def test_a_trainer_that_is_not_asked_for_gets_nothing(value, asked):
    asked.setenv("MEMTOOLS", value)
    assert not ours(trainer())


def test_a_process_that_is_not_asked_imports_nothing_but_the_factory(installed):
    code = (
        "import sys, lightning as L; L.Trainer(logger=False, accelerator='cpu');"
        "print(sorted(m for m in sys.modules if m.startswith('lightning_memtools')))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MEMTOOLS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['lightning_memtools', 'lightning_memtools.autoload']"


def test_every_trainer_of_a_script_gets_the_defaults_once_and_a_summary(tmp_path):
    shared = [L.Callback()]  # Lightning adds to this list, and so do we
    for _ in range(2):
        run = trainer(callbacks=shared)
        run.fit(BoringModel())
        assert [name for name in ours(run) if name != "RunSummary"] == DEFAULTS
        assert set((ours(run) - Counter(["RunSummary"])).values()) == {1}
    run.fit(BoringModel())
    run.test(BoringModel(), verbose=False)
    assert len(list(tmp_path.glob("memtools/*/memory_summary_test.md"))) == 1
    assert sorted(each["ranks"][0]["steps"] for each in summaries(tmp_path)) == [
        0,
        11,
        11,
    ]  # the third had nothing to train


class OfModel(BoringModel):
    def configure_callbacks(self):
        return [OOMReport()]


def test_a_trainer_or_module_keeps_its_own():
    own = HaltOnNaN(max_skips=7)
    run = trainer(callbacks=[own])
    run.fit(OfModel())
    assert set(ours(run).values()) == {1}
    assert [each for each in run.callbacks if isinstance(each, HaltOnNaN)] == [own]


def test_a_class_of_the_users_with_a_name_of_ours_stays_beside_ours(tmp_path):
    theirs = type(
        "MemoryMonitor", (L.Callback,), {"state_dict": lambda _: {"n": 3}, "load_state_dict": lambda *_: None}
    )
    run = trainer(callbacks=[theirs()])
    run.fit(BoringModel())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    again = trainer(callbacks=[theirs()], max_epochs=2)
    again.fit(BoringModel(), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    assert len([each for each in again.callbacks if type(each) is theirs]) == 1
    assert len([each for each in again.callbacks if type(each) is MemoryMonitor]) == 1


def test_fast_dev_run_leaves_no_file(tmp_path):
    trainer(fast_dev_run=True).fit(BoringModel())
    assert not list(tmp_path.glob("memtools"))


def test_lightning_cli_takes_its_configuration_as_before(tmp_path):
    Path("given.yaml").write_text(
        "trainer: {max_epochs: 1, limit_train_batches: 12, logger: false, accelerator: cpu}\n"
    )
    cli = LightningCLI(BoringModel, BoringDataModule, args=["fit", "--config", "given.yaml", "--trainer.max_epochs=2"])
    assert set(ours(cli.trainer)) == {"RunSummary", *DEFAULTS}
    assert "lightning_memtools" not in cli.parser.dump(cli.config)
    (summary,) = summaries(tmp_path)
    assert summary["ranks"][0]["steps"] == 23


def test_the_options_choose_callbacks_and_arguments(asked):
    options = {"add": ["LossSpikes"], "leave_out": ["EmptyCache"], "arguments": {"HaltOnNaN": {"max_skips": 3}}}
    asked.setenv("MEMTOOLS", json.dumps(options))
    run = trainer()
    run.fit(BoringModel())
    assert set(ours(run)) == {"RunSummary", "LossSpikes", *DEFAULTS} - {"EmptyCache"}
    assert next(each for each in run.callbacks if isinstance(each, HaltOnNaN)).max_skips == 3


def test_a_value_that_is_no_option_costs_the_callbacks_and_not_the_run(asked):
    asked.setenv("MEMTOOLS", '{"add": ["LossSpike"]}')
    with pytest.warns(UserWarning, match="Did you mean LossSpikes"):
        run = trainer()
    run.fit(BoringModel())
    assert not ours(run)


# --- what a run leaves


class Random(BoringModel):
    def training_step(self, batch, batch_idx):
        return super().training_step(torch.dropout(batch, 0.5, train=True), batch_idx)


def test_weights_and_checkpoint_are_those_of_the_script_alone(tmp_path, asked):
    saved = []
    for value in ("0", "1"):
        asked.setenv("MEMTOOLS", value)
        L.seed_everything(1)
        run = trainer(max_epochs=2)
        run.fit(Random())
        run.save_checkpoint(tmp_path / value)
        saved.append(torch.load(tmp_path / value, weights_only=False))
    assert saved[0].keys() == saved[1].keys()
    assert saved[0]["callbacks"].keys() == saved[1]["callbacks"].keys()
    assert_same_bits(saved[0]["state_dict"], saved[1]["state_dict"])


class Failing(BoringModel):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 10:
            raise ValueError("my own mistake")


def test_a_run_that_fails_says_so_and_fails_as_before(tmp_path):
    with pytest.raises(ValueError, match="my own mistake"):
        trainer().fit(Failing())
    (summary,) = summaries(tmp_path)
    assert summary["verdict"]["limit"] == "error"
    assert "my own mistake" in summary["run"]["error"]


def test_nothing_of_it_is_left_in_the_trainer():
    run = trainer()
    run.fit(BoringModel())
    assert not {"start", "stop"} & vars(run.profiler).keys()
    assert not [hook for optimizer in run.optimizers for hook in optimizer._optimizer_step_post_hooks]
    assert pickle.dumps(RunSummary.asked_for("1"))  # as a strategy that spawns does


def test_a_step_reads_the_clock_seven_times(monkeypatch):
    monkeypatch.setenv("MEMTOOLS", "0")
    phases, switch = [], PhaseClock.switch
    monkeypatch.setattr(PhaseClock, "switch", lambda self, phase: (phases.append(phase), switch(self, phase))[1])
    trainer(callbacks=[RunSummary()], limit_val_batches=0).fit(BoringModel())
    second = phases.index("data", phases.index("data") + 1)
    assert phases[second : second + 7] == ["data", "rest", "forward", "backward", "rest", "optimizer", "rest"]
    assert len(phases) <= 12 * 7 + 8  # and at both ends


# --- the command


@pytest.fixture
def started(monkeypatch):
    """The commands that would have taken the place of `memtools run`, with the variable of their environment."""
    seen = []
    monkeypatch.setattr(
        run_command, "_replaced_by", lambda command, env: seen.append((command[1:], env.get("MEMTOOLS")))
    )
    monkeypatch.setenv("MEMTOOLS", "")
    Path("train.py").write_text("")
    return seen


@pytest.mark.parametrize(
    ("given", "command", "variable"),
    [
        (["train.py", "--with", "x", "-m"], ["train.py", "--with", "x", "-m"], "1"),
        (["-m", "package.train", "--devices", "2"], ["-m", "package.train", "--devices", "2"], "1"),
        (["--dry", "train.py", "a"], ["-m", "lightning_memtools", "dry-run", "train.py", "a"], "0"),
        (
            ["--with", "LossSpikes", "--without", "EmptyCache", "--set", "HaltOnNaN.max_skips=3", "train.py"],
            ["train.py"],
            '{"add": ["LossSpikes"], "leave_out": ["EmptyCache"], "arguments": {"HaltOnNaN": {"max_skips": 3}}}',
        ),
    ],
)
def test_the_command_starts_the_script_as_it_is(given, command, variable, started):
    assert main(["run", *given]) == 0
    assert started == [(command, variable)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["missing.py"], "There is no file missing.py"),
        (["--with", "LossSpike", "train.py"], "There is no callback LossSpike. Did you mean LossSpikes"),
        (["--set", "HaltOnNaN.skips=3", "train.py"], "HaltOnNaN has no argument skips. Did you mean max_skips"),
        (["--set", "HaltOnNaN.max_skips=many", "train.py"], "max_skips='many' is not a number of steps"),
        (["--set", "max_skips=3", "train.py"], "write NAME.ARGUMENT=VALUE"),
        (["--set", "LossSpikes.window=30", "train.py"], "add --with LossSpikes"),
        (["--dry", "--with", "LossSpikes", "train.py"], "a dry run shows memory only"),
    ],
)
def test_a_wrong_option_is_named_before_the_script_starts(given, said, started, capsys):
    assert main(["run", *given]) == 1
    assert said in capsys.readouterr().err
    assert started == []


def test_an_installation_that_lightning_does_not_see_is_named(started, monkeypatch, capsys):
    monkeypatch.setattr(run_command, "entry_points", lambda **_: [])
    assert main(["run", "train.py"]) == 1
    assert "install it again" in capsys.readouterr().err
    assert started == []


# --- several processes


SCRIPT = """
import os, sys, time
import torch
import {package} as pl
from {package}.demos.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if os.environ.get("LOCAL_RANK") == "1" and "slow" in sys.argv:
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)

pl.seed_everything(0)
model = Model()
pl.Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=20, limit_val_batches=2, enable_progress_bar=False,
           enable_checkpointing=False, devices=int(os.environ.get("DEVICES", 1)),
           strategy="ddp" if "DEVICES" in os.environ else "auto").fit(model)
print("WEIGHTS", sum(one.double().sum().item() for one in model.parameters()))
"""


def weights(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("WEIGHTS"))


def test_pytorch_lightning_is_served_too_by_the_command(tmp_path):
    Path("train.py").write_text(SCRIPT.format(package="pytorch_lightning"))
    given = [[sys.executable, "train.py"], [sys.executable, "-m", "lightning_memtools", "run", "train.py", "--lr", "1"]]
    environment = {name: value for name, value in os.environ.items() if name != "MEMTOOLS"}
    said = [subprocess.run(each, env=environment, capture_output=True, text=True, check=True).stdout for each in given]
    assert weights(said[0]) == weights(said[1])
    (summary,) = summaries(tmp_path)
    assert summary["script"] == ["train.py", "--lr", "1"]
    assert said[1].count("memtools verdict") == 1
    assert len(said[1].partition("memtools verdict")[2].splitlines()) <= 11


def test_two_ranks_give_one_summary_which_names_the_slow_rank(tmp_path, asked):
    Path("train.py").write_text(SCRIPT.format(package="lightning.pytorch"))
    asked.setenv("DEVICES", "2")
    said = []
    for value in ("0", "1"):
        asked.setenv("MEMTOOLS", value)
        ranks = run_ranks(Path("train.py"), "slow", timeout_s=300)
        assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
        said.append([rank.stdout for rank in ranks])
    assert [weights(each) for each in said[0]] == [weights(each) for each in said[1]]
    (summary,) = summaries(tmp_path)
    assert summary["verdict"]["limit"] == "slow-rank"
    assert "rank 1 takes" in summary["verdict"]["lines"][0]
    assert [each.count("memtools verdict") for each in said[1]] == [1, 0]
