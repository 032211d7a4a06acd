"""A capsule replays bit for bit, in a process that knows nothing else; and each part of it is needed for that."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memtools import replay
from lightning_memtools.nonfinite.halt_report import NonFiniteError
from lightning_memtools.state.capsule.environment import switches_now
from tests.nonfinite.replay_models import BAD, RUNS, Everything, Recorder, halted

ROOT = Path(__file__).parents[2]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


Halted = tuple[NonFiniteError, Recorder, Any]


@pytest.fixture(scope="module")
def halts(tmp_path_factory) -> dict[str, Halted]:
    return {name: halted(name, tmp_path_factory.mktemp(name)) for name in RUNS}


# A line between the words of one capsule and the next.
COMMANDS = """
import sys
from lightning_memtools.cli.main import main
for path in sys.argv[1:]:
    assert main(["replay", path, "--trust"]) == 0
    print("====")
"""


def fresh_process(*arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(halts) -> dict[str, str]:
    """What the command says of each capsule, in a fresh process."""
    out = fresh_process("-c", COMMANDS, *(str(error.capsule_path) for error, _, _ in halts.values()))
    return dict(zip(halts, out.split("====\n"), strict=False))


@pytest.mark.parametrize("name", RUNS)
def test_a_fresh_process_gives_the_same_bits_through_the_command(name, said, halts):
    lines = said[name].splitlines()
    assert "Bit for bit the same" in said[name]
    assert any("torch.log" in line for line in lines)
    bad = [parameter for parameter, gradient in halts[name][1].gradients.items() if not gradient.isfinite().all()]
    total = len(halts[name][1].gradients)
    assert 0 < len(bad) < total, "gradients that are all NaN would show nothing"
    assert f"Gradients: {total}, of which {len(bad)} hold NaN or Inf" in lines


@pytest.mark.parametrize("name", RUNS)
def test_replayed_gradients_are_those_that_the_optimizer_got(name, halts):
    error, recorder, _ = halts[name]
    found = replay(error.capsule_path)
    assert found.exact, found.mismatches
    assert found.differences == ()
    assert found.doubts == ()
    assert found.gradients.keys() == recorder.gradients.keys()
    for parameter, gradient in recorder.gradients.items():
        assert bits(gradient) == bits(found.gradients[parameter]), parameter
    assert found.gradients_of == "step"
    n_losses = {"plain": 1, "reads_rate": 1, "manual": 1, "manual_accumulation": 2, "manual_scaler": 1}.get(name, 4)
    assert len(found.losses) == n_losses
    assert [torch.isfinite(torch.tensor(loss)).item() for loss in found.losses] == [True] * (n_losses - 1) + [False]


def test_a_replay_of_a_fused_optimizer_says_what_its_gradients_were_compared_with(tmp_path, monkeypatch):
    def fused(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    monkeypatch.setattr(Everything, "configure_optimizers", fused)
    error, recorder, _ = halted("accumulation", tmp_path)
    found = replay(error.capsule_path)
    assert found.exact
    assert found.gradients_of == "replay"
    assert "replayed in the training process" in found.summary()
    for parameter, gradient in recorder.gradients.items():
        assert bits(gradient) == bits(found.gradients[parameter]), parameter


def each_start(saved: dict[str, Any]) -> list[dict[str, Any]]:
    return [each["start"] for each in saved["micro"]]


def without_stream(name: str) -> Callable[[dict[str, Any]], None]:
    def remove(saved: dict[str, Any]) -> None:
        for start in each_start(saved):
            del start["random"][name]

    return remove


def without_buffers(saved: dict[str, Any]) -> None:
    saved["weights"]["buffers"].clear()


def without_attributes(saved: dict[str, Any]) -> None:
    saved["module"]["attributes"].clear()
    for start in each_start(saved):
        start["attributes"].clear()


def without(*path: str, value: Any = None) -> Callable[[dict[str, Any]], None]:
    def remove(saved: dict[str, Any]) -> None:
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = value

    return remove


def with_frozen(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        for start in each_start(saved):
            start["frozen"] = list(names)

    return change


PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "random numbers of torch": ("accumulation", without_stream("torch_cpu")),
    "random numbers of Python": ("accumulation", without_stream("python")),
    "random numbers of NumPy": ("accumulation", without_stream("numpy")),
    "buffers": ("accumulation", without_buffers),
    "plain attributes": ("accumulation", without_attributes),
    "which modules evaluate": ("accumulation", without("module", "evaluating", value=[])),
    "which weights are frozen": ("accumulation", with_frozen("last.weight")),
    "an earlier batch": ("accumulation", lambda saved: saved["micro"].pop(0)),
    "what the loss is divided by": ("accumulation", without("conditions", "divided_by", value=1)),
    "the scaler's scale": ("scaler", without("conditions", "scale")),
    "the optimizers' settings": ("reads_rate", without("optimizers")),
    "what the Trainer said": ("reads_rate", without("conditions", "trainer", value={})),
    "autocast": ("bf16", without("conditions", "autocast")),
    "the type of new tensors": ("double", without("conditions", "default_dtype", value="float32")),
    "the update that came before": ("manual", lambda saved: saved["micro"][0].update(steps_before=0)),
    "what followed that update": ("manual", lambda saved: saved["micro"][0].update(resumed=None)),
    "weights": ("accumulation", without("weights")),
}


@pytest.mark.parametrize(("name", "remove"), PARTS.values(), ids=PARTS)
def test_every_part_of_a_capsule_is_needed(name, remove, halts, tmp_path):
    saved = torch.load(halts[name][0].capsule_path, weights_only=True)
    remove(saved)
    torch.save(saved, tmp_path / "less.pt")
    found = replay(tmp_path / "less.pt")
    assert not found.exact
    assert "Not the same" in found.summary()


def test_losses_in_float64_are_compared_in_all_their_bits(halts, tmp_path):
    saved = torch.load(halts["double"][0].capsule_path, weights_only=True)
    saved["losses"][0] = math.nextafter(saved["losses"][0], math.inf)
    torch.save(saved, tmp_path / "other.pt")
    assert replay(tmp_path / "other.pt").mismatches[0].startswith("Loss 0 is ")


def test_a_replay_leaves_no_trace_in_its_process(halts):
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = replay(halts["bf16"][0].capsule_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, torch.float32)
    # The module is as the step found it, ready to be looked at.
    again = replay(halts["bf16"][0].capsule_path, model=found.model)
    assert again.exact
    assert len(found.batches) == 4
    assert (found.batches[BAD - 4][3] == 0).all()


def test_a_given_module_or_what_makes_one_takes_the_place_of_the_class(halts):
    path = halts["accumulation"][0].capsule_path
    assert replay(path, model=Everything()).exact
    assert replay(path, model=Everything).exact
    assert replay(path, model=lambda: Everything(16)).exact


class Looks(Everything):
    """Notes how the switches stand while its step runs."""

    seen: dict[str, Any] = {}  # noqa: RUF012, the test looks there

    def finite(self, x):
        type(self).seen = switches_now()
        return super().finite(x)


def test_the_switches_that_choose_kernels_are_as_they_were_and_put_back(halts, tmp_path):
    saved = torch.load(halts["plain"][0].capsule_path, weights_only=True)
    now = switches_now()
    assert saved["switches"] == now
    other = {name: {"high": "highest", "highest": "high"}[value] if isinstance(value, str) else not value
             for name, value in now.items() if name != "threads"}  # fmt: skip
    saved["switches"] = other | {"threads": now["threads"] + 1}
    torch.save(saved, tmp_path / "other.pt")
    found = replay(tmp_path / "other.pt", model=Looks)
    assert Looks.seen == saved["switches"]
    assert switches_now() == now
    assert found.doubts == ()


def test_another_machine_is_named(halts, tmp_path):
    saved = torch.load(halts["plain"][0].capsule_path, weights_only=True)
    saved["machine"] |= {"torch": "2.0.0", "CPU capability": "none at all"}
    torch.save(saved, tmp_path / "elsewhere.pt")
    found = replay(tmp_path / "elsewhere.pt")
    assert found.differences[0] == f"torch {torch.__version__}, was 2.0.0"
    assert "CPU capability" in found.differences[1]
    assert "This machine is another: torch" in found.summary()


def test_the_small_json_tells_the_essentials(halts):
    error = halts["accumulation"][0]
    about = json.loads(error.capsule_path.with_suffix(".json").read_text())
    assert about["headline"] == str(error).splitlines()[0]
    assert (about["step"], about["rank"], about["batches"]) == (1, 0, [4, 5, 6, 7])
    assert about["cause"] == error.cause
    assert about["what"] == error.explanation.what
    assert about["bytes"] == error.capsule_path.stat().st_size
    assert about["machine"]["torch"] == torch.__version__
    assert about["left_out"] == []
    assert [float(loss) for loss in about["losses"][:3]] == pytest.approx([float(x) for x in about["losses"][:3]])
    assert error.capsule_path.with_suffix(".json").stat().st_size < 4096
