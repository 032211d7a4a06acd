"""The published runs with PyTorch's own CUDA allocator, beside their estimates."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.estimate.published import predicted_reserved, runs

pytestmark = pytest.mark.cuda_memory

# A process of its own: the runs fill most of the 12 GiB that they were measured on, which other tests do not have. It
# leaves out the end of the interpreter, where torch's threads of the backward pass may still be at work: on a busy
# machine Python has ended one of them in the middle of C++ code, which ends the process with SIGABRT.
MEASURE = """
import json, os
from tests.estimate.published import real_reserved, runs
print(json.dumps([real_reserved(run) for run in runs()]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def real() -> list[int]:
    runs()  # skips where the published figures are not here
    done = subprocess.run(
        [sys.executable, "-m", "lightning_memtools.null_cuda", "--gpu", "RTX 3060", "-c", MEASURE],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("index", range(4))
def test_a_published_run_is_estimated_to_the_byte(index, real):
    assert predicted_reserved(runs()[index]) == real[index]
