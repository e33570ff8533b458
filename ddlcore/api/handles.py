"""The handles of operations in flight. Users poll a handle or wait for it, and a framework may convert its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ddlcore.errors import InvalidArgument

__all__ = ["Mapped", "Waitable", "poll", "synchronize"]


@runtime_checkable
class Waitable(Protocol):
    """An object with the two methods that every handle has: ``poll`` and ``wait``."""

    def poll(self) -> bool:
        """Return whether the operation has ended, so that ``wait`` would return a result or raise an error at once."""

    def wait(self) -> Any:
        """Wait for the operation. Return its result or raise its error. A second call does the same again."""


class Mapped:
    """A handle that converts the result of another handle by a function.

    The result is ``then(r)``, where r is the result of ``handle``. ``then`` is called only once, in the first call of
    ``wait``. Later calls of ``wait`` return the same result.
    """

    __slots__ = ("_handle", "_result", "_then")

    def __init__(self, handle: Waitable, then: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._then: Callable[[Any], Any] | None = then
        self._result: Any = None

    def poll(self) -> bool:
        """Return whether the operation has ended, so that ``wait`` would return a result or raise an error at once."""
        return self._handle.poll()

    def wait(self) -> Any:
        """Wait for the operation. Return the result ``then(r)``, or raise the error of the operation."""
        result = self._handle.wait()
        if self._then is not None:
            self._result = self._then(result)
            self._then = None
        return self._result


def poll(handle: Waitable) -> bool:
    """Return whether the operation of ``handle`` has ended, so that ``synchronize`` would not have to wait."""
    return _checked(handle).poll()


def synchronize(handle: Waitable) -> Any:
    """Wait for the asynchronous operation of ``handle``, and return its result. A second call returns the same result.

    Any thread may call this. Raises the error of the operation, such as PeerLost, MismatchError or Closed (see
    ddlcore.errors). Raises ValueError if ``handle`` is not a handle.
    """
    return _checked(handle).wait()


def _checked(handle: Waitable) -> Waitable:
    if not isinstance(handle, Waitable):
        raise InvalidArgument(f"{handle!r} is no handle; pass what an ..._async function returned")
    return handle
