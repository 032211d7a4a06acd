"""`python -m lightning_memtools` is the command `memtools`."""

from __future__ import annotations

import sys

from lightning_memtools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
