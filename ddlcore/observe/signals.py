"""React to a signal by which a user asks a process for something, if the process does not use that signal itself."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType


def listen(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` whenever signal ``name`` arrives ("" for none), between any two instructions of the main thread.

    Therefore ``call`` must take no lock. Does nothing if the signal has a handler already, or if this is not the main
    thread. Returns a function that restores the default. Raises ValueError if ``name`` is no signal.
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
        with contextlib.suppress(ValueError):  # not the main thread: the process is about to end anyway
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)

    return undo
