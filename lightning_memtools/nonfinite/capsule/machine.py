"""What a step ran on: versions, devices, and the switches that choose between kernels."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_PACKAGES = ("lightning", "numpy", "lightning_memtools")
# Name to (how it is read, how it is set). All of them change which kernel computes, and so the last bits.
_SWITCHES: dict[str, tuple[Any, Any]] = {
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled, lambda on: torch.use_deterministic_algorithms(on, warn_only=True)
    ),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on)
    ),
    "cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic, lambda on: setattr(torch.backends.cudnn, "deterministic", on)
    ),
    "cudnn.allow_tf32": (
        lambda: torch.backends.cudnn.allow_tf32, lambda on: setattr(torch.backends.cudnn, "allow_tf32", on)
    ),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "memory-efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
}  # fmt: skip


def machine_now(device: str) -> dict[str, Any]:
    """What this process runs on: name to plain value. Where two machines differ in it, last bits may differ."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": f"{sys.platform} {platform.machine()}"}
    # What torch says of itself names its build too (2.13.0+cu130), which the installed package's version may not.
    found |= {"torch": str(torch.__version__)} | {package: _version(package) for package in _PACKAGES}
    found["CPU capability"] = torch.backends.cpu.get_cpu_capability()
    found["device"] = device
    if device.startswith("cuda") and torch.cuda.is_available():
        found |= {
            "GPU": torch.cuda.get_device_name(device),
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def switches_now() -> dict[str, Any]:
    """How the switches stand."""
    return {name: read() for name, (read, _) in _SWITCHES.items()}


@contextmanager
def switched(switches: Mapping[str, Any]) -> Iterator[list[str]]:
    """Set the switches, and put them back; gives the names of those that could not be set."""
    before = switches_now()
    failed: list[str] = []
    try:
        for name, value in switches.items():
            try:
                if name in before and before[name] != value:
                    _SWITCHES[name][1](value)
            except RuntimeError:
                failed.append(name)
        yield failed
    finally:
        for name, value in before.items():
            if _SWITCHES[name][0]() != value:
                _SWITCHES[name][1](value)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two machines, as "torch 2.11.0, was 2.13.0"."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name} {now.get(name, 'missing')}, was {then.get(name, 'missing')}" for name in names]
