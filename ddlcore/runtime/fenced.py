"""Defines the handles of operations on device tensors.

Such a handle is complete when the work of its operation is queued on the device. An event shows when the device has
done the work. The host does not wait for that event: ``wait`` makes the thread's current stream wait for the event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddlcore.contracts.device import Event
from ddlcore.errors import DdlInternalError
from ddlcore.messages.spec import Spec
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import IDLE, PersistentRequest
from ddlcore.runtime.waiter import Waiter
from ddlcore.types import Buffer

After = Callable[[int, Sequence[Any]], None]  # Adapter.after
FAILURE_WAIT_S = 2.0  # how long to wait for the news that a peer died, which explains a device error better


def _follow(failure: JobFailure, event: Event, after: After, tensors: Sequence[Any]) -> None:
    """Make the calling thread's current stream wait for ``event``.

    If the device will never reach the event because the job has failed, raise the job's error.
    """
    try:
        done = event.done()
        if done or not failure.given:
            after(event.handle, tensors)
        if not done and failure.given:
            # For some adapters ``after`` blocks, and the job may fail in that time. An aborted transport lets its
            # events complete with garbage, so the failure must be checked again here.
            raise failure.error()
    except DdlInternalError:
        if failure.wait(FAILURE_WAIT_S):
            raise failure.error() from None
        raise


def _is_over(event: Event) -> bool:
    try:
        return event.done()
    except DdlInternalError:
        return True  # ``wait`` raises the error


class FencedHandle(Handle):
    """The Handle of an operation on device tensors. ``tensors`` are the tensors that the operation reads and writes."""

    __slots__ = ("_after", "_events", "_tensors")

    def __init__(
        self,
        waiter: Waiter,
        entries: int,
        finish: Callable[[Sequence[Outcome | None]], Any],
        after: After,
        tensors: Sequence[Any],
    ) -> None:
        super().__init__(waiter, entries, finish)
        self._after = after
        self._tensors = tensors
        self._events: list[Event] = []

    def poll(self) -> bool:
        """Return whether the operation has ended on the host and the device has completed its work."""
        self._waiter.polled(self._left > 0)
        if self._left > 0 or not all(map(_is_over, self._events)):
            return False
        self._completion.observe(self._index)
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until the operation's work is queued on the device, and return the result, see Handle.wait.

        The calling thread's current stream runs its further work only after the result is complete.
        """
        if self._left > 0:
            self._waiter.wait_for_device(self, timeout_s)
        if self._error is None:
            for event in self._events:
                _follow(self._waiter.failure, event, self._after, self._tensors)
        return super().wait()

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """Complete one entry as in Handle.complete, and also store the event of its outcome."""
        if outcome is not None and outcome.event is not None and outcome.event not in self._events:
            self._events.append(outcome.event)
        super().complete(number, outcome, index)


class FencedPersistentRequest(PersistentRequest):
    """A PersistentRequest for a tensor on a device. ``mark_ready`` must be called before each start."""

    __slots__ = ("_after", "event")

    def __init__(
        self,
        waiter: Waiter,
        set_id: int,
        name: str,
        spec: Spec,
        spec_bytes: bytes,
        source: Buffer,
        target: Buffer | None,
        after: After,
    ) -> None:
        super().__init__(waiter, set_id, name, spec, spec_bytes, source, target)
        self._after = after
        self.event: Event | None = None  # the event after which the last result is complete

    def poll(self) -> bool:
        """Return whether the operation has ended on the host and the device has completed its work."""
        self.waiter.polled(self.state != IDLE)
        if self.state != IDLE or not (self.event is None or _is_over(self.event)):
            return False
        self.completion.observe(self.index)
        return True

    def arrive(self) -> Event | None:
        """Wait until the operation's work is queued on the device, and return the event of the result.

        Unlike ``wait``, this method does not change the current stream: the caller must order its work after the event.
        Many requests often share one event, and then the caller needs to wait for this event only once. Return None if
        the operation needed no event. Raises the same errors as ``wait``.
        """
        if self.state != IDLE:
            self.waiter.wait_for_device(self)
        super().wait()
        return self.event

    def wait(self) -> None:
        """Wait until the operation's work is queued on the device. Raises the operation's error if it failed.

        The calling thread's current stream runs its further work only after the result is complete.
        """
        event = self.arrive()
        if event is not None:
            _follow(self.waiter.failure, event, self._after, ())

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """Complete the operation as in PersistentRequest.complete, and also store the event of its outcome."""
        self.event = outcome.event if outcome is not None else None
        super().complete(number, outcome, index)
