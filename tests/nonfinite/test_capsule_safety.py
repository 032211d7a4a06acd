"""A capsule is a file from anywhere: replaying one runs no code that it names, and fails with CapsuleError alone."""

from __future__ import annotations

import copy
import os
import pty
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memtools import CapsuleError, replay
from lightning_memtools.cli.main import main
from tests.nonfinite.replay_models import halted

N_MUTATIONS = 60


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Any = halted("plain", tmp_path_factory.mktemp("written"))[0].capsule_path
    return torch.load(path, weights_only=True)


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module that leaves a mark when it is imported; yields the mark."""
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w').close()\nimport lightning\nclass Net(lightning.LightningModule): pass\n"
    (tmp_path / "payload_of_this_test.py").write_text(code + "if __name__ == '__main__': pass\n")
    yield mark
    sys.modules.pop("payload_of_this_test", None)


def crafted(saved: Any, mark: Path) -> dict[str, Any]:
    """Capsules of plain values that would each leave the mark."""
    command = f"touch {mark}"
    call = {"_kind": "named tuple", "class": "os:system", "items": [command]}
    made = {name: copy.deepcopy(saved) for name in ("class", "batch", "mapping", "explanation", "folder", "script")}
    made["class"]["module"] |= {"class": "os:system", "hparams": {"command": command}, "hparams_left_out": []}
    made["batch"]["micro"][0]["batch"] = call
    made["mapping"]["micro"][0]["batch"] = {
        "_kind": "mapping",
        "class": "subprocess:getoutput",
        "pairs": [[command, 1]],
    }
    made["explanation"]["explanation"] = call
    made["folder"]["module"]["class"] = "payload_of_this_test:Net"
    made["folder"]["origin"]["folder"] = str(mark.parent)
    made["script"]["module"]["class"] = "__main__:Net"
    made["script"]["origin"] |= {"script": str(mark.parent / "payload_of_this_test.py"), "name": ""}
    return made


@pytest.mark.parametrize("name", ["class", "batch", "mapping", "explanation", "folder", "script"])
def test_a_crafted_capsule_runs_nothing(name: str, written: Any, payload: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "crafted.pt"
    torch.save(crafted(written, payload)[name], path)
    with pytest.raises(CapsuleError):
        replay(path)
    assert main(["replay", str(path)]) == 1, "there is no terminal to say yes at"
    assert not payload.exists()
    said = capsys.readouterr().err
    if name in {"folder", "script"}:
        assert "payload_of_this_test.py" in said, "it says what would be imported"
        assert "--trust" in said


def test_with_trust_the_modules_of_a_capsule_are_imported(written: Any, payload: Path, tmp_path: Path) -> None:
    """The attack is real: what is refused above would run."""
    path = tmp_path / "crafted.pt"
    torch.save(crafted(written, payload)["folder"], path)
    asked: list[tuple[str, str]] = []

    def yes(module: str, place: str) -> bool:
        asked.append((module, place))
        return True

    with pytest.raises(CapsuleError):
        replay(path, trust=yes)
    assert asked == [("payload_of_this_test", str(tmp_path / "payload_of_this_test.py"))]
    assert payload.exists()


@pytest.mark.parametrize("answer", ["y", "n"])
def test_the_command_shows_the_place_at_a_terminal_and_asks(
    answer: str, written: Any, payload: Path, *, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "crafted.pt"
    torch.save(crafted(written, payload)["folder"], path)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "w") as keyboard, os.fdopen(theirs) as terminal:
        keyboard.write(f"{answer}\n")
        keyboard.flush()
        monkeypatch.setattr(sys, "stdin", terminal)
        assert main(["replay", str(path)]) == 1, "what it imports is not the module of the step"
    asked = capsys.readouterr().out
    assert repr(str(tmp_path / "payload_of_this_test.py")) in asked
    assert "Import it? [y/N]" in asked
    assert payload.exists() == (answer == "y")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def test_capsules_that_were_changed_anywhere_fail_with_a_capsule_error_or_replay(
    written: Any, payload: Path, tmp_path: Path
) -> None:
    chance = random.Random(0)  # noqa: S311, for the choice of changes
    path = tmp_path / "changed.pt"
    n_refused = 0
    for _ in range(N_MUTATIONS):
        saved = copy.deepcopy(written)
        part = chance.choice(list(saved))  # first, since one part may have more places than all others
        holder, key = chance.choice([(saved, part), *_places(saved[part])])
        call = {"_kind": "named tuple", "class": "os:system", "items": [f"touch {payload}"]}
        kinds: list[Any] = [None, -1, "os:system", [], {}, torch.zeros(2, dtype=torch.int64), call, "missing"]
        value = chance.choice(kinds)
        if value == "missing" and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = value
        torch.save(saved, path)
        try:
            replay(path)
        except CapsuleError:
            n_refused += 1
        assert not payload.exists()
    assert n_refused > N_MUTATIONS / 10, "the changes matter"


def test_a_script_that_parses_arguments_when_it_is_imported(written: Any, tmp_path: Path) -> None:
    script = tmp_path / "parses_arguments.py"
    script.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--rate')\nparser.parse_args()\n"
        "from tests.nonfinite.replay_models import Everything\nif __name__ == '__main__': pass\n"
    )
    saved = copy.deepcopy(written)
    saved["module"]["class"] = "__main__:Everything"
    saved["origin"] |= {"script": str(script), "name": ""}
    torch.save(saved, tmp_path / "script.pt")
    try:
        assert replay(tmp_path / "script.pt", trust=True).exact
    finally:
        sys.modules.pop("parses_arguments", None)


def test_files_that_are_no_files_are_not_read(written: Any, tmp_path: Path) -> None:
    saved = copy.deepcopy(written)
    saved["origin"]["files"] = {"/dev/zero": ""}
    torch.save(saved, tmp_path / "device.pt")
    assert replay(tmp_path / "device.pt").changed == ()


def test_the_place_that_is_asked_for_is_the_one_that_is_imported(written: Any, payload: Path, tmp_path: Path) -> None:
    saved = copy.deepcopy(written)
    saved["module"]["class"] = "__main__:Net"
    (tmp_path / "harmless.py").write_text("if __name__ == '__main__': pass\n")
    saved["origin"] |= {
        "script": str(tmp_path / "harmless.py"),
        "name": "payload_of_this_test",
        "folder": str(tmp_path),
    }
    torch.save(saved, tmp_path / "named.pt")
    asked: list[str] = []

    def no(_module: str, place: str) -> bool:
        asked.append(place)
        return False

    with pytest.raises(CapsuleError):
        replay(tmp_path / "named.pt", trust=no)
    assert asked == [str(tmp_path / "payload_of_this_test.py")]
    assert not payload.exists()


def test_an_absent_device_is_replaced_by_the_cpu_and_named(written: Any, tmp_path: Path) -> None:
    saved = copy.deepcopy(written)
    saved["machine"]["device"] = "cuda:7"
    torch.save(saved, tmp_path / "device.pt")
    found = replay(tmp_path / "device.pt")
    assert found.exact
    assert "device cpu, was cuda:7" in found.differences


@pytest.mark.parametrize("kind", ["builtins:dict", "builtins:int", "torch.nn.modules.linear:Linear", "pathlib:Path"])
def test_a_class_that_is_no_lightning_module_is_refused_by_its_name(kind: str, written: Any, tmp_path: Path) -> None:
    saved = copy.deepcopy(written)
    saved["module"]["class"] = kind
    torch.save(saved, tmp_path / "class.pt")
    with pytest.raises(CapsuleError, match=kind.replace(":", ".") + "|" + kind.rpartition(":")[2]):
        replay(tmp_path / "class.pt", trust=True)


@pytest.mark.parametrize(
    ("key", "value"), [("default_dtype", "float99"), ("default_dtype", "int64"), ("autocast", "load")]
)
def test_a_type_that_torch_does_not_have_or_cannot_compute_in_is_named(
    key: str, value: str, written: Any, tmp_path: Path
) -> None:
    saved = copy.deepcopy(written)
    saved["conditions"][key] = value
    torch.save(saved, tmp_path / "dtype.pt")
    with pytest.raises(CapsuleError, match=rf"torch\.{value} is no|only floating-point types"):
        replay(tmp_path / "dtype.pt")


def test_weights_of_another_type_are_refused_and_not_computed_with(written: Any, tmp_path: Path) -> None:
    saved = copy.deepcopy(written)
    weights = saved["weights"]["parameters"]
    name = next(name for name in weights if name.startswith("last"))
    weights[name] = weights[name].double()
    torch.save(saved, tmp_path / "weights.pt")
    with pytest.raises(CapsuleError, match="dtype"):
        replay(tmp_path / "weights.pt")


@pytest.mark.parametrize("n_copies", [1, 64])
def test_a_capsule_that_unpacks_to_more_than_its_size_is_refused_before_it_is_read(
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
    with pytest.raises(CapsuleError, match="MiB"):
        replay(path)
