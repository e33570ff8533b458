"""Call a function when the user sends this process a certain signal, unless the process uses that signal itself."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType


def listen(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Make ``call`` run whenever the signal called ``name`` arrives; return a function that undoes this.

    ``call`` runs between any two instructions of the main thread, so it must take no lock. This does nothing if
    ``name`` is empty, if the signal has a handler already, or if this is not the main thread. Raises ValueError if
    ``name`` is no signal.
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
