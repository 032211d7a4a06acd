"""Where a dry run cannot be made, it says why and what can be done instead."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.null_cuda.launch import null_devices
from lightning_memtools.null_cuda.stubs import DryRunError, TorchBuild, stub_libraries
from tests.null_cuda.dry_run_scripts import command


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a build for CUDA")
def test_a_build_for_the_cpu_is_refused_with_the_way_to_get_the_other(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    done = command(str(script))
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"memtools: torch {torch.__version__} is a build for the CPU, and a dry run needs one"
    )
    assert f"pip install --no-deps 'torch==={torch.__version__.partition('+')[0]}'" in done.stderr
    assert "VirtualDevice and `memtools estimate` work with this build." in done.stderr


def test_a_script_that_does_not_exist_is_named():
    done = command("nowhere/train.py")
    assert (done.returncode, done.stderr) == (2, "memtools: There is no script 'nowhere/train.py'.\n")


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    build = TorchBuild(tmp_path, "2.13.0+cu130", 13, (86,))
    with pytest.raises(DryRunError, match=r"needs a C compiler and binutils .* apt-get install gcc"):
        stub_libraries(build, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("count", [0, 121])
def test_the_number_of_devices_has_bounds(count):
    with pytest.raises(ValueError, match=f"devices={count}: .* between 1 and 120"):
        null_devices("RTX 4090", count=count)


@pytest.mark.parametrize(
    ("options", "name", "total"),
    [
        ({"gpu": "RTX 3060"}, "RTX 3060 12GB (dry run)", 12622168064),
        ({"capacity": "RTX 3060"}, "RTX 3060 12GB (dry run)", 12622168064),
        ({"gpu": "RTX 3060", "capacity": "8GiB"}, "RTX 3060 (dry run)", 8 * 2**30),
        ({"capacity": 2**30}, "A100 (dry run)", 2**30),
        ({}, "no limit (dry run)", 2**40),
    ],
)
def test_devices_are_named_by_gpu_and_capacity(options, name, total):
    made = null_devices(**options)
    assert (made["NULL_CUDA_NAME"], made["NULL_CUDA_TOTAL"]) == (name, str(total))
