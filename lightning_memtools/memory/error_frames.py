"""The local variables in the frames of an error: reads them, and lets go of them."""

from __future__ import annotations

import inspect
import traceback
from types import FrameType
from typing import Any

from lightning_memtools.memory.oom_errors import error_chain


def forget_frames(error: BaseException) -> None:
    """Let go of the local variables in the frames of an error, and of those of errors that it was raised from.

    Frames that still run keep theirs. The traceback still tells where the error came from.
    """
    for one in error_chain(error):
        traceback.clear_frames(one.__traceback__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            variables_of(frame)  # empties the snapshot that whoever looked for the module in a frame has left there


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame."""
    snapshot = frame.f_locals
    variables = dict(snapshot)
    # Until Python 3.13 the frame keeps the snapshot, and with it what the function deletes later.
    if type(snapshot) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        snapshot.clear()
    return variables
