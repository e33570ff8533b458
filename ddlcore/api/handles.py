"""The handles of operations in flight: users poll them and wait for them, and a framework may convert their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ddlcore.errors import InvalidArgument

__all__ = ["Mapped", "Waitable", "poll", "synchronize"]


@runtime_checkable
class Waitable(Protocol):
    """An object with the methods that every handle has."""

    def poll(self) -> bool:
        """Return whether the operation has ended, so that ``wait`` would return or raise immediately."""

    def wait(self) -> Any:
        """Wait for the operation, and return its result or raise its error. It may be called again."""


class Mapped:
    """A handle whose result is ``then(r)``, where r is the result of ``handle``.

    The first call of ``wait`` computes it; later calls return the same result.
    """

    __slots__ = ("_handle", "_result", "_then")

    def __init__(self, handle: Waitable, then: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._then: Callable[[Any], Any] | None = then
        self._result: Any = None

    def poll(self) -> bool:
        """Return whether the operation has ended, so that ``wait`` would return or raise immediately."""
        return self._handle.poll()

    def wait(self) -> Any:
        """Return the result ``then(r)``, or raise the error of the operation."""
        result = self._handle.wait()
        if self._then is not None:
            self._result = self._then(result)
            self._then = None
        return self._result


def poll(handle: Waitable) -> bool:
    """Return whether the operation of ``handle`` has ended, so that ``synchronize`` would not have to wait."""
    return _checked(handle).poll()


def synchronize(handle: Waitable) -> Any:
    """Wait for an asynchronous operation and return its result; a second call returns the same result.

    Any thread may call it. Raises the error of the operation (PeerLost, MismatchError, Closed; see ddlcore.errors), and
    ValueError if ``handle`` is not a handle.
    """
    return _checked(handle).wait()


def _checked(handle: Waitable) -> Waitable:
    if not isinstance(handle, Waitable):
        raise InvalidArgument(f"{handle!r} is no handle; pass what an ..._async function returned")
    return handle
