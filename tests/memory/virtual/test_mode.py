"""Every way in which a storage comes to the device is seen, once, and its end as well."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memtools._torch import KEEPS_CUBLAS_WORKSPACES
from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.reading import allocated, peak

KIB = 1024


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with VirtualDevice() as device:
        yield device


def saved(tensor: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"x": tensor}, file)
    file.seek(0)
    return file


host_before = torch.ones(1000)
pickled_before = pickle.dumps(host_before)
saved_before = saved(host_before)


def follow(tensor):
    return torch.empty(0).set_(tensor)


def resized_storage() -> torch.Tensor:
    tensor = torch.empty(0)
    tensor.untyped_storage().resize_(4000)
    return tensor


# Each makes exactly 1000 floats, one storage of 4096 bytes on the device.
SOURCES: dict[str, Callable[[], Any]] = {
    "ones": lambda: torch.ones(1000),
    "tensor": lambda: torch.tensor([1.0] * 1000),
    "legacy constructor": lambda: torch.Tensor([1.0] * 1000),
    "legacy empty": lambda: torch.FloatTensor(1000),
    "from_numpy": lambda: torch.from_numpy(np.ones(1000, dtype=np.float32)),
    "as_tensor of an array": lambda: torch.as_tensor(np.ones(1000, dtype=np.float32)),
    "as_tensor of a list": lambda: torch.as_tensor([1.0] * 1000),
    "asarray": lambda: torch.asarray(np.ones(1000, dtype=np.float32)),
    "load": lambda: torch.load(saved_before),
    "unpickle": lambda: pickle.loads(pickled_before),  # noqa: S301, our own bytes
    "deepcopy": lambda: copy.deepcopy(host_before),
    "clone": host_before.clone,
    "resize_": lambda: torch.empty(0).resize_(1000),
    "out": lambda: torch.add(host_before, 1, out=torch.empty(0)),
    "set_ of a new storage": lambda: torch.empty(0).set_(torch.UntypedStorage(4000)),
    "storage.resize_": resized_storage,
    "foreach": lambda: torch._foreach_mul([host_before], 2),
    "split": lambda: torch.split_copy(host_before, 1000),
}


@pytest.mark.parametrize("source", SOURCES)
def test_storage_is_counted_once_and_freed_with_its_last_view(device: VirtualDevice, source: str) -> None:
    saved_before.seek(0)
    made = SOURCES[source]()
    tensor = made[0] if isinstance(made, (list, tuple)) else made["x"] if isinstance(made, dict) else made
    assert allocated(device) == 4 * KIB
    views = [tensor.view(-1), tensor[:0], tensor.detach(), follow(tensor), nn.Parameter(tensor)]
    assert allocated(device) == 4 * KIB
    del made, tensor
    assert allocated(device) == 4 * KIB
    del views
    assert allocated(device) == 0


def test_views_and_writes_of_host_memory_are_not_counted(device: VirtualDevice) -> None:
    host = host_before
    made = [host.view(10, 100), host.unsqueeze(0), host.reshape(100, 10), host.contiguous(), host.to(torch.float32)]
    made += [host.add_(0), host.expand(2, 1000), torch.ops.aten._unsafe_view(host, (100, 10)), *host.chunk(2)]
    made += [host.squeeze_(), follow(host), host.detach(), host[2:5], torch.mul(host, 1, out=host)]
    assert allocated(device) == 0
    with torch.inference_mode():
        made += [host.reshape(100, 10), host.contiguous(), host.to(torch.float32), host.flatten()]
    assert allocated(device) == 0


def test_resize_has_old_and_new_block_for_a_moment(device: VirtualDevice) -> None:
    tensor = torch.ones(1000)
    device.reset_peaks()
    tensor.resize_(2000)
    assert allocated(device) == 8192
    assert peak(device) == 4096 + 8192
    tensor.untyped_storage().resize_(512)
    assert allocated(device) == 512
    tensor.untyped_storage().resize_(0)
    assert allocated(device) == 0
    tensor.untyped_storage().resize_(4000)
    assert allocated(device) == 4096


def test_threads_started_inside_are_counted_and_others_are_not(device: VirtualDevice) -> None:
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(1000)))
    thread.start()
    thread.join()
    assert allocated(device) == 4096
    with ThreadPoolExecutor(2) as pool:
        made += pool.map(lambda _: torch.ones(1000), range(8))
    assert allocated(device) == 9 * 4096
    made.clear()
    assert allocated(device) == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # torch says it once per process
def test_sparse_tensors_are_counted_by_their_parts(device: VirtualDevice) -> None:
    indices, values = torch.arange(1000).view(1, -1), torch.ones(1000)
    before = allocated(device)
    assert before == 8192 + 4096
    sparse = torch.sparse_coo_tensor(indices, values, (2000,), check_invariants=False)
    assert allocated(device) == before
    doubled = sparse * 2
    # Indices are copied, values are new.
    assert allocated(device) == before + 8192 + 4096
    rows = torch.eye(100).to_sparse_csr()
    # 101 row starts of 8 bytes; the columns are half of nonzero()'s result of 2 x 100 indices; 100 values.
    assert allocated(device) == before + 8192 + 4096 + 1024 + 2048 + 512
    del sparse, doubled, rows
    assert allocated(device) == before


def test_matrix_products_take_a_workspace_in_forward_and_in_backward() -> None:
    with VirtualDevice(cublas_workspace="8519680B") as device:
        weight, inputs = nn.Parameter(torch.ones(100, 100)), torch.ones(100, 100)
        before = allocated(device)
        (inputs + inputs).sum()
        assert allocated(device) == before
        out = (inputs @ weight).sum()
        inputs @ inputs
        kept = 8519680 * KEEPS_CUBLAS_WORKSPACES
        assert allocated(device) == before + kept + 512
        # 100 * 100 * 4 bytes round to 40448. The result is there while the product is computed.
        assert peak(device) == before + 40448 + 8519680 + 512
        out.backward()
        assert allocated(device) == before + 2 * kept + 512 + 40448
        assert device.composition().total == allocated(device)
        assert sum(device.composition_at_peak().values()) == peak(device)
