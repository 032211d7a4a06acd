"""A fork of the prepared Python gets what a fresh Python gets, and ends as it does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prepared.starting import prepared_python

SEEN = """
import json, os, sys
import {imported}
from lightning.fabric.utilities.rank_zero import rank_zero_only
import torch
files = sorted(int(number) for number in os.listdir("/proc/self/fd"))[:-1]
print(json.dumps({{
    "argv": sys.argv, "folder": os.getcwd(), "path": sys.path, "name": __name__, "spec": __spec__ and __spec__.name,
    "environment": dict(os.environ), "rank": rank_zero_only.rank, "read": sys.stdin.read(), "files": files,
    "threads": torch.get_num_threads(), "main": sorted(vars(sys.modules["__main__"])),
}}))
"""


def seen(python, tmp_path, *how, **environment):
    (tmp_path / "seen.py").write_text(SEEN.format(imported="lightning"))
    done = subprocess.run(
        [python, *how, "an argument"],
        input="some input",
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "how",
    [("seen.py",), ("-c", SEEN.format(imported="lightning")), ("-B", "seen.py")],
    ids=["script", "code", "script with an option"],
)
def test_a_script_sees_what_it_sees_in_a_fresh_python(how, tmp_path):
    fork, fresh = (seen(python, tmp_path, *how, LOCAL_RANK="1") for python in (prepared_python(), sys.executable))
    assert fork == fresh
    assert fork["rank"] == 1
    assert fork["read"] == "some input"


def test_in_an_environment_that_is_read_at_the_start_it_is_a_fresh_one(tmp_path):
    assert seen(prepared_python(), tmp_path, "seen.py", OMP_NUM_THREADS="2")["threads"] == 2


@pytest.mark.parametrize(
    "code",
    ["raise SystemExit(3)", "raise SystemExit('a word')", "raise KeyboardInterrupt", "print('end')", "1 / 0",
     "import os; os._exit(5)", "import os; os.kill(os.getpid(), 9)"],
)  # fmt: skip
def test_it_ends_as_a_fresh_python_does(code):
    fork, fresh = (
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        for python in (prepared_python(), sys.executable)
    )
    assert (fork.returncode, fork.stdout) == (fresh.returncode, fresh.stdout)
    assert fork.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_each_draws_random_numbers_of_its_own():
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    drawn = [subprocess.run([prepared_python(), "-c", code], capture_output=True, text=True, check=True) for _ in "12"]
    first, second = (done.stdout.split() for done in drawn)
    assert len({*first, *second}) == 6


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_script(number):
    with subprocess.Popen(
        [prepared_python(), "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        script = Path("/proc", started.stdout.readline().strip())
        started.send_signal(number)
        assert started.stdout.read() == ""  # when nobody has it open any more, the script has ended
        assert started.wait() == -number
        assert not script.exists() or "State:\tZ" in (script / "status").read_text()
