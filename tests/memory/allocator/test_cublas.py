from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import cublas_workspace_bytes

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
    ("config", "n_bytes"),
    [(":4096:2:16:8", 8_519_680), (":4096:8", 32 * MIB), (":16:8", 131_072), (":0:0", 0), ("4096", 32 * MIB)],
)
def test_a_cublas_config_gives_sizes_in_kib_and_counts_and_a_bad_one_torchs_default(config: str, n_bytes: int) -> None:
    assert cublas_workspace_bytes(compute_capability=(9, 0), config=config) == n_bytes
