"""A signal by which a user asks a process something, where the process has no use of its own for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["listen"]


def listen(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """From now on signal ``name`` ("" for none) makes ``call``, between any two instructions of the main thread.

    So it must take no lock. Nothing happens where somebody handles that signal, or this is not the main thread.
    Returns what undoes it. Raises ValueError for a name that is no signal's.
    """
    if not name:
        return lambda: None
    number = getattr(signal, name.upper(), None)
    if not isinstance(number, signal.Signals):
        raise ValueError(f"flight_signal={name!r} is no signal's name; such as SIGUSR1 is")
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is not signal.SIG_DFL:
        return lambda: None

    def handle(number: int, frame: FrameType | None) -> None:
        call()

    signal.signal(number, handle)

    def undo() -> None:
        with contextlib.suppress(ValueError):  # not the main thread: the process is about to end
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)

    return undo
