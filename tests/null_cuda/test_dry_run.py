"""`memtools dry-run` and `dry_run`: unchanged scripts on PyTorch's own CUDA code."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.null_cuda.dry_run_scripts import MIB, TRAINER, command, write_script

pytestmark = pytest.mark.cuda_memory

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The command with the Trainer's script and two steps, and the files beside the script afterwards."""
    folder = tmp_path_factory.mktemp("cut")
    path = write_script(folder, TRAINER)
    with contextlib.chdir(folder):
        return command("--gpu", "RTX 3060", "--steps", "2", str(path)), list(folder.iterdir())


def test_a_lightning_script_is_cut_short_and_leaves_the_users_files_alone(cut):
    done, files = cut
    assert done.returncode == 0, done.stderr
    assert "steps 2" in done.stderr
    assert [path.name for path in files] == ["train.py"]
    assert "It fits." in done.stdout
    assert "Each training run was cut to 2 optimizer steps of one epoch" in done.stdout


def test_what_the_peak_consists_of_is_what_arithmetic_says(trained):
    train = next(one for one in trained.stages if one.stage == "train")
    # In multiples of the allocator's 512 bytes: two weights, two biases of 4096 and of 10 elements.
    parameters = 4 * (1024 * 4096 + 4096 * 10 + 4096) + 512
    assert train.bytes_by_category["parameters"] == parameters
    assert train.bytes_by_category["gradients"] == parameters
    # Adam counts its steps on the host.
    assert train.bytes_by_category["optimizer"] == 2 * parameters
    assert train.bytes_by_category["inputs"] == 64 * 1024 * 4
    assert sum(train.bytes_by_category.values()) == train.peak_allocated_bytes


def test_running_out_of_memory_gives_status_3_and_a_report(script):
    path = script(TRAINER)
    done = command("--capacity", "200MiB", str(path), "8192")
    assert done.returncode == 3, done.stderr
    assert "It runs out of memory. CUDA out of memory. Tried to allocate" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Out-of-memory report: ")]
    assert "out of memory" in Path(line.partition(": ")[2]).read_text().lower()


def test_an_error_of_the_script_is_shown_without_our_frames(script):
    path = script("def train():\n    raise KeyError('learning_rate')\ntrain()\n")
    done = command(str(path))
    assert done.returncode == 1
    assert "KeyError: 'learning_rate'" in done.stdout
    assert "in train" in done.stderr
    assert "lightning_memtools" not in done.stderr


def test_json_is_all_that_is_printed(script):
    path = script("import torch\nprint('hello')\nx = torch.empty(2**20, device='cuda')\n")
    done = command("--json", "--gpu", "RTX 4090", str(path))
    result = json.loads(done.stdout)
    (stage,) = result["stages"]  # without a Trainer, a script is measured as a whole
    assert (result["device"], result["status"], stage["stage"]) == ("RTX 4090 24GB (dry run)", 0, "script")
    assert (stage["peak_allocated_bytes"], stage["peak_reserved_bytes"]) == (4 * MIB, 20 * MIB)
    assert "hello" in done.stderr


def test_a_script_that_never_trains_is_told_so(script):
    done = command(str(script("print('nothing')\n")))
    assert done.returncode == 0
    assert "Nothing was put on a CUDA device: the script trains on the CPU, does not train, or starts" in done.stdout
    assert "There was nothing to measure." in done.stdout


def test_a_script_that_needs_values_fails_with_its_own_error_and_is_told_of_the_zeros(script):
    path = script("import torch\nloss = torch.rand(2, device='cuda').cpu().mean()\nscale = 1 / loss.item()\n")
    done = command(str(path))
    assert done.returncode == 1
    assert "The script ended with an error of its own. ZeroDivisionError" in done.stdout
    assert done.stdout.count("Tensors that are copied from the device hold zeros") == 1


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which nobody has waited for yet, does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_kill_end_the_script_and_everything_that_it_started(script, tmp_path, end):
    path = script(
        "import subprocess, sys, time, torch\n"
        "torch.zeros(1, device='cuda')\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "time.sleep(300)\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_memtools.cli.main", "dry-run", str(path)], stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 120
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    progress = process.stderr.readline()
    process.send_signal(end)
    _, errors = process.communicate(timeout=60)
    assert progress.startswith(f"Dry run of {path} (")
    assert process.returncode == 128 + end
    assert errors.endswith("memtools: interrupted; the script was ended.\n")
    assert not is_alive(int(pid.read_text()))


def test_the_block_of_the_manual_runs(script, capsys):
    script("import sys, torch\nx = torch.empty(int(sys.argv.pop()) * 2**20, dtype=torch.uint8, device='cuda')\n")
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "dry-run.md").read_text(), re.DOTALL)
    exec(block, {})  # noqa: S102, our own page
    printed = capsys.readouterr().out
    assert printed.startswith("True ")
    assert "64.0 MiB" in printed  # --batch-size 64
