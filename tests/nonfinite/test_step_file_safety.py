"""A file of a step may come from anywhere: nothing that it names is run, and it fails with StepFileError alone."""

from __future__ import annotations

import copy
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memtools import StepFileError, replay
from lightning_memtools.cli.main import main
from tests.nonfinite.replay_models import Everything, halted

N_MUTATIONS = 60
MODEL = "tests.nonfinite.replay_models:Everything"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a step, with its checkpoint beside it."""
    path: Any = halted("plain", tmp_path_factory.mktemp("written"))[0].step_path
    return Path(path)


@pytest.fixture
def files(written: Path, tmp_path: Path) -> tuple[Path, dict[str, Any], Path]:
    """A copy: the file, its contents, and the checkpoint."""
    for path in written.parent.iterdir():
        shutil.copy(path, tmp_path)
    saved = torch.load(written, weights_only=True)
    return tmp_path / written.name, saved, tmp_path / saved["checkpoint"]


class Touches:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("place", ["step", "batch", "hyperparameter", "text"])
def test_a_crafted_file_runs_nothing(place, files, tmp_path, capsys):
    path, saved, checkpoint = files
    mark = tmp_path / "mark"
    if place == "hyperparameter":
        weights = torch.load(checkpoint, weights_only=True)
        weights["hyper_parameters"] = {"width": Touches(mark)}
        torch.save(weights, checkpoint)
    elif place == "batch":
        saved["micro"][0]["batch"] = Touches(mark)
    elif place == "text":
        saved |= {"module": f"os:system('touch {mark}')", "checkpoint": "../../../../dev/zero"}
    else:
        saved["step"] = Touches(mark)
    if place != "hyperparameter":
        torch.save(saved, path)
    with pytest.raises(StepFileError):
        replay(path, model=Everything)
    assert main(["replay", str(path), "--model", MODEL]) == 1
    assert not mark.exists()
    pickle.loads(pickle.dumps(Touches(mark)))  # noqa: S301, our own
    assert mark.exists(), "the attack is real"
    assert capsys.readouterr().err


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def test_files_that_were_changed_anywhere_fail_with_a_step_file_error_or_replay(files):
    path, written, _ = files
    chance = random.Random(0)  # noqa: S311, for the choice of changes
    n_refused = 0
    for _ in range(N_MUTATIONS):
        saved = copy.deepcopy(written)
        part = chance.choice(list(saved))  # first, since one part may have more places than all others
        holder, key = chance.choice([(saved, part), *_places(saved[part])])
        value = chance.choice([None, -1, "os:system", [], {}, torch.zeros(2, dtype=torch.int64), "missing"])
        if value == "missing" and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = value
        torch.save(saved, path)
        try:
            replay(path, model=Everything)
        except StepFileError:
            n_refused += 1
    assert n_refused > N_MUTATIONS / 10, "the changes matter"


@pytest.mark.parametrize("value", ["load", "transformer-engine", None])
def test_a_precision_that_cannot_be_made_from_its_name_is_named(value, files):
    path, saved, _ = files
    saved["conditions"]["precision"] = value
    torch.save(saved, path)
    with pytest.raises(StepFileError, match=f"precision={value!r} is none of 32-true"):
        replay(path, model=Everything)


def test_weights_of_another_type_are_refused_and_not_computed_with(files):
    path, _, checkpoint = files
    saved = torch.load(checkpoint, weights_only=True)
    saved["state_dict"]["last.weight"] = saved["state_dict"]["last.weight"].double()
    torch.save(saved, checkpoint)
    with pytest.raises(StepFileError, match="dtype"):
        replay(path, model=Everything())


def test_a_file_that_is_missing_not_whole_or_another_is_named(files, tmp_path):
    path, saved, checkpoint = files
    with pytest.raises(StepFileError, match="There is no file"):
        replay(tmp_path / "none.pt", model=Everything)
    with pytest.raises(StepFileError, match="no file of a step"):
        replay(checkpoint, model=Everything)
    torch.save(saved | {"version": 99}, path)
    with pytest.raises(StepFileError, match="version"):
        replay(path, model=Everything)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StepFileError, match="copy it once more"):
        replay(path, model=Everything)
    path.write_text("no archive")
    with pytest.raises(StepFileError, match="copy it once more"):
        replay(path, model=Everything)


@pytest.mark.parametrize("n_copies", [1, 64])
def test_a_file_that_unpacks_to_more_than_its_size_is_refused_before_it_is_read(
    n_copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros that are compressed, and a storage that the directory lists many times."""
    path = tmp_path / "bomb.pt"
    torch.save({"zeros": torch.zeros(2**20)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(path, "w") as bomb:
        for each in stored.infolist():
            bomb.writestr(each.filename, stored.read(each), zipfile.ZIP_DEFLATED if n_copies == 1 else None)
        largest = max(bomb.infolist(), key=lambda each: each.file_size)
        bomb.filelist += [largest] * (n_copies - 1)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(StepFileError, match="MiB"):
        replay(path, model=Everything)
