"""Describes an error in one line, and reads and clears the local variables in its frames."""

from __future__ import annotations

import inspect
import traceback
from types import FrameType
from typing import Any

from lightning_memtools.memory.oom_errors import error_chain


def in_one_line(error: BaseException, *, most: int = 200) -> str:
    """Return an error's type and the first line of its message, shortened to at most `most` characters."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001, the user's class may have a text that cannot be made
        lines = []
    line = (lines or [""])[0]
    if len(line) > most:
        line = f"{line[:most].rpartition(' ')[0] or line[:most]} ..."
    return f"{type(error).__name__}: {line}"


def forget_frames(error: BaseException) -> None:
    """Clear the local variables in the traceback frames of an error and of the errors that it was raised from.

    Frames that are still running keep their variables. The traceback still shows where the error was raised.
    """
    for one in error_chain(error):
        traceback.clear_frames(one.__traceback__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            variables_of(frame)  # empties the snapshot that whoever looked for the module in a frame has left there


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame as a dict. The frame itself keeps no extra references to the values."""
    snapshot = frame.f_locals
    variables = dict(snapshot)
    # Until Python 3.13 the frame keeps the snapshot, and with it what the function deletes later.
    if type(snapshot) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        snapshot.clear()
    return variables
