"""The package as a whole: lazy import, public names, floors."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import lightning_memtools
from tests.pending import WRONG_IMPORTS

PACKAGE = Path(lightning_memtools.__file__).parent

# A room may import itself and the floors below it, and no other room of its own floor.
FLOOR = {
    "memory": 1,
    "reporting": 2,
    "state": 2,
    "simulation": 3,
    "null_cuda": 3,
    "checkpointing": 4,
    "nonfinite": 4,
    "batch_size": 4,
    "estimate": 4,
    "doctor": 4,
    "oom": 5,
    "callbacks": 6,
    "cli": 6,
}
MAY_IMPORT_LIGHTNING = {"callbacks", "cli", "reporting", "batch_size/trainer"}
APART = "tensorboard_plugin"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def check(name: str, found: Mapping[str, object], pending: set[str]) -> None:
    """Fail for what is found beyond the pending files, and for pending files in which nothing is found any more."""
    new = {file: what for file, what in found.items() if file not in pending}
    assert not new, f"against the rules of the house (docs/design.md): {new}"
    done = pending - set(found)
    assert not done, f"take these out of {name} in tests/pending.py, they are in order now: {sorted(done)}"


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it but under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    hidden = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_importing_the_package_loads_neither_torch_nor_lightning():
    code = "import sys, lightning_memtools as m; m.__version__; print({'torch', 'lightning'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("name", lightning_memtools.__all__)
def test_every_public_name_is_what_its_module_defines(name):
    value = getattr(lightning_memtools, name)
    assert value.__name__ == name
    assert value.__module__.startswith("lightning_memtools.")
    assert value.__doc__, f"{name} has no docstring"


def test_an_unknown_name_is_refused_with_a_list_of_what_exists():
    with pytest.raises(AttributeError, match=r"no attribute 'MemoryMonitr'; it offers .*MemoryMonitor"):
        lightning_memtools.MemoryMonitr  # noqa: B018, the access is the test


def test_the_checker_sees_every_kind_of_import(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("import a.b\ndef f():\n    from c import d\nif TYPE_CHECKING:\n    import hidden\n")
    assert list(imports_of(file)) == ["a.b", "c", "c.d"]


def wrong_imports(path: Path) -> Iterator[str]:
    """Every import of a file that its floor forbids."""
    part = part_of(path)
    rooms = {str(room) for room in path.relative_to(PACKAGE).parents}
    for module in imports_of(path):
        names = module.split(".")
        if names[0] == "lightning_memtools" and len(names) > 1 and names[1] in FLOOR:
            other = names[1]
            if part == APART or (other != part and FLOOR[other] >= FLOOR[part]):
                yield module
        knows_lightning = names[0] in {"lightning", "pytorch_lightning"} or names[:2] == [
            "lightning_memtools",
            "_lightning",
        ]
        if knows_lightning and not rooms & MAY_IMPORT_LIGHTNING:
            yield module
        if part == APART and names[0] in {"torch", "torchmetrics"}:
            yield module


def test_floors_import_downwards_only_and_no_sibling():
    in_rooms = [path for path in sources() if path.parent != PACKAGE]
    unknown = {part_of(path) for path in in_rooms} - set(FLOOR) - {APART}
    assert not unknown, f"{unknown} stands on no floor: add it to docs/design.md and to FLOOR"
    found = {name_of(path): sorted(set(wrong_imports(path))) for path in in_rooms}
    check("WRONG_IMPORTS", {name: modules for name, modules in found.items() if modules}, WRONG_IMPORTS)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_lightning_attributes_are_touched_in_one_file_only(path):
    if path.name == "_lightning.py":
        return
    tree = ast.parse(path.read_text())
    holders = {"trainer", "fit_loop", "epoch_loop", "strategy", "logger", "pl_module", "_logger_connector"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            holder = node.value
            name = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")
            assert name not in holders, f"{path}:{node.lineno} touches {name}.{node.attr}"
