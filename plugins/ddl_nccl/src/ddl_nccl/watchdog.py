"""Watches all communicators of this process in one thread. The thread runs while there is at least one communicator."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("ddl")
INTERVAL_S = 0.1


class WatchdogTarget(Protocol):
    """An object that the watchdog thread checks every INTERVAL_S seconds."""

    def look(self) -> None:
        """Check the object.

        This method must return soon, and must not take a lock that is held during a call of NCCL.
        """


_lock = threading.Lock()
_watched: list[WatchdogTarget] = []
_thread: threading.Thread | None = None
_changed = threading.Event()


def watch(one: WatchdogTarget) -> None:
    """Watch the object ``one`` from now on. Any thread may call this function.

    The first call starts the watchdog thread.
    """
    global _thread
    with _lock:
        _watched.append(one)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="ddl-nccl-watchdog", daemon=True)
            _thread.start()


def unwatch(one: WatchdogTarget) -> None:
    """Stop watching the object ``one``. If a check of it is running, this function does not wait for its end.

    The watchdog thread ends when no object is left. Another call for the same object has no effect.
    """
    with _lock:
        if one in _watched:
            _watched.remove(one)
        if not _watched:
            _changed.set()


def forget() -> None:
    """Reset this module in a forked process, in which the watchdog thread does not exist."""
    global _lock, _thread, _changed
    _lock, _thread, _changed = threading.Lock(), None, threading.Event()
    _watched.clear()


def _run() -> None:
    global _thread
    while True:
        _changed.wait(INTERVAL_S)
        # The decision to end the thread and the addition of an object use the same lock: otherwise watch() could find a
        # thread that has already decided to end, and its object would never be checked. look() runs outside of the
        # lock, because it may abort a communicator, and watch() and unwatch() must not wait for that.
        with _lock:
            _changed.clear()
            if not _watched:
                _thread = None
                return
            watched = list(_watched)
        for one in watched:
            try:
                one.look()
            except Exception:  # the other objects must still be checked
                log.exception("nccl: the watchdog could not look at a communicator")


def bounded(what: str, call: Callable[[], object], seconds: float) -> bool:
    """Run ``call`` on a new thread, and return whether it ended within ``seconds``.

    A thread that takes longer is left behind: NCCL's abort and destroy may wait for other ranks without end. ``what``
    names the call in log messages.
    """

    def run() -> None:
        try:
            call()
        except Exception as error:
            log.debug("nccl: %s: %s", what, error)

    thread = threading.Thread(target=run, name=f"ddl-nccl-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


os.register_at_fork(after_in_child=forget)
