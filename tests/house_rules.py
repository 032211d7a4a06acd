"""Rules of the house (docs/design.md) that can be read off the source: floors, names, docstrings, sizes of rooms.

`python -m tests.house_rules` prints each part's size and budget, and writes the table of budgets into docs/design.md.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_memtools"
DESIGN = ROOT / "docs" / "design.md"
TABLE_BEGINS, TABLE_ENDS = "<!-- budgets -->\n", "<!-- end of budgets -->"

# A room may import itself and the floors below it, and no other room of its own floor.
FLOOR = {
    "memory": 1,
    "reporting": 2,
    "state": 2,
    "simulation": 3,
    "null_cuda": 2,
    "checkpointing": 4,
    "nonfinite": 4,
    "batch_size": 4,
    "estimate": 4,
    "doctor": 4,
    "budgets": 5,
    "verdict": 5,
    "oom": 5,
    "recovery": 5,
    "callbacks": 6,
    "null_cuda/dry_run": 7,
    "verdict/in_trainer": 7,
    "cli": 8,
}
MAY_IMPORT_LIGHTNING = {"callbacks", "cli", "reporting", "batch_size/trainer", "simulation", "doctor"} | {
    "null_cuda/dry_run",
    "verdict/in_trainer",
}
APART = "tensorboard_plugin"

# Lines of Python, but for the last two parts. Anybody may lower a budget; only an issue that says so raises one. What a
# new feature needs, its room gives up elsewhere.
REST = "the package's own files"
ROOMS_OF_FOLDERS = {
    "null_cuda": "null_cuda, with the dry run",
    "cli": "cli, without the dry run",
    "memory": "memory, its own files",
}
BUDGETS = {
    "callbacks": 2463,
    "cli, without the dry run": 892,
    "null_cuda, with the dry run": 1500,
    "budgets": 896,
    "verdict": 1007,
    "autoload.py": 42,
    "oom": 1877,
    "recovery": 736,
    "nonfinite": 2695,
    "doctor": 1170,
    "checkpointing": 2554,
    "batch_size": 1494,
    "memory, its own files": 3246,
    "memory/allocator": 1710,
    "memory/virtual": 2166,
    "memory/cuda_ops": 1150,
    "memory/leaks": 1126,
    "simulation": 2495,
    "estimate": 758,
    "reporting": 1391,
    "state": 543,
    "tensorboard_plugin": 950,
    "_lightning.py": 583,
    "_torch.py": 788,
    REST: 141,
    "the library": 34373,
    "tests": 28660,
    "benchmarks": 3997,
    "benchmarks' JSON": 1469,
    "words in docs": 27302,
}
ROOMS = {*BUDGETS} - {"tests", "benchmarks"}

# The only files that may use private parts of torch and Lightning.
GROUND = {"_torch.py", "_lightning.py"}
# Underscored but documented: what named tuples have.
_DOCUMENTED = {"_fields"}
_TAKE_A_NAME = {"getattr", "setattr", "hasattr", "delattr"}
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_QUESTION_WORDS = {"What", "Whether", "How", "Why", "Who", "Where"}

Found = Mapping[str, object]
"""What breaks a rule: a file (or a class) to the places."""


def sources() -> list[Path]:
    """Return every file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a file's path within the package."""
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it but under `if TYPE_CHECKING`."""
    tree = tree_of(path)
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


def wrong_imports() -> Found:
    """Return the imports that a file's floor forbids."""
    found = {name_of(path): sorted(set(_wrong_imports(path))) for path in sources() if path.parent != PACKAGE}
    return {name: modules for name, modules in found.items() if modules}


def _wrong_imports(path: Path) -> Iterator[str]:
    rooms = {str(room) for room in path.relative_to(PACKAGE).parents}
    part = _room_in(name_of(path))
    for module in imports_of(path):
        names = module.split(".")
        other = _room_in("/".join(names[1:])) if names[0] == "lightning_memtools" else ""
        if other in FLOOR and (part == APART or (other != part and FLOOR[other] >= FLOOR[part])):
            yield module
        is_lightning = names[0] in {"lightning", "pytorch_lightning"} or module == "lightning_memtools._lightning"
        if is_lightning and not rooms & MAY_IMPORT_LIGHTNING:
            yield module
        if part == APART and names[0] in {"torch", "torchmetrics"}:
            yield module


def _room_in(name: str) -> str:
    """Return the room that a path within the package lies in: a folder with a floor of its own, or the first folder."""
    inner = "/".join(name.split("/")[:2])
    return inner if inner in FLOOR else name.partition("/")[0]


def private_names() -> Found:
    """Return the private names that a file imports, or reaches with a string; ruff sees those after a dot (SLF001)."""
    found = {name_of(path): list(private_names_of(path)) for path in sources() if name_of(path) not in GROUND}
    return {name: uses for name, uses in found.items() if uses}


def private_names_of(path: Path) -> Iterator[str]:
    """Yield the private names in a file's imports, and in its calls of getattr and the like."""
    known = {name.removesuffix(".py") for name in GROUND} | sys.stdlib_module_names | _DOCUMENTED
    found = [name for module in imports_of(path) for name in module.split(".")]
    calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
    texts = (call.args[1] for call in calls if ast.unparse(call.func) in _TAKE_A_NAME)
    found += [str(text.value) for text in texts if isinstance(text, ast.Constant)]
    yield from (name for name in found if _PRIVATE.fullmatch(name) and name not in known)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield texts that stand alone: docstrings, also those of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def suppressed_private_access() -> Found:
    """Return the files that switch off ruff's rule against private access."""
    return {name_of(path): "SLF001" for path in sources() if "SLF001" in path.read_text()}


def duplicate_names() -> Found:
    """Return the names that more than one class, or more than one file, of the package has."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        classes = [node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
        for name in classes + [path.name] * (not path.name.startswith("__")):
            places[name].append(name_of(path))
    return {name: where for name, where in places.items() if len(where) > 1}


def questioning_docstrings() -> Found:
    """Return the docstrings that begin with a question word instead of saying what the thing does or returns."""
    found = {
        name_of(path): [
            f"line {text.lineno}: {str(text.value)[:40]}"
            for text in _docstrings(tree_of(path))
            if (str(text.value).split() or [""])[0].rstrip(",:") in _QUESTION_WORDS
        ]
        for path in sources()
    }
    return {name: texts for name, texts in found.items() if texts}


def uncategorized_warnings() -> Found:
    """Return the calls of `warnings.warn` that name no category of ours, or a category that is Python's."""
    found = {
        name_of(path): [
            f"line {node.lineno}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in {"warn", "rank_zero_warn"}
            and not (len(node.args) > 1 and (name := ast.unparse(node.args[1])) and not hasattr(builtins, name))
        ]
        for path in sources()
    }
    return {name: lines for name, lines in found.items() if lines}


def sizes() -> dict[str, int]:
    """Return the size of each part that has a budget: lines, or words for the manual."""
    found = dict.fromkeys(BUDGETS, 0)
    for path in sources():
        lines = _lines_of(path)
        found[room_of(name_of(path))] += lines
        found["the library"] += lines
    for part in ("tests", "benchmarks"):
        found[part] = sum(map(_lines_of, (ROOT / part).rglob("*.py")))
    found["benchmarks' JSON"] = sum(map(_lines_of, (ROOT / "benchmarks").rglob("*.json")))
    found["words in docs"] = sum(len(path.read_text("utf-8").split()) for path in (ROOT / "docs").glob("*.md"))
    return found


def room_of(name: str) -> str:
    """Return the part of the table of budgets that a file of the package counts for."""
    folder = name.partition("/")[0]
    if name == "cli/dry_run.py":
        return "null_cuda, with the dry run"
    parents = [parent.as_posix() for parent in Path(name).parents if parent.as_posix() != "."]
    return next((place for place in (name, *parents) if place in ROOMS), ROOMS_OF_FOLDERS.get(folder, REST))


def _lines_of(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def over_budget() -> Found:
    """Return the parts that are larger than their budget, with the excess."""
    return {
        part: f"{size - BUDGETS[part]:,} over its {BUDGETS[part]:,}"
        for part, size in sizes().items()
        if size > BUDGETS[part]
    }


def budget_table() -> str:
    """Return the table of budgets of docs/design.md."""
    rows = "".join(f"| {part} | {budget:,} |\n" for part, budget in BUDGETS.items())
    return f"| part | at most |\n| --- | ---: |\n{rows}"


RULES = {
    "WRONG_IMPORTS": wrong_imports,
    "PRIVATE_NAMES": private_names,
    "SUPPRESSED_PRIVATE_ACCESS": suppressed_private_access,
    "DUPLICATE_NAMES": duplicate_names,
    "QUESTIONING_DOCSTRINGS": questioning_docstrings,
    "UNCATEGORIZED_WARNINGS": uncategorized_warnings,
    "OVER_BUDGET": over_budget,
}


def _main() -> None:
    text = DESIGN.read_text("utf-8")
    before, rest = text.split(TABLE_BEGINS)
    DESIGN.write_text(before + TABLE_BEGINS + budget_table() + TABLE_ENDS + rest.split(TABLE_ENDS)[1], "utf-8")
    for part, size in sizes().items():
        sys.stdout.write(f"{part:28} {size:7,} of {BUDGETS[part]:7,}\n")


if __name__ == "__main__":
    _main()
