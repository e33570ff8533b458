"""Counts this rank's calls of one kind, and holds them back while the ranks agree at which call they act.

Kinds are ``should_stop()``, and ``commit()`` of an elastic state; see ddlcore.coordinator.agreed_point for the protocol.
"""

from __future__ import annotations

import threading

from ddlcore.errors import Closed
from ddlcore.messages import AgreedCall, CallCount
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.reentry import Lock

_LOOK_S = 0.05  # how often a call that is held back looks whether the job has failed


class CountedCalls:
    """The calls of one kind on one rank of one world.

    The user's threads call ``next_is_agreed`` and ``joined``, the control thread the other methods.
    """

    def __init__(self, kind: str, name: str, failure: JobFailure) -> None:
        """Count from 0. ``name`` is the call's name in error messages."""
        self._kind = kind
        self._name = name
        # A reason to act that is still to be sent. Set by signal handlers, which must not take a lock.
        self.wanted = ""
        self.reached = False  # whether a call has returned True
        self._closed = False
        self._failure = failure
        self._lock = Lock()
        self._released = threading.Event()  # not set between the question and the answer
        self._released.set()
        self._joins = 0
        self._calls = 0
        self._point: tuple[int, int] | None = None

    def next_is_agreed(self) -> bool:
        """Count a call, and return whether the ranks act at it or have acted at an earlier one.

        Waits while the ranks agree on the place, which takes a round trip to the coordinator. Raises the error of the
        job if it ends meanwhile, and Closed if this rank leaves it.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise Closed(f"the job was shut down before the ranks had agreed at which {self._name} they act")
                # Checked under the lock: otherwise the question could be answered between the check and the count.
                if self._released.is_set():
                    self._calls += 1
                    self.reached = self._point is not None and (self._joins, self._calls) >= self._point
                    return self.reached
            while not self._released.wait(_LOOK_S):
                if self._failure.given:
                    raise self._failure.error(self._name)

    def joined(self) -> None:
        """Begin to count anew, because this rank has left ``join()`` together with all others."""
        with self._lock:
            self._joins += 1
            self._calls = 0

    def count(self) -> CallCount:
        """Return how many calls were made, and hold back the next one until ``agreed``."""
        with self._lock:
            self._released.clear()
            return CallCount(self._kind, self._joins, self._calls)

    def agreed(self, message: AgreedCall) -> None:
        """Take the coordinator's answer, which names the call at which all ranks act, and let calls go on."""
        self._point = (message.joins, message.call)
        self._released.set()

    def close(self) -> None:
        """Let calls that are held back raise, because this rank leaves the job. Any thread may call this."""
        self._closed = True
        self._released.set()

    def take_wanted(self) -> str:
        """Return the reason to act that was noted since the last call of this method.

        Returns an empty string if there was none.
        """
        wanted, self.wanted = self.wanted, ""
        return wanted
