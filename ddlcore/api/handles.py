"""What users hold of an operation under way: they poll and wait; a framework may show its result in another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ddlcore.errors import InvalidArgument

__all__ = ["Mapped", "Waitable", "poll", "synchronize"]


@runtime_checkable
class Waitable(Protocol):
    """What every handle can do."""

    def poll(self) -> bool:
        """Whether ``wait`` would return or raise at once."""

    def wait(self) -> Any:
        """The result, or the operation's error; may be called again."""


class Mapped:
    """A handle whose result is ``then(result of handle)``, computed once, by the thread that waits first."""

    __slots__ = ("_handle", "_result", "_then")

    def __init__(self, handle: Waitable, then: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._then: Callable[[Any], Any] | None = then
        self._result: Any = None

    def poll(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._handle.poll()

    def wait(self) -> Any:
        """The mapped result; raises what the operation raises."""
        result = self._handle.wait()
        if self._then is not None:
            self._result = self._then(result)
            self._then = None
        return self._result


def poll(handle: Waitable) -> bool:
    """Whether the operation behind ``handle`` is over, so that ``synchronize`` would not wait."""
    return _checked(handle).poll()


def synchronize(handle: Waitable) -> Any:
    """Waits for an asynchronous operation and returns its result; may be called again, with the same result.

    Any thread. Raises what became of the operation (PeerLost, MismatchError, Closed; see ddlcore.errors),
    ValueError for what is no handle.
    """
    return _checked(handle).wait()


def _checked(handle: Waitable) -> Waitable:
    if not isinstance(handle, Waitable):
        raise InvalidArgument(f"{handle!r} is no handle; pass what an ..._async function returned")
    return handle
