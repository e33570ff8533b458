"""One thread that looks after all communicators of this process, while there are any."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["Watched", "bounded", "forget", "unwatch", "watch"]

log = logging.getLogger("ddl")
INTERVAL_S = 0.1


class Watched(Protocol):
    """What is looked at, every INTERVAL_S."""

    def look(self) -> None:
        """Returns soon, and takes no lock that a call of NCCL may hold."""


_lock = threading.Lock()
_watched: list[Watched] = []
_thread: threading.Thread | None = None
_changed = threading.Event()


def watch(one: Watched) -> None:
    """From now on. Any thread; the first begins the watchdog."""
    global _thread
    with _lock:
        _watched.append(one)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="ddl-nccl-watchdog", daemon=True)
            _thread.start()


def unwatch(one: Watched) -> None:
    """No more, although a last look may be under way. The last to leave ends the watchdog. Idempotent."""
    with _lock:
        if one in _watched:
            _watched.remove(one)
        if not _watched:
            _changed.set()


def forget() -> None:
    """In a forked process, which has no thread but its own."""
    global _lock, _thread, _changed
    _lock, _thread, _changed = threading.Lock(), None, threading.Event()
    _watched.clear()


def _run() -> None:
    global _thread
    while True:
        _changed.wait(INTERVAL_S)
        with _lock:
            _changed.clear()
            if not _watched:
                _thread = None
                return
            watched = list(_watched)
        for one in watched:
            try:
                one.look()
            except Exception:  # the others are to be looked after all the same
                log.exception("nccl: the watchdog could not look at a communicator")


def bounded(what: str, call: Callable[[], object], seconds: float) -> bool:
    """Whether ``call`` has ended within ``seconds``, on a thread of its own, which is left behind else."""

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
