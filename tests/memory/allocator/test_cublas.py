from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import CachingAllocator, CublasWorkspaces, cublas_workspace_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("compute_capability", "n_bytes"),
    [
        (None, 8_519_680),
        ((7, 5), 8_519_680),
        ((8, 9), 8_519_680),
        ((9, 0), 32 * MIB),
        ((10, 0), 32 * MIB),
        ((12, 0), 32 * MIB),
    ],
)
def test_the_default_depends_on_the_gpu(compute_capability: tuple[int, int] | None, n_bytes: int) -> None:
    assert cublas_workspace_bytes(compute_capability=compute_capability) == n_bytes


@pytest.mark.parametrize(
    ("config", "n_bytes"), [(":4096:2:16:8", 8_519_680), (":4096:8", 32 * MIB), (":16:8", 131_072), (":0:0", 0)]
)
def test_a_cublas_config_gives_sizes_in_kib_and_counts(config: str, n_bytes: int) -> None:
    assert cublas_workspace_bytes(compute_capability=(9, 0), config=config) == n_bytes


def test_the_first_product_of_a_handle_on_a_stream_allocates_once() -> None:
    allocator = CachingAllocator()
    workspaces = CublasWorkspaces(allocator, cublas_workspace_bytes())
    assert allocator.allocated == 0
    workspaces.on_matmul()
    workspaces.on_matmul()
    # 8,519,680 is a multiple of 512 and below 10 MiB: part of a 20 MiB segment.
    assert (allocator.allocated, allocator.reserved) == (8_519_680, 20 * MIB)
    workspaces.on_matmul(handle=1)
    assert (allocator.allocated, allocator.reserved) == (2 * 8_519_680, 20 * MIB)
    workspaces.on_matmul(stream=1)
    assert (allocator.allocated, allocator.reserved) == (3 * 8_519_680, 40 * MIB)
    workspaces.clear()
    assert allocator.allocated == 0
    workspaces.on_matmul()
    assert allocator.allocated == 8_519_680
