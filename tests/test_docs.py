"""The manual: every block of code runs as it stands on its page, and its lists are those of the package."""

import re
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
from lightning_memtools.cli.main import command_parser, main

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text("utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN_ELSEWHERE = {"index.md", "dry-run.md", "halt-on-nan.md", "oom-report.md"}
"""Pages whose examples end with an error, of which tests below read more, or that other tests run:
tests/null_cuda/test_dry_run.py and tests/integration/test_tutorial.py."""


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in RUN_ELSEWHERE])
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        if block.startswith("# rank.py"):  # run dry by tests/null_cuda/test_dry_run_ranks.py
            continue
        path = tmp_path / f"block{number}.py"
        path.write_text(block)
        exec(compile(block, str(path), "exec"), names)  # noqa: S102, our own pages


@pytest.mark.filterwarnings("ignore")
def test_the_report_of_a_nan_is_what_the_page_shows_and_its_step_runs_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # `memtools replay` adds the folder of the script
    example, again = blocks("halt-on-nan.md")
    (report,) = blocks("halt-on-nan.md", "text")
    Path("train.py").write_text(example)
    done = subprocess.run([sys.executable, "train.py"], check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "\n".join(report.splitlines()[:4]) in done.stderr
    (command,) = blocks("halt-on-nan.md", "bash")
    assert main(shlex.split(command)[1:]) == 0
    assert "Bit for bit the same as in the step: losses and gradients." in capsys.readouterr().out
    exec(again, {})  # noqa: S102, our own page


@pytest.mark.filterwarnings("ignore")
def test_the_report_of_an_out_of_memory_error_is_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_memtools.oom.oom_reporter.CHECKS_S", 600.0)  # however busy this machine is
    with pytest.raises(torch.OutOfMemoryError):
        exec(compile(blocks("oom-report.md")[0], "train.py", "exec"), {"__name__": "train"})  # noqa: S102, our own page
    (report,) = tmp_path.rglob("oom-*.md")
    assert set(blocks("oom-report.md", "text")[0].splitlines()) <= set(report.read_text("utf-8").splitlines())


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
        assert find_spec(script) if words[0] == "-m" else (ROOT / script).exists() or script == "digits.py"
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
    # scikit-learn's module is sklearn.
    installed = {re.match(r"[\w-]+", one)[0].replace("scikit-learn", "sklearn") for one in wanted}
    known = installed | sys.stdlib_module_names | {"lightning_memtools"} | {path.stem for path in EXAMPLES}
    for path in EXAMPLES:
        text = path.read_text("utf-8")
        found = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
        assert found <= known, path.name


@pytest.mark.parametrize("text", [text for page in ("README.md", "ecosystem.md") for text in blocks(page, "yaml")])
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_yaml_makes_its_callbacks(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text)
    cli = LightningCLI(BoringModel, run=False, args=["--config", "config.yaml"], save_config_callback=None)
    wanted = yaml.safe_load(text)["trainer"]["callbacks"]
    made = {type(one).__name__ for one in cli.trainer.callbacks}
    assert {one["class_path"].rpartition(".")[2] for one in wanted} <= made


def test_the_workflow_runs_commands_that_exist():
    steps = yaml.safe_load((ROOT / "examples" / "memory_budgets_workflow.yml").read_text("utf-8"))["jobs"]["budgets"]
    ran = "\n".join(step.get("run", "") for step in steps["steps"]).replace("\\\n", "")
    lines = re.findall(r"\.venv/bin/memtools (.*?)(?: \|.*)?$", ran, re.MULTILINE)
    parser = command_parser()
    commands = [parser.parse_args(shlex.split(line)).run.__module__.rpartition(".")[2] for line in lines]
    assert commands == ["dry_run", "diff"]


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
