"""Starts a Python program on devices that compute nothing, in the environment that it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_memtools.memory.sizes import find_gpu, known_gpus, parse_capacity
from lightning_memtools.null_cuda.stubs import installed_torch, stub_libraries

if TYPE_CHECKING:
    import torch

# Without a GPU and a capacity nothing is to run out, so that what is needed can be told.
DEFAULT_GPU = "A100 80GB"
"""The GPU that devices are like where none is named."""
_NO_LIMIT_BYTES = 2**40
_DRY_RUN = " (dry run)"
_NAME = "NULL_CUDA_NAME"


def is_on_null_device() -> bool:
    """Return True if this process was started on the simulated devices of a dry run. Does not import torch."""
    return _NAME in os.environ


def computes_nothing(device: torch.device) -> bool:
    """Return True if a device is the simulated GPU of a dry run, on which all values are zero."""
    import torch  # noqa: PLC0415, the program that starts a dry run needs no torch itself

    return device.type == "cuda" and torch.cuda.get_device_name(device).endswith(_DRY_RUN)


def null_devices(
    gpu: str | None = None, capacity: str | int | None = None, *, count: int = 1, context_bytes: int = 0
) -> dict[str, str]:
    """Return environment variables that describe simulated devices: a known GPU, with its own or another capacity.

    Args:
        gpu: The name of a GPU, such as "RTX 4090"; by default the GPU that ``capacity`` names, or an A100.
        capacity: The memory of each device: a size such as "24GiB", a number of bytes, or the name of a GPU. By default
            that of ``gpu``, or if neither is given, 1 TiB, so that memory does not run out.
        count: The number of devices.
        context_bytes: The bytes of each device that the CUDA context takes.

    Raises:
        ValueError: The GPU is unknown, the capacity is not a size, or the count is not between 1 and 120.
    """
    if not 1 <= count <= 120:  # noqa: PLR2004, MAX_DEVICES of sources/null_device.h
        raise ValueError(f"devices={count}: PyTorch knows between 1 and 120 devices of a machine.")
    named = find_gpu(capacity) if gpu is None and isinstance(capacity, str) else None
    model = named or find_gpu(gpu or DEFAULT_GPU)
    if model is None:
        known = ", ".join(one.name for one in known_gpus())
        raise ValueError(f"gpu={gpu!r} is no known GPU: give capacity=, or one of {known}.")
    total, name = model.usable_bytes, model.name
    if gpu is None and capacity is None:
        total, name = _NO_LIMIT_BYTES, "no limit"
    elif capacity is not None and named is None:
        total, name = parse_capacity(capacity), model.name.rpartition(" ")[0]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),
        "NULL_CUDA_DEVICES": str(count),
        _NAME: name + _DRY_RUN,
        "NULL_CUDA_TOTAL": str(total),
        "NULL_CUDA_CONTEXT": str(context_bytes),
        "NULL_CUDA_CAPABILITY": model.compute_capability.replace(".", ""),
        "NULL_CUDA_MULTIPROCESSORS": str(model.multiprocessors),
    }


def environment(devices: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a process in which PyTorch's CUDA build sees the simulated devices.

    Stubs of NVIDIA's libraries are preloaded in place of the originals; the installed torch is not changed.

    Args:
        devices: The variables that describe the devices, from `null_devices`.

    Raises:
        DryRunError: The stubs cannot be built on this machine.
    """
    libraries = stub_libraries(installed_torch())
    stubs = ":".join(map(str, libraries))
    others = os.environ.get("LD_PRELOAD")
    return {
        **os.environ,
        "LD_PRELOAD": f"{stubs}:{others}" if others else stubs,
        # Where Triton looks for libcuda.so.1 to link its launcher with.
        "TRITON_LIBCUDA_PATH": str(libraries[0].parent),
        # The interface of cuDNN 7 is small enough to stand in for; what torch allocates is the same.
        "TORCH_CUDNN_V8_API_DISABLED": "1",
        # On Hopper and Blackwell torch prefers cuDNN's attention, which has no stand-in. The next kernel is flash.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        **devices,
    }
