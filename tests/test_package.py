"""The package as a whole: lazy import, public names, and the rules that its source keeps."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_memtools
from tests.house_rules import (
    APART,
    DESIGN,
    FLOOR,
    PACKAGE,
    RULES,
    TABLE_BEGINS,
    TABLE_ENDS,
    budget_table,
    imports_of,
    name_of,
    private_names_of,
    sources,
)


@pytest.mark.parametrize("module", ["lightning_memtools", "lightning_memtools.cli.main"])
def test_importing_the_package_or_its_command_loads_neither_torch_nor_lightning(module):
    code = f"import sys, {module} as m; m.__name__; print({{'torch', 'lightning'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("name", lightning_memtools.__all__)
def test_every_public_name_is_what_its_module_defines(name):
    value = getattr(lightning_memtools, name)
    assert value.__name__ == name
    assert value.__module__.startswith("lightning_memtools.")
    assert value.__doc__, f"{name} has no docstring"


def test_dir_shows_public_names_only():
    assert dir(lightning_memtools) == sorted([*lightning_memtools.__all__, "__version__"])


def test_an_unknown_name_is_refused_with_a_list_of_what_exists():
    with pytest.raises(AttributeError, match=r"'MemoryMonitr'; .*MemoryMonitor"):
        lightning_memtools.MemoryMonitr  # noqa: B018, the access is the test


def test_the_version_is_stated_once():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "lightning_memtools/__init__.py"


def test_every_room_stands_on_a_floor():
    rooms = {name_of(path).partition("/")[0] for path in sources() if path.parent != PACKAGE}
    assert rooms <= {*FLOOR, APART}, "add the new room to docs/design.md and to FLOOR"


@pytest.mark.parametrize("rule", RULES)
def test_the_source_keeps(rule):
    found = RULES[rule]()
    assert not found, f"against the rules of the house (docs/design.md): {found}"


def test_the_page_on_the_design_has_the_budgets():
    page = DESIGN.read_text("utf-8")
    assert TABLE_BEGINS + budget_table() + TABLE_ENDS in page, "run: python -m tests.house_rules"


def test_the_checker_sees_every_kind_of_import(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("import a.b\ndef f():\n    from c import d\nif TYPE_CHECKING:\n    import hidden\n")
    assert list(imports_of(file)) == ["a.b", "c", "c.d"]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch.utils._pytree import tree_map", ["_pytree", "_pytree"]),
        ("from lightning_memtools.memory import _hidden", ["_hidden"]),
        ("getattr(storage, '_cdata', None)", ["_cdata"]),
        ("from lightning_memtools._torch import x; import _thread; x.__dict__; hasattr(x, '_fields')", []),
    ],
)
def test_the_checker_sees_what_ruff_does_not_see_of_private_names(code, names, tmp_path):
    file = tmp_path / "x.py"
    file.write_text(code)
    assert list(private_names_of(file)) == names


def test_every_category_of_warnings_is_ours_and_a_user_warning():
    names = [name for name in lightning_memtools.__all__ if name.endswith("Warning")]
    assert names == ["DegradedWarning", "FindingWarning", "MemtoolsWarning"]
    assert all(issubclass(getattr(lightning_memtools, name), lightning_memtools.MemtoolsWarning) for name in names)
    assert issubclass(lightning_memtools.MemtoolsWarning, UserWarning)


def test_the_suite_is_run_where_files_left_behind_are_seen():
    script = (Path(__file__).parents[1] / ".ci" / "run").read_text()
    assert "git status --porcelain" in script.partition("make test")[2]
