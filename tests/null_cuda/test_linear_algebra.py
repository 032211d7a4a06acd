"""Linear algebra runs in a dry run: cuSOLVER's stubs ask for workspaces of a plausible size."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.cuda_memory

FUNCTIONS = {
    "svd": torch.linalg.svd,
    "svd gesvd": lambda a: torch.linalg.svd(a, driver="gesvd"),
    "svd gesvda": lambda a: torch.linalg.svd(a, full_matrices=False, driver="gesvda"),
    "qr": torch.linalg.qr,
    "eigh": torch.linalg.eigh,
    "eigvals": torch.linalg.eigvals,
    "lstsq": lambda a: torch.linalg.lstsq(a, a),
    "solve": lambda a: torch.linalg.solve(a, a),
    "inv": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "cholesky_inverse": torch.cholesky_inverse,
    "cholesky_solve": lambda a: torch.cholesky_solve(a, a),
    "lu": torch.linalg.lu,
    "ldl": lambda a: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a), a),
    "ormqr": lambda a: torch.ormqr(*torch.geqrf(a), a),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_ends_and_takes_a_few_times_its_matrices(name):
    for shape, dtype in product([(300, 300), (16, 24, 24), (3, 300, 300)], [torch.float32, torch.complex128]):
        matrices = torch.zeros(shape, dtype=dtype, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = FUNCTIONS[name](matrices)
        assert all(one.is_cuda for one in ([result] if isinstance(result, Tensor) else result))
        workspaces = 64 << 20  # those of cuBLAS and, for pointers of batches, small ones
        assert torch.cuda.max_memory_allocated() - before <= 16 * matrices.nbytes + workspaces
