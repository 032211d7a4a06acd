"""`VirtualDevice(cuda_like=True)` beside PyTorch's own CUDA allocator and code.

The steps of truth.py on small samples, so that a CPU computes them in seconds. Options are those of truth.py:

    python -m lightning_memtools.null_cuda --gpu "A100 80GB" benchmarks/truth_virtual_device.py [--only TEXT]
"""

from __future__ import annotations

import sys

from truth import main

if __name__ == "__main__":
    sys.exit(main(__doc__, virtual=True))
