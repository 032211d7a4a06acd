"""A bad step in its file replays bit for bit, in a process that knows nothing else; each part of it is needed."""

from __future__ import annotations

import collections
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_memtools import StepFileError, replay
from lightning_memtools.nonfinite.bad_step import NonFiniteError
from tests.nonfinite.observe import error_at_halt
from tests.nonfinite.replay_models import BAD, RUNS, Everything, Recorder, halted

ROOT = Path(__file__).parents[2]
# Before the bad update of a batch, others of the same batch were made: its first part cannot be run as it was.
INEXACT = ("manual", "manual_scaler")
EXACT = [name for name in RUNS if name not in INEXACT]

Halted = tuple[NonFiniteError, Recorder, Any]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def halts(tmp_path_factory) -> dict[str, Halted]:
    return {name: halted(name, tmp_path_factory.mktemp(name)) for name in RUNS}


def class_of(name: str) -> Any:
    return RUNS[name][0]


# A line between the words of one file and the next.
COMMANDS = """
import sys
from lightning_memtools.cli.main import main
for path, model in zip(sys.argv[1::2], sys.argv[2::2]):
    assert main(["replay", path, "--model", model]) == 0
    print("====")
"""


def test_a_fresh_process_gives_the_same_bits_through_the_printed_command(halts):
    arguments = []
    for name in EXACT:
        error = halts[name][0]
        command = str(error).splitlines()[-1].partition("memtools replay ")[2].split()
        assert command == [str(error.step_path), "--model", f"tests.nonfinite.replay_models:{class_of(name).__name__}"]
        arguments += [command[0], command[2]]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *arguments],
        env=environment, capture_output=True, text=True, cwd=ROOT, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, said in zip(EXACT, done.stdout.split("====\n"), strict=False):
        assert "Bit for bit the same" in said
        assert "torch.log" in said
        gradients = halts[name][1].gradients
        n_bad = sum(not gradient.isfinite().all() for gradient in gradients.values())
        assert 0 < n_bad < len(gradients), "gradients that are all NaN would show nothing"
        assert f"Gradients: {len(gradients)}, of which {n_bad} hold NaN or Inf" in said.splitlines()


@pytest.mark.parametrize("name", EXACT)
def test_replayed_gradients_are_those_that_the_optimizer_got(name, halts):
    error, recorder, model = halts[name]
    again = replay(error.step_path, model=type(model))
    assert again.exact, again.mismatches
    assert again.doubts == ()
    assert again.gradients.keys() == recorder.gradients.keys()
    for parameter, gradient in recorder.gradients.items():
        assert bits(gradient) == bits(again.gradients[parameter]), parameter
    n_losses = {"plain": 1, "reads_rate": 1, "manual_accumulation": 2}.get(name, 4)
    assert [math.isfinite(loss) for loss in again.losses] == [True] * (n_losses - 1) + [False]
    assert again.explanation.operation == error.explanation.operation == "aten.log"


@pytest.mark.parametrize("name", INEXACT)
def test_a_later_update_of_a_batch_is_explained_and_said_to_be_inexact(name, halts):
    error, _, model = halts[name]
    again = replay(error.step_path, model=type(model))
    assert again.explanation.operation == error.explanation.operation == "aten.log"
    assert "Earlier updates of the same batch" in again.doubts[0]


def without_stream(name: str) -> Callable[[dict[str, Any]], None]:
    def remove(saved: dict[str, Any]) -> None:
        for micro in saved["micro"]:
            micro["random"][name] = another(micro["random"][name])

    return remove


def another(state: Any) -> Any:
    """Another state of the same random stream."""
    if isinstance(state, Tensor):
        return torch.Generator().manual_seed(7).get_state()
    if state[0] != "MT19937":
        return random.Random(7).getstate()  # noqa: S311, another state
    _, numbers, *rest = state
    return ("MT19937", numbers[::-1], *rest)


def without(*path: str, value: Any = None) -> Callable[[dict[str, Any]], None]:
    def remove(saved: dict[str, Any]) -> None:
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = value

    return remove


PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "random numbers of torch": ("accumulation", without_stream("torch_cpu")),
    "random numbers of Python": ("accumulation", without_stream("python")),
    "random numbers of NumPy": ("accumulation", without_stream("numpy")),
    "which modules evaluate": ("accumulation", without("evaluating", value=[])),
    "an earlier batch": ("accumulation", lambda saved: saved["micro"].pop(0)),
    "what the loss is divided by": ("accumulation", without("conditions", "divided_by", value=1)),
    "the scaler's scale": ("scaler", without("conditions", "scale")),
    "what the Trainer said": ("reads_rate", without("conditions", "trainer", value={})),
    "autocast": ("bf16", without("conditions", "precision", value="32-true")),
    "the last bit of a loss": (
        "accumulation", lambda saved: saved["losses"].__setitem__(0, math.nextafter(saved["losses"][0], math.inf))
    ),
}  # fmt: skip


def copied(error: NonFiniteError, folder: Path) -> Path:
    """Copy the two files of a step into a folder; return the step's."""
    for path in (error.step_path, error.checkpoint_path):
        shutil.copy(str(path), folder)
    assert error.step_path is not None
    return folder / error.step_path.name


@pytest.mark.parametrize(("name", "remove"), PARTS.values(), ids=PARTS)
def test_every_part_of_the_file_is_needed(name, remove, halts, tmp_path):
    path = copied(halts[name][0], tmp_path)
    saved = torch.load(path, weights_only=True)
    remove(saved)
    torch.save(saved, path)
    again = replay(path, model=class_of(name)())
    assert not again.exact
    assert "Not the same" in again.summary()


def test_a_replay_leaves_no_trace_in_its_process(halts):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = replay(halts["bf16"][0].step_path, model=Everything)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    # The module is as the step found it, ready to be looked at.
    assert replay(halts["bf16"][0].step_path, model=again.model).exact
    assert len(again.batches) == 4
    assert (again.batches[BAD - 4][3] == 0).all()


def test_another_machine_and_a_device_that_is_not_here_are_named(halts, tmp_path):
    path = copied(halts["plain"][0], tmp_path)
    saved = torch.load(path, weights_only=True)
    saved["machine"] |= {"torch": "2.0.0", "device": "cuda:7"}
    torch.save(saved, path)
    again = replay(path, model=Everything)
    assert again.exact
    assert "cuda:7, is not here" in again.doubts[-2]
    assert again.doubts[-1] == f"It ran with torch 2.0.0, and this is {torch.__version__}."


class Mended(Everything):
    def bad(self, x):
        return super().bad(x + 1)


def test_a_mended_class_is_finite_and_the_old_cause_is_told(halts):
    again = replay(halts["plain"][0].step_path, model=Mended)
    assert again.is_finite
    assert again.explanation is None
    assert "The step is finite now. When it was not:" in again.summary()
    assert "torch.log" in again.summary()


Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024, what users write
PACKED: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "a dict with texts": (lambda x: {"x": x, "names": ["a"], "n": (1, 2.0, None)}, True),
    "a named tuple": (lambda x: Pair(x, x), False),
    "an object": (lambda x: SimpleNamespace(x=x), False),
}


class Packed(Everything):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["x"] if isinstance(batch, dict) else batch.x, batch_idx)


@pytest.mark.parametrize("kind", PACKED)
def test_a_batch_that_no_file_of_weights_can_hold_is_named(kind, tmp_path):
    pack, is_held = PACKED[kind]
    L.seed_everything(0, verbose=False)
    batches = [pack(torch.cat([torch.zeros(1, 6), torch.ones(3, 6)]) if i == 1 else torch.ones(4, 6)) for i in range(2)]
    error = error_at_halt(Packed(), batches, tmp_path)
    if is_held:
        assert replay(error.step_path, model=Packed).exact
        return
    assert error.step_path is None
    assert error.explanation.operation == "aten.log", "it is explained all the same"
    assert "batch 1 holds other things than tensors" in str(error)


def test_the_rest_of_a_batchs_storage_is_not_saved(tmp_path):
    everything = torch.randn(100_000, 6)
    everything[8:16] = 0
    error = error_at_halt(Everything(), [everything[:8].abs() + 1, everything[8:16]], tmp_path)
    assert error.step_path.stat().st_size < 100_000


class Loop:
    """Its text cannot be made."""

    def __repr__(self) -> str:
        return repr(self)


HYPERPARAMETERS = {
    "a big-endian array": lambda: np.arange(3, dtype=">f4"),
    "an object whose text recurses": Loop,
}


class WithOdd(Everything):
    def __init__(self, odd: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=[])


@pytest.mark.parametrize("kind", HYPERPARAMETERS)
def test_an_odd_hyperparameter_neither_hides_the_halt_nor_reaches_a_constructor(kind, tmp_path):
    """It is in Lightning's checkpoint alone, which is not opened if it names code."""
    dataset: Any = [torch.ones(4, 6), torch.zeros(4, 6)]
    error = error_at_halt(WithOdd(HYPERPARAMETERS[kind]()), dataset, tmp_path)
    assert (error.step, error.explanation.operation) == (1, "aten.log")
    if error.checkpoint_path is None:  # this hyperparameter cannot be pickled at all
        return
    with pytest.raises(StepFileError, match=r"GLOBAL[^~]*load_from_checkpoint"):
        replay(error.step_path, model=WithOdd)
    module = WithOdd()
    state = torch.load(error.checkpoint_path, weights_only=False)["state_dict"]  # of this very test
    module.load_state_dict(state)
    again = replay(error.step_path, model=module)
    assert again.exact
    assert "cannot be opened safely" in again.doubts[-1]


def test_another_module_and_an_empty_checkpoint_are_refused_and_named(halts, tmp_path):
    path = halts["plain"][0].step_path
    for model, why in (
        (lambda: Everything(8), r"size mismatch[^~]*Next: pass the module as"),
        (lambda: nn.Linear(1, 1), "no LightningModule"),
    ):
        with pytest.raises(StepFileError, match=why):
            replay(path, model=model)
    with pytest.raises(StepFileError, match="cannot be replayed: KeyError"):
        replay(path, model=lambda: {}["x"])
    shutil.copy(path, tmp_path)
    torch.save({}, tmp_path / halts["plain"][0].checkpoint_path.name)
    with pytest.raises(StepFileError, match="cannot be replayed: KeyError"):
        replay(tmp_path / path.name, model=Everything())
