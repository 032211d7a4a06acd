"""The package as a whole: lazy import, public names, floors."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_memtools

PACKAGE = Path(lightning_memtools.__file__).parent

# A floor may import its own and those below it. What is not listed stands on the highest floor.
FLOOR = {
    "memory": 1,
    "state": 1,
    "reporting": 2,
    "simulation": 2,
    "null_cuda": 2,
    "checkpointing": 3,
    "nonfinite": 3,
    "batch_size": 3,
    "estimate": 3,
    "doctor": 3,
    "oom": 4,
    "callbacks": 5,
    "cli": 5,
}
MAY_IMPORT_LIGHTNING = {"callbacks", "cli", "reporting", "batch_size/trainer"}
# Moved to its room before it was rebuilt there; whoever rebuilds it takes it off this list.
STILL_MOVING = {"batch_size/trainer/presence.py", "simulation/fake_training_step.py"}
APART = "tensorboard_plugin"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


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


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_floors_import_downwards_only(path):
    part = part_of(path)
    if path.parent == PACKAGE or path.relative_to(PACKAGE).as_posix() in STILL_MOVING:
        return
    assert part in FLOOR or part == APART, f"{part} stands on no floor: add it to DESIGN section 1 and to this test"
    for module in imports_of(path):
        names = module.split(".")
        if names[0] == "lightning_memtools" and len(names) > 1 and names[1] in FLOOR:
            assert part != APART, f"{path} stands apart and imports {module}"
            assert FLOOR[names[1]] <= FLOOR[part], f"{path} imports upwards: {module}"
            # memory and reporting share a floor; what reads a device must not know where it is shown.
            assert not (part == "memory" and names[1] == "reporting"), f"{path} imports {module}"
        if names[0] in {"lightning", "pytorch_lightning"}:
            place = path.relative_to(PACKAGE).as_posix()
            assert place.startswith(tuple(f"{room}/" for room in MAY_IMPORT_LIGHTNING)), f"{path} imports {module}"
        if part == APART:
            assert names[0] not in {"torch", "torchmetrics"}, f"{path} imports {module}"


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
