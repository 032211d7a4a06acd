"""The manual: every block of code runs as it stands on its page, and its lists are those of the package."""

import contextlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_memtools
from lightning_memtools import NonFiniteError
from lightning_memtools.cli.main import command_parser, main
from tests.prepared.starting import prepared_python

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text("utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ENDS_WITH = {"halt-on-nan.md": NonFiniteError, "oom-report.md": torch.OutOfMemoryError}
"""Pages that show what becomes of an error."""
RUN_ON_THE_NULL_DEVICE = {"dry-run.md"}
"""Pages that tests/null_cuda/test_dry_run.py runs."""


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in RUN_ON_THE_NULL_DEVICE])
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # `memtools replay` adds the folder of the script
    if page == "replay.md":
        write_the_capsule()
        (command,) = blocks(page, "bash")
        assert main([*shlex.split(command)[1:], "--trust"]) == 0  # at a terminal a person is asked
        assert capsys.readouterr().out.splitlines() == blocks(page, "text")[0].splitlines()
    names: dict[str, object] = {"__name__": "__main__"}
    expected = ENDS_WITH.get(page)
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        for number, block in enumerate(blocks(page)):
            path = tmp_path / ("train.py" if expected else f"block{number}.py")
            path.write_text(block)
            exec(compile(block, str(path), "exec"), names)  # noqa: S102, our own pages


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_language_that_a_test_runs(page):
    marks = re.findall(r"^ *```(.*)$", PAGES[page], re.MULTILINE)
    known = {re.sub(r' title="Needs \w+"$', "", mark) for mark in marks[::2]}  # tests/integration/test_ecosystem.py
    assert known <= {"python", "bash", "yaml", "text"}  # text: what a program prints
    assert set(marks[1::2]) <= {""}


def commands() -> list[str]:
    lines = [line for page in PAGES for text in blocks(page, "bash") for line in text.replace("\\\n", "").splitlines()]
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("line", commands())
def test_every_command_of_a_page_is_understood(line):
    """The scripts that examples.md names run in tests/integration, and the commands in tests/cli."""
    program, *words = shlex.split(line, comments=True)
    if program == "memtools":
        command_parser().parse_args(words)
    elif program == "python":
        script = words[1] if words[0] == "-m" else words[0]
        assert find_spec(script) if words[0] == "-m" else (ROOT / script).exists()
    elif program == "make":
        assert all(f"\n{target}:" in (ROOT / "Makefile").read_text("utf-8") for target in words)
    elif program == "pip":
        extras = set(re.findall(r"\w+", words[-1].partition("[")[2]))
        assert extras <= {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}
    else:
        assert (program, words) == ("tensorboard", ["--logdir", "lightning_logs"])


def test_the_extra_installs_what_the_examples_import():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
    # scikit-learn's module is sklearn; lightning imports wandb for its logger.
    installed = {re.match(r"[\w-]+", one)[0].replace("scikit-learn", "sklearn") for one in wanted}
    known = installed | sys.stdlib_module_names | {"lightning_memtools"} | {path.stem for path in EXAMPLES}
    for path in EXAMPLES:
        text = path.read_text("utf-8")
        found = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
        assert found | ({"wandb"} if "WandbLogger" in text else set()) <= known, path.name


def write_the_capsule():
    """The example of HaltOnNaN's page leaves the capsule that the page on replays begins with."""
    Path("train.py").write_text(blocks("halt-on-nan.md")[0])
    done = subprocess.run([prepared_python(), "train.py"], check=False)
    assert done.returncode == 1


@pytest.mark.filterwarnings("ignore")
def test_the_error_on_the_page_is_the_one_that_its_example_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(blocks("halt-on-nan.md")[0])
    with pytest.raises(NonFiniteError) as caught:
        runpy.run_path("train.py", run_name="__main__")
    printed = blocks("halt-on-nan.md", "text")[0]
    assert str(caught.value).splitlines()[:4] == printed.removeprefix("NonFiniteError: ").splitlines()[:4]


@pytest.mark.parametrize(
    "text", [text for page in ("README.md", "guide-lightning-cli.md") for text in blocks(page, "yaml")]
)
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_yaml_makes_its_callbacks(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text)
    cli = LightningCLI(BoringModel, run=False, args=["--config", "config.yaml"], save_config_callback=None)
    wanted = yaml.safe_load(text)["trainer"]["callbacks"]
    made = {type(one).__name__ for one in cli.trainer.callbacks}
    assert {one["class_path"].rpartition(".")[2] for one in wanted} <= made


def test_the_workflow_on_the_page_is_the_file_and_runs_commands_that_exist():
    text = (ROOT / "examples" / "memory_budgets_workflow.yml").read_text("utf-8")
    assert text in blocks("memory-budgets.md", "yaml")
    steps = yaml.safe_load(text)["jobs"]["budgets"]["steps"]
    ran = "\n".join(step.get("run", "") for step in steps).replace("\\\n", "")
    parser = command_parser()
    lines = re.findall(r"\.venv/bin/memtools (.*?)(?: \|.*)?$", ran, re.MULTILINE)
    assert [parser.parse_args(shlex.split(line)).run.__module__.rpartition(".")[2] for line in lines] == [
        "dry_run",
        "diff",
    ]


def test_the_reference_has_every_public_name():
    documented = re.findall(r"^::: [\w.]+\.(\w+)$", PAGES["api.md"], re.MULTILINE)
    assert sorted(documented) == sorted(lightning_memtools.__all__)
    homes = re.findall(r"^::: ([\w.]+)\.(\w+)$", PAGES["api.md"], re.MULTILINE)
    for module, name in homes:
        public = getattr(lightning_memtools, name)
        assert public.__module__ == module, f"api.md looks for {name} in {module}"


def test_the_reference_lists_members_that_exist():
    listed = re.findall(r"^::: [\w.]+\.(\w+)\n +options:\n +members: \[(.*)\]$", PAGES["api.md"], re.MULTILINE)
    missing = [
        f"{name}.{member}"
        for name, members in listed
        for member in members.split(", ")
        if not hasattr(getattr(lightning_memtools, name), member)
    ]
    assert missing == []
    assert len(listed) > 3


def test_every_file_that_a_page_names_exists():
    for page, text in PAGES.items():
        for named in re.findall(r"`((?:benchmarks|tests|examples|lightning_memtools|docs)/[\w./-]+\.\w+)`", text):
            assert (ROOT / named).exists(), f"{page} names {named}"
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            folder = ROOT if page == "README.md" else ROOT / "docs"
            assert (folder / link).exists(), f"{page} links to {link}"
