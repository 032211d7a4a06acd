"""The device that computes nothing, as PyTorch's own CUDA code sees it."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_memtools.memory.allocator import cublas_workspace_bytes
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from tests.null_cuda.null_processes import forks, null_python

pytestmark = pytest.mark.cuda_memory


@pytest.fixture(scope="module")
def forked() -> Iterator[Callable[[str], str]]:
    """Runs code, which must succeed, in a process of its own without options, and returns what it printed."""
    with forks() as run:
        yield run


def printed(code: str, *options: str) -> str:
    """Run code, which must succeed, in a fresh Python on null devices, and return what it printed."""
    started = null_python(*options, "-c", textwrap.dedent(code))
    done = subprocess.run(**started, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


def test_properties_are_those_of_the_gpu_that_was_asked_for():
    code = """
        import torch
        p = torch.cuda.get_device_properties(1)
        print(p.name, p.major, p.minor, p.multi_processor_count, p.total_memory, torch.cuda.device_count(), sep="|")
    """
    assert printed(code, "--gpu", "RTX 4090", "--devices", "3") == "RTX 4090 24GB (dry run)|8|9|128|25377888010|3"


@pytest.mark.parametrize(("gpu", "threads"), [("GTX 1080 Ti", 2048), ("T4", 1024), ("RTX 5090", 1536)])
def test_a_multiprocessor_has_the_threads_of_nvidias_table(gpu, threads):
    code = "import torch; print(torch.cuda.get_device_properties(0).max_threads_per_multi_processor)"
    assert printed(code, "--gpu", gpu) == str(threads)
    assert GpuShape.of(find_gpu(gpu)).threads == threads


@pytest.mark.parametrize(
    ("capability", "config"),
    [
        *(("86", config) for config in ("", ":128:8:64:16:32:32", ":4096:8", ":4096:2:16:8", ":16:8", ":0:0", "4096")),
        *((capability, "") for capability in ("75", "80", "89", "90", "100", "120")),
    ],
)
def test_cublas_gets_the_workspace_that_the_simulation_gives_it(capability, config, forked):
    """As torch's own test_cublas_workspace_explicit_allocation does; what is no setting counts as none."""
    code = f"""
        import ctypes, os, warnings
        import torch
        warnings.simplefilter("ignore")
        os.environ.update({{"CUBLAS_WORKSPACE_CONFIG": {config!r}, "NULL_CUDA_CAPABILITY": {capability!r}}})
        ctypes.CDLL(None).null_begin()
        x = torch.empty(7, 7, device="cuda")
        out = torch.empty(7, 7, device="cuda")
        n_bytes = -torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        torch.mm(x, x, out=out)
        n_bytes += torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        print(*torch.cuda.get_device_capability(), n_bytes)
    """
    *reported, n_bytes = map(int, forked(code).split())
    assert "".join(map(str, reported)) == capability
    assert n_bytes == cublas_workspace_bytes(compute_capability=tuple(reported), config=config)


def test_cuda_graphs_are_refused_by_name(forked):
    code = """
        import torch
        graph = torch.cuda.CUDAGraph()
        x = torch.empty(3, device="cuda")
        try:
            with torch.cuda.graph(graph):
                x + 1
        except RuntimeError as error:
            print(str(error).splitlines()[0])
    """
    expected = "CUDA error: CUDA graphs cannot be captured on a device that computes nothing (dry run)"
    assert forked(code) == expected


def test_nvml_answers_for_the_pretended_gpu():
    pytest.importorskip("pynvml")
    code = """
        import pynvml, torch
        x = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        print(pynvml.nvmlDeviceGetName(handle), info.total, info.used // 2**20)
    """
    assert printed(code, "--gpu", "RTX 3060") == "RTX 3060 12GB (dry run)|12622168064|100".replace("|", " ")


NVIDIAS = ("libcudart", "libcublas", "libcudnn", "libcufft", "libcuda.", "libnv", "libnccl", "libcusparse",
           "libcusolver", "libcurand", "libcupti")  # fmt: skip


def test_of_nvidias_libraries_only_those_are_opened_that_other_packages_bring_with_them():
    """In this very process, where many tests have used the device, and some have imported torchvision.

    torchvision's wheel holds a copy of CUDA's runtime under a name of its own, for its own kernels. Everything that
    torch and this library open is a stub.
    """
    torch.ones(3, device="cuda").sum()
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    opened = {Path(path) for path in paths if Path(path).name.startswith(NVIDIAS)}
    others = {path for path in opened if not path.parent.name.startswith("null-cuda-")}
    assert len(opened - others) > 10
    assert {path.parent.name for path in others} <= {"torchvision.libs"}


def test_a_program_that_used_every_part_ends_cleanly():
    code = """
        import torch
        from torch import nn
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(10)).cuda()
        data = torch.utils.data.DataLoader(torch.randn(16, 3, 8, 8), batch_size=4, num_workers=1, pin_memory=True)
        optimizer = None
        for x in data:
            loss = model(x.cuda(non_blocking=True)).sum()
            optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)
            loss.backward()
            optimizer.step()
        print("done")
    """
    assert printed(code) == "done"
