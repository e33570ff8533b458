"""Handles of tensors on devices: complete when their work is queued, while their values stand behind an event.

The host never waits for that event: the stream that is current where ``wait`` returns does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddlcore.contracts.device import Event
from ddlcore.errors import DdlInternalError
from ddlcore.messages import Spec
from ddlcore.runtime.handle import Completion, Handle
from ddlcore.runtime.request import IDLE, Outcome, PersistentRequest
from ddlcore.types import Buffer

__all__ = ["FencedHandle", "FencedPersistentRequest"]

After = Callable[[int, Sequence[Any]], None]  # Adapter.after
FAILURE_WAIT_S = 2.0  # how long a failed device waits to hear that a peer died: the better explanation


def _follow(completion: Completion, event: Event, after: After, tensors: Sequence[Any]) -> None:
    """The caller's stream goes on behind ``event``. Raises why that will never come, where this is known."""
    failure = completion.failure
    try:
        done = event.done()
        if failure is None or done or not failure.given:
            after(event.handle, tensors)
        if failure is not None and not done and failure.given:
            # Given while ``after`` blocked, as it does for some adapters: an abort lets an event come, with garbage.
            raise failure.error()
    except DdlInternalError:
        if failure is not None and failure.wait(FAILURE_WAIT_S):
            raise failure.error() from None
        raise


def _is_over(event: Event) -> bool:
    try:
        return event.done()
    except DdlInternalError:
        return True  # ``wait`` raises it


class FencedHandle(Handle):
    """As Handle. ``tensors`` are what the operation reads and writes."""

    __slots__ = ("_after", "_events", "_tensors")

    def __init__(
        self,
        completion: Completion,
        entries: int,
        finish: Callable[[Sequence[Outcome | None]], Any],
        after: After,
        tensors: Sequence[Any],
    ) -> None:
        super().__init__(completion, entries, finish)
        self._after = after
        self._tensors = tensors
        self._events: list[Event] = []

    def poll(self) -> bool:
        """Whether ``wait`` would return at once, and the device has done everything, too."""
        self._completion.polled(self._left > 0)
        if self._left > 0 or not all(map(_is_over, self._events)):
            return False
        self._completion.observe(self._index)
        return True

    def wait(self) -> Any:
        """As Handle.wait: what the calling thread does with the result comes after it, on its current stream."""
        if self._left > 0:
            self._completion.wait_for_device(self)
        if self._error is None:
            for event in self._events:
                _follow(self._completion, event, self._after, self._tensors)
        return super().wait()

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """See Handle.complete."""
        if outcome is not None and outcome.event is not None and outcome.event not in self._events:
            self._events.append(outcome.event)
        super().complete(number, outcome, index)


class FencedPersistentRequest(PersistentRequest):
    """As PersistentRequest, for a tensor on a device: ``source.event`` and its kin are set before each start."""

    __slots__ = ("_after", "event")

    def __init__(
        self,
        completion: Completion,
        set_id: int,
        name: str,
        spec: Spec,
        spec_bytes: bytes,
        source: Buffer,
        target: Buffer | None,
        after: After,
    ) -> None:
        super().__init__(completion, set_id, name, spec, spec_bytes, source, target)
        self._after = after
        self.event: Event | None = None  # behind the last result

    def poll(self) -> bool:
        """Whether ``wait`` would return at once, and the device has done everything, too."""
        self.completion.polled(self.state != IDLE)
        if self.state != IDLE or not (self.event is None or _is_over(self.event)):
            return False
        self.completion.observe(self.index)
        return True

    def arrive(self) -> Event | None:
        """As ``wait``, but for the stream: the caller sees to it that what it does comes after the event returned.

        Of many, one event is often behind all; None where the operation needed none. Raises as ``wait``.
        """
        if self.state != IDLE:
            self.completion.wait_for_device(self)
        super().wait()
        return self.event

    def wait(self) -> None:
        """As PersistentRequest.wait: what the calling thread does comes after the result, on its current stream."""
        event = self.arrive()
        if event is not None:
            _follow(self.completion, event, self._after, ())

    def complete(self, number: int, outcome: Outcome | None, index: int) -> None:
        """See PersistentRequest.complete."""
        self.event = outcome.event if outcome is not None else None
        super().complete(number, outcome, index)
