"""`memtools diff` of two results and of two revisions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_memtools.budgets.peak_memory import PeakMemory
from lightning_memtools.cli.main import main
from lightning_memtools.null_cuda.dry_run.result import DryRunResult, DryRunStage

MIB = 2**20


def diff(capsys, *arguments):
    """The result of a comparison as JSON."""
    capsys.readouterr()
    assert main(["diff", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def dry_run_result(kept):
    stages = [
        DryRunStage(
            stage="train", peak_allocated_bytes=(64 + kept) * MIB, peak_reserved_bytes=128 * MIB, peak_at="backward",
            bytes_by_category={"activations": (64 + kept) * MIB}, bytes_by_module={"net": (64 + kept) * MIB},
            bytes_by_line={"net.py:7: self.kept.append(x)": kept * MIB},
        ),
        DryRunStage(stage="val", peak_allocated_bytes=MIB, peak_reserved_bytes=2 * MIB),
    ]  # fmt: skip
    return DryRunResult(device="A100 80GB (dry run)", capacity_bytes=2**36, status=0, stages=stages, torch="2.13.0")


def test_two_dry_runs(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(asdict(dry_run_result(0))))
    after.write_text(json.dumps(asdict(dry_run_result(8))))
    found = diff(capsys, before, after)
    assert found["totals"][0]["difference"] == 8 * MIB
    assert found["modules"] == [{"name": "net", "before": 64 * MIB, "after": 72 * MIB, "difference": 8 * MIB}]
    assert found["lines"][0]["name"] == "net.py:7: self.kept.append(x)"
    assert main(["diff", str(before), str(after), "--markdown"]) == 0
    assert "| net.py:7: self.kept.append(x) | 0 B | 8.00 MiB | +8.00 MiB |" in capsys.readouterr().out
    assert main(["diff", str(before), str(before)]) == 0
    assert "is the same: 64.0 MiB" in capsys.readouterr().out


TARGETS = """
import torch
def small(): return torch.nn.Linear(256, 256), torch.zeros(2**15, 256), step
def large(): return torch.nn.Linear(256, 512), torch.zeros(2**15, 256), step
def step(model, x): return model(x).relu().mean()
"""


def test_two_estimates(tmp_path, monkeypatch, capsys):
    (tmp_path / "diff_targets.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    for name in ("small", "large"):
        assert main(["estimate", f"diff_targets:{name}", "--json"]) == 0
        Path(f"{name}.json").write_text(capsys.readouterr().out)
    found = diff(capsys, "small.json", "large.json")
    parameters = next(one for one in found["categories"] if one["name"] == "parameters")
    assert parameters["difference"] == 4 * (257 * 256)
    assert any(one["name"].startswith("diff_targets.py:5: def step") for one in found["lines"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a.json",), "compares two results"),
        (("a.json", "b.json"), "a.json cannot be read"),
        (("bad.json", "bad.json"), "bad.json cannot be read as JSON"),
        (("other.json", "other.json"), "other.json holds no result"),
        (("folder", "folder"), "folder cannot be read"),
        (("--git", "main..HEAD"), "--git needs a script"),
        (("--git", "main..HEAD", "--", "train.py"), "git cannot tell"),
    ],
)
def test_what_is_no_result_is_named(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    Path("bad.json").write_text('{"allocated": 5')
    Path("other.json").write_text('{"a": 5}')
    Path("folder").mkdir()
    assert main(["diff", *arguments]) == 1
    assert said in capsys.readouterr().err


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for _ in range(3):
    out = model(torch.zeros(4096, 256, device="cuda"))
    out.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.cuda_memory
def test_two_revisions_of_a_script(tmp_path):
    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        return done.stdout

    git = ("git", "-c", "user.email=a@b", "-c", "user.name=a")
    run("git", "init", "-q")
    for text in (
        SCRIPT,
        SCRIPT.replace("out = model(", "kept.append(out := model(").replace('"cuda"))\n    out', '"cuda")))\n    out'),
    ):
        (tmp_path / "train.py").write_text(text)
        run("git", "add", "train.py")
        run(*git, "commit", "-qm", "step")
    before = (tmp_path / ".git" / "HEAD").read_text(), sorted(path.name for path in (tmp_path / ".git").iterdir())
    command = [sys.executable, "-m", "lightning_memtools.cli.main", "diff", "--json", "--git", "HEAD~1..HEAD", "--"]
    command.append("train.py")
    found = json.loads(run(*command))
    # Two results of 4 MiB, of the steps before.
    assert found["totals"][0]["difference"] == pytest.approx(2 * 4 * MIB, abs=2 * MIB)
    assert found["lines"][0]["name"].startswith("train.py:7: kept.append(out := model(")
    assert [found[side]["name"] for side in ("before", "after")] == ["HEAD~1", "HEAD"]
    assert ((tmp_path / ".git" / "HEAD").read_text(), sorted(p.name for p in (tmp_path / ".git").iterdir())) == before
    (tmp_path / "train.py").write_text("1 / 0")
    done = subprocess.run(
        [*command[:-3], "HEAD", "--", "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "the files as they are: " in done.stderr
    assert "ended with an error of its own" in done.stderr


@pytest.mark.cuda_memory
def test_a_budget_of_a_script_has_an_exit_status_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*options, script="train.py"):
        command = [sys.executable, "-m", "lightning_memtools.cli.main", "dry-run", *options, script]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("--at-most", "8MiB", "--json")
    assert done.returncode == 4
    assert "over the budget of 8.00 MiB" in done.stderr
    assert "train.py:7: out = model(" in done.stderr
    peak = DryRunResult.from_json(json.loads(done.stdout)).peak
    assert isinstance(peak, PeakMemory)
    assert sum(peak.modules.values()) == sum(peak.lines.values())
    again = run("--at-most", "1GiB", "--json")
    assert again.returncode == 0
    assert DryRunResult.from_json(json.loads(again.stdout)).peak == peak  # equal to the byte in another process
    assert run("--at-most", "22").returncode == 2
    (tmp_path / "nothing.py").write_text("print('nothing')")
    assert run("--at-most", "22GiB", script="nothing.py").returncode == 1
