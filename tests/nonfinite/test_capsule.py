"""Capsules that are damaged, too large, of other versions, or of modules that cannot be made again."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_memtools import HaltOnNaN, replay
from lightning_memtools.cli.main import main
from lightning_memtools.nonfinite.halt_report import NonFiniteError
from lightning_memtools.state.capsule.capsule_file import (
    CapsuleError,
    compact,
    from_plain,
    n_bytes_of,
    read_capsule,
    to_plain,
)
from tests.nonfinite.observe import error_at_halt
from tests.nonfinite.replay_models import batches, halted


def find(path: str) -> Any:
    """Finds a class by "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.fixture
def capsule(tmp_path) -> Path:
    path = halted("plain", tmp_path)[0].capsule_path
    assert path is not None
    return path


def refusal(path: Path, **arguments: Any) -> str:
    with pytest.raises(CapsuleError) as caught:
        replay(path, **({"trust": True} | arguments))
    return str(caught.value)


def test_another_file_is_no_capsule(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(CapsuleError, match=r"train.py is no capsule.*zip files"):
        read_capsule(tmp_path / "train.py")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_capsule_says_so_and_what_is_still_known(share, capsule):
    whole = capsule.read_bytes()
    capsule.write_bytes(whole[: int(share * len(whole))])
    said = refusal(capsule)
    assert f"it is truncated: {int(share * len(whole))} bytes of {len(whole)}" in said
    assert "loss is inf at step 7 (batch 7, rank 0)" in said
    assert "torch.log in Everything.bad" in said
    capsule.with_suffix(".json").unlink()
    assert "JSON beside it is missing" in refusal(capsule)


def test_another_version_is_named_with_what_is_still_known(capsule):
    saved = torch.load(capsule, weights_only=True)
    torch.save(saved | {"version": 99}, capsule)
    capsule.with_suffix(".json").unlink()
    said = refusal(capsule)
    assert "version 99; this lightning_memtools reads version 1" in said
    assert "loss is inf at step 7" in said, "the capsule itself tells"


def test_files_that_are_no_capsules(capsule, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    assert "is no capsule of HaltOnNaN" in refusal(tmp_path / "other.pt")
    assert "There is no capsule" in refusal(tmp_path / "missing.pt")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no.such.package:Net", "cannot be imported (ModuleNotFoundError: No module named 'no'"),
        ("tests.nonfinite.replay_models:Gone", "cannot be imported (AttributeError:"),
        ("tests.nonfinite.replay_models:f.<locals>.Net", "was defined within a function"),
    ],
)
def test_a_class_that_cannot_be_imported(name, told, capsule, capsys):
    saved = torch.load(capsule, weights_only=True)
    saved["module"]["class"] = name
    torch.save(saved, capsule)
    said = refusal(capsule)
    assert told in said
    assert "--model package.Class" in said
    assert main(["replay", str(capsule)]) == 1
    assert told in capsys.readouterr().err
    assert main(["replay", str(capsule), "--model", "Everything"]) == 1
    assert "write --model package.Class" in capsys.readouterr().err
    assert main(["replay", str(capsule), "--model", "tests.nonfinite.replay_models.Everything"]) == 0
    assert "Bit for bit the same" in capsys.readouterr().out


class Unsaved(L.LightningModule):
    """Its constructor takes what it does not save."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.log(batch.abs().sum(1) * self.net(batch).sigmoid().sum(1)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def halt(model: L.LightningModule, root: Path, data: Any = None, **arguments: Any) -> NonFiniteError:
    dataset: Any = batches() if data is None else data
    return error_at_halt(model, dataset, root, directory=str(root / "memtools"), **arguments)


def make_unsaved() -> Unsaved:
    return Unsaved(nn.Linear(6, 3))


def test_a_module_without_saved_hyperparameters_has_to_be_given(tmp_path, capsys):
    path = halt(make_unsaved(), tmp_path).capsule_path
    said = refusal(path)
    assert "not saved: net" in said
    assert "replay(path, model=my_module)" in said
    assert "save_hyperparameters()" in said
    assert replay(path, model=make_unsaved()).exact
    wrong = refusal(path, model=Unsaved(nn.Linear(6, 4)))
    assert "net.weight (shape), net.bias (shape) differ" in wrong
    assert main(["replay", str(path), "--model", "tests.nonfinite.test_capsule.make_unsaved"]) == 0


def test_hyperparameters_that_no_file_can_hold_are_named(tmp_path):
    class Saved(Unsaved):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.save_hyperparameters(logger=False)

    Saved.__module__, Saved.__qualname__ = __name__, "SavedAgain"
    globals()["SavedAgain"] = Saved
    with pytest.warns(UserWarning, match="`nn.Module`"):
        model = Saved(nn.Linear(6, 3))
    assert "held by a file: net" in refusal(halt(model, tmp_path).capsule_path)


PARTS = """
import torch

class LogHead(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = torch.nn.Linear(width, 3)

    def forward(self, x):
        return torch.log(x.abs().sum(1) * self.scale(x).sigmoid().sum(1)).mean()
"""
SCRIPT = """
import dataclasses
import lightning as L
import torch
from lightning_memtools import HaltOnNaN
from parts_of_this_test import LogHead
from torch.utils.data import DataLoader

@dataclasses.dataclass
class Batch:
    x: torch.Tensor

class Net(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        {save}
        self.head = LogHead(width)

    def training_step(self, batch, batch_idx):
        return self.head(batch.x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

{guard}
    L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir={root!r},
              callbacks=[HaltOnNaN(directory={root!r} + "/memtools")]
              ).fit(Net(6), DataLoader([Batch(torch.zeros(2, 6))], batch_size=None))
"""
GUARD = 'if __name__ == "__main__":'


def run_script(root: Path, **parts: str) -> tuple[Path, str]:
    """Run it, in a folder of its own that is not the working directory: the capsule, and what the run said."""
    from tests.nonfinite.test_replay import fresh_process  # noqa: PLC0415, its home

    (root / "src").mkdir(parents=True)
    (root / "src" / "parts_of_this_test.py").write_text(PARTS)
    script = root / "src" / "train_this_test.py"
    script.write_text(SCRIPT.format(root=str(root), **parts))
    with pytest.raises(AssertionError, match="NonFiniteError") as caught:
        fresh_process(str(script))
    (path,) = (root / "memtools").glob("*capsule.pt")
    return path, str(caught.value)


@pytest.fixture
def forget_modules() -> Iterator[None]:
    yield
    for name in ("parts_of_this_test", "train_this_test"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("forget_modules")
def test_a_script_with_modules_and_batches_of_its_own(tmp_path):
    """It is imported from where it is, and the classes of its batches with it."""
    path, said = run_script(tmp_path, guard=GUARD, save="self.save_hyperparameters()")
    assert f"memtools replay {path}" in said
    found = replay(path, trust=True)
    assert found.exact
    assert type(found.batches[0]).__name__ == "Batch"
    assert str(tmp_path / "src") not in sys.path
    assert found.changed == ()

    parts = tmp_path / "src" / "parts_of_this_test.py"
    parts.write_text(PARTS.replace("torch.log(", "torch.log(0.1 + "))
    sys.modules.pop("parts_of_this_test")
    sys.modules.pop("train_this_test")
    found = replay(path, trust=True)
    assert found.is_finite
    assert not found.exact
    assert found.changed == (str(parts),)
    assert f"changed since: {parts}." in found.summary()
    assert "The step is finite now." in found.summary()
    assert "Cause: domain error" in found.summary()

    parts.write_text(PARTS.replace("torch.log(", "torch.rsqrt("))
    sys.modules.pop("parts_of_this_test")
    sys.modules.pop("train_this_test")
    found = replay(path, trust=True)
    assert found.explanation.operation == "aten.rsqrt", "what was found then is not what is so now"


@pytest.mark.usefixtures("forget_modules")
def test_a_script_that_would_train_or_is_not_here_is_refused(tmp_path):
    path, _ = run_script(tmp_path, guard="if True:", save="")
    assert "and would train" in refusal(path)
    (tmp_path / "src" / "train_this_test.py").unlink()
    assert "train_this_test.py" in refusal(path)


def test_what_does_not_fit_is_left_out_and_named(tmp_path):
    model = make_unsaved()
    model.net = nn.Sequential(nn.Linear(6, 40_000), nn.Linear(40_000, 3))
    # Digests of the user's files, here of all tests that were imported, have to fit too.
    error = halt(model, tmp_path, max_bytes="500KB")
    assert "(1.53 MiB, for max_bytes)" in str(error), str(error)
    assert error.capsule_path.stat().st_size <= 500_000
    found = replay(error.capsule_path, model=model)
    assert found.exact, "the halted module still has those weights"
    assert any("no weights (max_bytes)" in doubt for doubt in found.doubts)

    error = halt(model, tmp_path / "tiny", max_bytes="100B")
    assert error.capsule_path is None
    assert "ValueError: without weights" in str(error)
    assert not [*(tmp_path / "tiny").rglob("*capsule*")]


def test_optimizer_state_is_left_out_first(tmp_path):
    error, *_ = halted("plain", tmp_path)
    whole = torch.load(error.capsule_path, weights_only=True)
    assert from_plain(whole["optimizers"][0], find)["state"][0]["exp_avg"].shape == (16, 6)
    without = error.capsule_path.stat().st_size - n_bytes_of(whole["optimizers"])
    smaller, *_ = halted("plain", tmp_path / "small", max_bytes=f"{without}B")
    assert smaller.capsule_path is not None
    assert "without optimizer state (" in str(smaller)
    assert replay(smaller.capsule_path).exact


def test_the_bound_is_that_of_the_file_itself(tmp_path):
    """Not of the tensors in it alone: what else a file holds counts too."""
    n_bytes = halted("plain", tmp_path / "1")[0].capsule_path.stat().st_size
    exactly, *_ = halted("plain", tmp_path / "2", max_bytes=f"{n_bytes}B")
    assert exactly.capsule_path.stat().st_size == n_bytes
    assert "without" not in str(exactly)
    smaller, *_ = halted("plain", tmp_path / "3", max_bytes=f"{n_bytes - 1}B")
    assert "without optimizer state (" in str(smaller)
    assert smaller.capsule_path.stat().st_size < n_bytes
    saved = torch.load(smaller.capsule_path, weights_only=True)
    tensors = n_bytes_of({**saved, "weights": None})
    none, *_ = halted("plain", tmp_path / "4", max_bytes=f"{tensors}B")
    assert none.capsule_path is None
    assert not [*(tmp_path / "4").rglob("*capsule*")]


@pytest.mark.parametrize("max_bytes", ["2", "much", "2GiBs"])
def test_a_text_that_is_no_size_is_refused_at_once(max_bytes):
    with pytest.raises(ValueError, match=f"Not a size: '{max_bytes}'"):
        HaltOnNaN(max_bytes=max_bytes)


def test_a_batch_that_the_step_changes_in_place_is_said(tmp_path):
    class InPlace(Unsaved):
        def training_step(self, batch, batch_idx):
            batch["x"].mul_(0.5)
            return super().training_step(batch["x"], batch_idx)

    error = halt(InPlace(nn.Linear(6, 3)), tmp_path, [{"x": x, "y": torch.zeros(8)} for x in batches()])
    told = 'batch["x"] of batch 7 was changed in place by the step: a rerun begins with the changed values.'
    assert told in str(error)
    assert 'batch["y"]' not in str(error)
    about = json.loads(error.capsule_path.with_suffix(".json").read_text())
    assert about["doubts"][0] == told
    found = replay(error.capsule_path, model=InPlace(nn.Linear(6, 3)))
    assert told in found.summary()


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path):
    error, *_ = halted("plain", tmp_path, capsule=False)
    assert error.capsule_path is None
    assert "memtools replay" not in str(error)
    assert not [*tmp_path.rglob("*capsule*")]
    error, *_ = halted("plain", tmp_path / "unexplained", explain=False)
    assert error.explanation is None
    assert "(explain=False)" in str(error)
    found = replay(error.capsule_path)
    assert found.exact
    assert found.explanation.operation == "aten.log", "then the replay seeks it"


def test_an_unfinished_file_is_not_left_behind(tmp_path, monkeypatch):
    def fails(_, file):
        file.write(b"the first half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fails)
    error, *_ = halted("plain", tmp_path, save_last_good=False)
    assert "OSError: disk full" in str(error)
    assert [path.name for path in (tmp_path / "memtools").iterdir()] == ["nonfinite-step7-report.md"]


def test_there_is_no_capsule_without_its_small_json(tmp_path):
    in_the_way = tmp_path / "memtools" / "nonfinite-step7-rank0-capsule.json"
    in_the_way.mkdir(parents=True)
    error, *_ = halted("plain", tmp_path, save_last_good=False)
    assert error.capsule_path is None
    assert "could not be written: IsADirectoryError" in str(error)
    left = {path.name for path in (tmp_path / "memtools").iterdir()}
    assert left == {in_the_way.name, "nonfinite-step7-report.md"}


@dataclasses.dataclass(frozen=True)
class Graph:
    nodes: Tensor
    name: str


class Pair(NamedTuple):
    one: Any
    other: Any


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(), st.binary(),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3])]),
    st.lists(st.floats(width=32, allow_nan=False)).map(torch.tensor),
    st.lists(st.integers(0, 9)).map(lambda x: np.array(x, dtype=np.int16)),
)  # fmt: skip
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Graph, st.just(torch.ones(2)), st.text()),
        st.dictionaries(st.text(), inner, max_size=2).map(collections.OrderedDict),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911, one kind each
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Graph):
        return same(one.nodes, other.nodes) and one.name == other.name
    return bool(one == other)


@given(NESTED)
def test_nested_values_come_back_through_a_file_that_holds_no_code(value):
    import io  # noqa: PLC0415, for this test alone

    file, left_out = io.BytesIO(), []
    torch.save(to_plain(value, left_out, "batch"), file)
    file.seek(0)
    assert same(from_plain(torch.load(file, weights_only=True), find), value)
    assert left_out == []


def test_what_cannot_be_held_is_named():
    left_out: list[str] = []
    plain = to_plain({"x": torch.ones(2), "meta": [object()]}, left_out, "batch")
    assert left_out == ["batch['meta'][0] (a object)"]
    assert "left out" in repr(from_plain(plain, find)["meta"][0])


@pytest.mark.parametrize(
    "view",
    [lambda x: x[10:20], lambda x: x[:, 3:5], lambda x: x.T[3:], lambda x: x[5:6].expand(4, 100), lambda x: x[::3]],
)
def test_a_view_is_kept_with_its_strides_and_without_the_rest(view):
    whole = torch.arange(10_000.0).view(100, 100)
    part = view(whole)
    kept = compact(part)
    assert torch.equal(kept, part)
    assert kept.stride() == part.stride()
    extent = 1 + sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
    assert kept.untyped_storage().nbytes() == 4 * extent
