"""Prints one verdict at the end of a script, even after several fits."""

from __future__ import annotations

import atexit
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence

from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.phrases import counted

# The fits of this process: limit, seconds, lines.
_FITS: list[tuple[str, float, Sequence[str]]] = []


def tell_at_exit(limit: str, seconds: float, lines: Sequence[str]) -> None:
    """Print the `lines` of a fit's verdict when the script ends, or at once in a notebook or a child process.

    After several fits, print the verdict on the longest (by `seconds`), and the number of fits with each speed `limit`.
    """
    if not _FITS:
        atexit.register(_print)
    _FITS.append((limit, seconds, lines))
    # A child process of multiprocessing ends without atexit, and a notebook stays open.
    if multiprocessing.parent_process() is not None or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        _print()


def _print() -> None:
    if not _FITS:
        return
    _, _, lines = max(_FITS, key=lambda fit: fit[1])
    title = "memtools verdict"
    if len(_FITS) > 1:
        limits = ", ".join(f"{n} {each}" for each, n in Counter(each for each, _, _ in _FITS).most_common())
        title += f" on the longest of {counted(len(_FITS), 'fit', 'fits')} ({limits})"
    _FITS.clear()
    print_on_console(f"\n{title}", *(f"  {line}" for line in lines), soft_wrap=True)
