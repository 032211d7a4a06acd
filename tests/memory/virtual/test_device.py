"""Entering, leaving, options, tracking, and what the device says of itself."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.reading import allocated, peak

MIB = 2**20
# torch.optim hides this module behind a name of its own.
OPTIMIZER_MODULE: Any = sys.modules["torch.optim.optimizer"]


def test_one_element_takes_512_bytes_of_a_2_mib_segment() -> None:
    with VirtualDevice() as device:
        tensor = torch.ones(1)
        stats = device.stats()
        assert (stats.allocated, stats.requested, stats.reserved, stats.active) == (512, 4, 2 * MIB, 512)
        assert stats.inactive_split == 2 * MIB - 512
        del tensor
        stats = device.stats()
        assert (stats.allocated, stats.reserved, stats.peak_allocated, stats.peak_reserved) == (
            0,
            2 * MIB,
            512,
            2 * MIB,
        )
        device.empty_cache()
        device.reset_peaks()
        stats = device.stats()
        assert (stats.reserved, stats.peak_allocated, stats.peak_reserved) == (0, 0, 0)


def test_it_is_a_memory_reader_marked_as_simulated() -> None:
    device: MemoryReader = VirtualDevice("24GiB")
    assert device.name == "virtual device (24GiB, simulated)"
    assert device.simulated
    assert device.stats().capacity == 24 * 2**30
    assert VirtualDevice().name == "virtual device (no limit, simulated)"
    assert VirtualDevice().stats().capacity is None


def test_context_and_other_processes_take_of_the_capacity():
    gpu = VirtualDevice("RTX 4090").stats()
    assert gpu.capacity > 23 * 2**30
    assert gpu.device_used == 500 * MIB
    assert VirtualDevice("RTX 4090", context="300MiB").stats().device_used == 300 * MIB
    assert VirtualDevice("1GiB").stats().device_used == 0
    with VirtualDevice("100MiB", context="30MiB", used_by_others="20MiB") as device:
        assert device.stats().device_used == 50 * MIB
        fits = torch.empty(40 * MIB, dtype=torch.uint8)
        assert device.stats().device_used == 90 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(12 * MIB, dtype=torch.uint8)
        del fits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": "RTX 4091"}, "RTX 4090"),
        ({"allocator": "expandable_segment:True"}, "expandable_segments"),
        (
            {"capacity": 24},
            "Not a capacity: 24. Did you mean '24GiB' or '24GB'.*whole number of bytes, at least 1048576",
        ),
        ({"context": 1}, "context=1: Not a size: 1"),
        ({"used_by_others": None}, "used_by_others=None: Not a size: None"),
        ({"cublas_workspace": 8.5}, "cublas_workspace=8.5: Not a size: 8.5"),
        ({"capacity": "1GiB", "used_by_others": "2GiB"}, r"Nothing is left of the capacity '1GiB' \(1.00 GiB\)"),
    ],
)
def test_errors_of_options_name_the_value_and_what_is_accepted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VirtualDevice(**options)


def test_only_one_can_be_entered_at_a_time() -> None:
    assert VirtualDevice.current() is None
    with VirtualDevice("2GiB") as outer:
        assert VirtualDevice.current() is outer
        with pytest.raises(
            RuntimeError, match=r"Cannot enter virtual device \(1GiB.*2GiB, simulated\) is entered already"
        ):
            VirtualDevice("1GiB").__enter__()
        with pytest.raises(RuntimeError, match="is entered already"):
            outer.__enter__()
        assert VirtualDevice.current() is outer
        torch.ones(1)
        assert peak(outer) == 512
    assert VirtualDevice.current() is None


def test_it_is_left_only_in_the_thread_that_entered_it() -> None:
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            device.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    with VirtualDevice() as device:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert "can only be left there" in str(errors[0])
        tensor = torch.ones(1)
        assert allocated(device) == 512
        del tensor


def watched_functions() -> list[Any]:
    owners = (
        (nn.Module, "__call__"),
        (torch.UntypedStorage, "resize_"),
        (torch.UntypedStorage, "copy_"),
        (torch.Tensor, "__new__"),
        (torch, "compile"),
        (torch, "dropout"),
        (torch._VF, "dropout"),
        (threading.Thread, "start"),
        (DataLoader, "__iter__"),
        (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
        (OPTIMIZER_MODULE, "_get_foreach_kernels_supported_devices"),
        (OPTIMIZER_MODULE, "_foreach_supported_types"),
    )
    found = [getattr(owner, name) for owner, name in owners]
    found += [name in vars(owner) for owner, name in owners]
    found += [len(torch.nn.modules.module._global_parameter_registration_hooks)]
    found += [len(torch.nn.modules.module._global_buffer_registration_hooks)]
    found += [len(OPTIMIZER_MODULE._global_optimizer_pre_hooks)]
    found += [len(OPTIMIZER_MODULE._global_optimizer_post_hooks)]
    return [*found, torch._C._len_torch_dispatch_stack()]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_undone_on_exit_and_a_second_exit_does_no_harm(fails: bool) -> None:
    before = watched_functions()
    device = VirtualDevice(cuda_like=True)
    try:
        with device:
            assert watched_functions() != before
            if fails:
                int("no number")
    except ValueError:
        pass
    assert watched_functions() == before
    device.__exit__(None, None, None)
    assert watched_functions() == before
    torch.ones(1)
    assert allocated(device) == 0


def test_tracking_brings_parameters_gradients_buffers_and_optimizer_state() -> None:
    net = nn.Sequential(nn.Linear(10, 100), nn.BatchNorm1d(100))
    optimizer = torch.optim.Adam(net.parameters())
    inputs = {"x": [torch.ones(256, 10)], "label": "a"}
    net(inputs["x"][0]).sum().backward()
    optimizer.step()
    with VirtualDevice() as device:
        new = device.track(net, [optimizer], (inputs,))
        # Weight 10 * 100 * 4; bias and the norm's two parameters 100 * 4 each; running mean and variance, and a count.
        parameters = 4096 + 3 * 512
        assert new == 4 * parameters + 4 * 512 + 3 * 512 + 256 * 10 * 4
        assert device.composition().by_category == {
            "parameter": parameters,
            "gradient": parameters,
            # Two moments, and a step count of 512 bytes for each of the four parameters.
            "optimizer": 2 * parameters + 4 * 512,
            "buffer": 3 * 512,
            "activation": 0,
            "input": 0,
            "other": 256 * 10 * 4,
        }
        assert device.track(net, optimizer, inputs) == 0
        net(inputs["x"][0])
        assert device.composition().by_category["input"] == 256 * 10 * 4


def test_pickling_keeps_the_options_and_drops_the_accounting() -> None:
    device = VirtualDevice("1GiB", allocator="max_split_size_mb:64", used_by_others="1MiB", cuda_like=True)
    with device:
        kept = torch.ones(1000)
        for other in (pickle.loads(pickle.dumps(device)), copy.deepcopy(device)):  # noqa: S301, our own bytes
            assert repr(other) == repr(device)
            assert peak(other) == 0
        assert VirtualDevice.current() is device
        del kept
    assert repr(device) == (
        "VirtualDevice(capacity='1GiB', allocator='max_split_size_mb:64', used_by_others='1MiB', cuda_like=True)"
    )


def test_nothing_of_the_program_is_kept_alive() -> None:
    with VirtualDevice() as device:
        net = nn.Sequential(nn.Linear(10, 10), nn.ReLU())
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        net(torch.ones(3, 10)).sum().backward()
        optimizer.step()
        device.composition()
        del net, optimizer
        gc.collect()
        assert allocated(device) == 0


def test_while_suspended_nothing_counts_and_freed_tensors_free_their_blocks():
    with VirtualDevice() as device:
        first, second = torch.empty(MIB), torch.empty(MIB)
        call = nn.Module.__call__
        with device.suspended():
            assert VirtualDevice.current() is None
            assert nn.Module.__call__ is not call
            third = torch.empty(8 * MIB)
            del first
            assert device.stats().allocated == 4 * MIB
        assert VirtualDevice.current() is device
        assert allocated(device) == 4 * MIB
        fourth = nn.Linear(512, 512)(torch.empty(1024, 512))
        # The second; weights and bias and the input, which the output's graph holds; the output. Not the third.
        assert allocated(device) == (4 + 1 + 2 + 2) * MIB + 2048
        assert device.composition().by_category["activation"] == 2 * MIB
        del second, third, fourth
    assert nn.Module.__call__ is not call
