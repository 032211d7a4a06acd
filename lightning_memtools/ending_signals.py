"""Ends long work at a signal, at points where an error can be raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ending: type[BaseException] | None = None  # what a signal within `ended_by_signals` asks to raise


@contextmanager
def ended_by_signals(at_sigterm: type[BaseException]) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the code within at its next `raise_if_ended`, or at its end.

    The Trainer only notes SIGTERM, and looks after the next batch: long work in a hook would not be ended by it. A
    second SIGINT is raised at once. Outside of the main thread, which Python runs handlers in, nothing changes.

    Args:
        at_sigterm: The error to raise after SIGTERM; after SIGINT, it is KeyboardInterrupt.
    """
    # A handler must not raise within torch's C++, which aborts the process or raises another error where it calls
    # Python that raises unexpectedly; and Python drops what is raised while it finalizes an object.
    noted = signal.getsignal(signal.SIGTERM)
    interrupted = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        _end_with(at_sigterm)
        noted(number, frame)  # type: ignore[operator, misc]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        _end_with(KeyboardInterrupt)
        signal.signal(number, interrupted)

    if callable(noted):
        signal.signal(signal.SIGTERM, terminate)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        raise_if_ended()
    finally:
        signal.signal(signal.SIGTERM, noted)
        signal.signal(signal.SIGINT, interrupted)
        _end_with(None)


def raise_if_ended() -> None:
    """Raise what ends the work within `ended_by_signals`, if a signal arrived."""
    if _ending is not None:
        raise _ending


def _end_with(error: type[BaseException] | None) -> None:
    global _ending  # noqa: PLW0603, signals are of the process
    _ending = error
