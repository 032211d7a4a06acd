"""The GPU's load, read by the real nvidia-ml-py from a small library in NVML's place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pynvml")

ROOT = Path(__file__).parents[2]
# The n-th answer: 10, 20, ... 90 and 10 again, in percent; 100 W more than that; 40 degrees. INIT and POWER are errors
# of NVML, or 0.
SOURCE = """
int n;
int nvmlInit_v2(void) { return INIT; }
int nvmlInitWithFlags(unsigned flags) { return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "an error of the stub"; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)1; return index ? 6 : 0; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    rates[0] = 10 * (n++ % 9 + 1);
    rates[1] = 0;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *mw) { *mw = 100000 + 10000 * ((n + 8) % 9 + 1); return POWER; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) { *degrees = 40; return 0; }
"""
READS = """
import ctypes, json, sys, threading, time
from lightning_memtools.memory.gpu_load import GpuLoad
load = GpuLoad.begin(int(sys.argv[1]), every_s=0.002)
answered = ctypes.c_int.in_dll(ctypes.CDLL("libnvidia-ml.so.1"), "n")
deadline = time.monotonic() + 60
while answered.value < 30 and not load.problem and time.monotonic() < deadline:
    time.sleep(0.01)
load.stop()
load.stop()
first, second = load.scalars(), load.scalars()
print(json.dumps([first, second, load.problem, [one.name for one in threading.enumerate()]]))
"""


def read(tmp_path, index=0, *, init=0, power=0):
    compiler = shutil.which("cc") or pytest.skip("no C compiler here")
    source = tmp_path / "nvml.c"
    source.write_text(SOURCE)
    library = tmp_path / "libnvidia-ml.so.1"
    options = ["-shared", "-fPIC", f"-DINIT={init}", f"-DPOWER={power}"]
    subprocess.run([compiler, *options, "-o", str(library), str(source)], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READS, str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def test_the_mean_and_the_maximum_since_the_last_point_are_given(tmp_path):
    first, second, problem, threads = read(tmp_path)
    assert (second, problem) == ({}, "")
    assert first["device/utilization_pct_max"] == 90
    assert 30 < first["device/utilization_pct"] < 70
    assert first["device/power_w_max"] == 190
    assert first["device/power_w"] == pytest.approx(100 + first["device/utilization_pct"])
    assert (first["device/temperature_c"], first["device/temperature_c_max"]) == (40, 40)
    assert threads == ["MainThread"]


@pytest.mark.parametrize(("index", "init"), [(0, 18), (1, 0)])
def test_a_driver_that_does_not_answer_is_named(index, init, tmp_path):
    first, second, problem, threads = read(tmp_path, index, init=init)
    assert first == second == {}
    assert "NVML" in problem
    assert threads == ["MainThread"]


def test_a_figure_that_the_gpu_does_not_tell_is_left_out(tmp_path):
    first, _, problem, _ = read(tmp_path, power=3)
    assert problem == ""
    assert sorted(first) == [
        *("device/temperature_c", "device/temperature_c_max", "device/utilization_pct", "device/utilization_pct_max")
    ]
