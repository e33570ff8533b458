"""What a caller holds while its operation is under way, and the one condition that all handles of a job share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ddlcore.observe.recorder import Recorder
    from ddlcore.runtime.request import Outcome
    from ddlcore.runtime.verdict import Verdict

__all__ = ["Completion", "Handle", "Waited"]

SLICE_S = 0.1  # users wait in slices, so that Ctrl-C works


class Waited(Protocol):
    """What a thread can wait for."""

    @property
    def pending(self) -> bool: ...


class Completion:
    """Where finished batches are announced. ``observed`` is the last batch whose end the user's code has seen.

    ``help`` may do what is waited for. ``watch`` is told since when somebody waits, and says in how many
    seconds it wants to be told again.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.observed = -1
        self.help: Callable[[Waited], None] = lambda operation: None
        self.watch: Callable[[float], float] = lambda since_s: SLICE_S
        self.hurry: Callable[[], None] = lambda: None  # tells who waits for devices that somebody waits for that
        self.wanted = 0  # threads that wait for what is on a device
        self.verdict: Verdict | None = None  # on the job, once it is over
        self.waited_s = 0.0  # by all threads that have waited
        self.recorder: Recorder | None = None  # while a timeline is written
        self._polled_since_s: float | None = None

    def wait(self, operation: Waited) -> None:
        """Blocks until ``operation`` is over."""
        since_s = time.monotonic()
        self.help(operation)
        while operation.pending:
            patience_s = min(self.watch(since_s), SLICE_S)
            with self.condition:
                if operation.pending:
                    self.condition.wait(patience_s)
        until_s = time.monotonic()
        with self.condition:
            self.waited_s += until_s - since_s
        if (recorder := self.recorder) is not None:
            recorder.waited(round(since_s * 1e9), round(until_s * 1e9))

    def wait_for_device(self, operation: Waited) -> None:
        """As ``wait``, for what may be complete on the device before this host knows that it is valid."""
        with self.condition:
            self.wanted += 1
        try:
            self.hurry()
            self.wait(operation)
        finally:
            with self.condition:
                self.wanted -= 1

    def polled(self, pending: bool) -> None:
        """Somebody has asked whether an operation is over: who asks again and again, waits."""
        if not pending:
            self._polled_since_s = None
        elif self._polled_since_s is None:
            self._polled_since_s = time.monotonic()
        else:
            self.watch(self._polled_since_s)

    def observe(self, index: int) -> None:
        """The user's code has seen the end of batch ``index``."""
        if index > self.observed:
            self.observed = index


class Handle:
    """An operation under way. ``wait`` and ``poll`` may be called from any thread, and again when it is over."""

    __slots__ = ("_completion", "_error", "_finish", "_finishing", "_index", "_left", "_outcomes", "_result", "_then")

    def __init__(self, completion: Completion, entries: int, finish: Callable[[Sequence[Outcome | None]], Any]) -> None:
        self._completion = completion
        self._left = entries
        self._outcomes: list[Outcome | None] = [None] * entries
        self._finish: Callable[[Sequence[Outcome | None]], Any] | None = finish
        self._finishing = threading.Lock()
        self._error: BaseException | None = None
        self._result: Any = None
        self._index = -1
        self._then: Callable[[], None] | None = None

    def then(self, call: Callable[[], None]) -> None:
        """Has ``call`` made once, when the operation is over, one way or the other; at once where it is.

        On whatever thread ends it, with no lock held: it must be short, and raise nothing. One call a handle.
        """
        with self._completion.condition:
            if self._left > 0:
                self._then = call
                return
        call()

    def poll(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        self._completion.polled(self._left > 0)
        if self._left > 0:
            return False
        self._completion.observe(self._index)
        return True

    def wait(self) -> Any:
        """The result, when all ranks have taken part. Raises what became of the operation otherwise.

        PeerLost, MismatchError, Closed and their kin are described in ``ddlcore.errors``. The wait
        has no deadline of its own: it ends with the operation or with the job.
        """
        if self._left > 0:
            self._completion.wait(self)
        self._completion.observe(self._index)
        if self._error is not None:
            raise self._error.with_traceback(None)
        with self._finishing:  # outputs are made by a thread that waits, once
            if self._finish is not None:
                self._result = self._finish(self._outcomes)
                self._finish = None
                self._outcomes = []
        return self._result

    @property
    def pending(self) -> bool:
        """Whether it is under way."""
        return self._left > 0

    @property
    def failure(self) -> BaseException | None:
        """The operation's error; None while it is under way, and where it went well."""
        return self._error

    def over(self) -> Callable[[], None] | None:
        """The call that is to be made now, if there is one; only once. The caller holds the completion's condition."""
        if self._left > 0:
            return None
        then, self._then = self._then, None
        return then

    def refuse(self, error: BaseException) -> None:
        """The operation could not even be handed over: whoever waits gets ``error``. Any thread."""
        with self._completion.condition:
            self.fail(error)
            then = self.over()
            self._completion.condition.notify_all()
        if then is not None:
            then()

    def complete(self, slot: int, outcome: Outcome | None, index: int) -> None:
        """One entry is done. The caller holds the completion's condition and notifies."""
        self._outcomes[slot] = outcome
        self._index = max(self._index, index)
        self._left -= 1

    def fail(self, error: BaseException) -> None:
        """The operation is over, with an error. The caller holds the completion's condition and notifies."""
        if self._left > 0:
            self._error = error
            self._left = 0
