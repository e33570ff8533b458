"""Tells a call of a signal handler or a finalizer, in the middle of ddl's own work on the same thread, from any other.

Such a call must neither wait for what its own thread holds nor see a state that is half changed.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Callable
from typing import ClassVar

from ddlcore.errors import ReentrantCall

__all__ = ["Lock", "reentrant"]


class Lock(RLock):  # type: ignore[misc]  # CPython's own; it may be derived from, whatever its stub says
    """A lock that knows whether the calling thread holds it already. Every public way in asks ``held`` first.

    It is reentrant so that a way in which only reads, or which nobody thought of, finds a moment's half-changed state
    and never a deadlock. Enter it by ``with lock``, never by a function in Python around that: a signal handler that
    raises between the two would leave it locked.
    """

    __slots__ = ()

    held: ClassVar[Callable[[Lock], bool]] = RLock._is_owned  # type: ignore[attr-defined]  # what threading.Condition uses

    def refuse(self, what: str) -> None:
        """Raises ReentrantCall where the calling thread holds this lock."""
        if self.held():
            raise reentrant(what)


def reentrant(what: str) -> ReentrantCall:
    """The error of a call that cannot be made here."""
    return ReentrantCall(
        f"{what} was called by a signal handler or a finalizer (__del__, a weakref's callback) while its thread was "
        "inside ddl; note it in a variable there, and make the call when ddl's own call has returned"
    )
