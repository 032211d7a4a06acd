"""Prints on the console, which may be closed, cut off by `| head`, or limited to ASCII. A run never ends from that."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console


def print_on_console(*parts: Any, soft_wrap: bool = False, stream: TextIO | None = None) -> None:
    """Print strings and Rich tables on a stream (by default stdout). Markup in strings is not interpreted.

    With `soft_wrap`, long lines are not wrapped. Errors while printing, such as a closed stream, are ignored.
    """
    stream = sys.stdout if stream is None else stream
    try:
        console = Console(force_jupyter=False)  # a notebook would show an empty page beside the text
        # Printed by the stream itself: Console ends the program with SystemExit where a pipe is broken.
        with console.capture() as captured:
            for part in parts:
                console.print(part, markup=False, highlight=False, soft_wrap=soft_wrap)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(captured.get().encode(encoding, errors="replace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        drop_what_is_left()
    except (AttributeError, OSError, ValueError):  # no stdout at all, no room for a file, a closed stream
        return


@contextmanager
def progress_printed(
    text: Callable[[], str], *, after_s: float = 2.0, every_s: float = 10.0, stream: TextIO | None = None
) -> Iterator[None]:
    """Context manager that prints a text and the elapsed seconds at intervals while its body runs.

    The output still goes to the original `stream` (by default stdout) if the body redirects stdout.

    Args:
        text: A function that returns the text to print; it is called from another thread.
        after_s: The seconds until the first line is printed.
        every_s: The seconds between two lines.
        stream: The stream to print to.
    """
    begin, is_over, stream = time.monotonic(), threading.Event(), stream or sys.stdout

    def tell() -> None:
        pause = after_s
        while not is_over.wait(pause):
            print_on_console(f"{text()} ({time.monotonic() - begin:.0f} s so far)", soft_wrap=True, stream=stream)
            pause = every_s

    thread = threading.Thread(target=tell, daemon=True, name="memtools-progress")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def drop_what_is_left() -> None:
    """Discard stdout's remaining buffer after a broken pipe, so that Python does not exit with an error code."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return
