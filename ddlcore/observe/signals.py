"""Call a function when this process receives a certain signal, unless the process has its own handler for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType


def listen(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Install a handler that runs ``call`` whenever the signal ``name`` arrives.

    Return a function that removes the handler. The handler runs in the main thread between any two instructions, so
    ``call`` must not take a lock. No handler is installed if ``name`` is empty, if the signal already has a handler, or
    if this is not the main thread. Raises ValueError if ``name`` is not the name of a signal.
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
