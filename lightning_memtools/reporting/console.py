"""Prints on the console, which may be closed, cut off by `| head`, or limited to ASCII. A run never ends from that."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


def print_on_console(*parts: Any, style: str | None = None, soft_wrap: bool = False) -> None:
    """Print texts and tables, each on lines of its own, without markup; what cannot be printed is left out.

    Write files before: this is for the eye, and may show nothing.
    """
    try:
        console = Console()
        # Printed by the stream itself: Console ends the program with SystemExit where a pipe is broken.
        with console.capture() as captured:
            for part in parts:
                console.print(part, style=style, markup=False, highlight=False, soft_wrap=soft_wrap)
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(captured.get().encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_what_is_left()
    except (AttributeError, OSError, ValueError):  # no stdout at all, no room for a file, a closed stream
        return


def _drop_what_is_left() -> None:
    """Let what stays in the buffer of a broken pipe go nowhere: Python would end with an error code for it."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return
