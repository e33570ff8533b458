"""Counts this rank's calls of one kind, and makes them wait while the ranks agree at which call all of them act.

There are two kinds of calls. At a call of ``should_stop()``, all ranks can stop together. At a call of ``commit()`` of
an elastic state, all ranks can change to another world together. ddlcore.coordinator.agreed_point explains how the
ranks agree.
"""

from __future__ import annotations

import time

from ddlcore.errors import Closed
from ddlcore.messages.to_coordinator import CallCount
from ddlcore.messages.to_rank import AgreedCall
from ddlcore.reentry import Lock
from ddlcore.runtime.job_failure import JobFailure

_LOOK_S = 0.002  # how often a call that is held back looks whether it may go on


class CountedCalls:
    """The calls of one kind that one rank of one world has made.

    The user's threads call ``called`` and ``joined``. The control thread calls the other methods.
    """

    def __init__(self, kind: str, name: str, failure: JobFailure) -> None:
        """Begin to count at 0.

        ``kind`` is STOP or COMMIT of the messages. ``name`` names the call in error messages. ``failure`` says
        whether the job has failed.
        """
        self._kind = kind
        self._name = name
        # A reason to act that is still to be sent. Set by signal handlers, which must not take a lock.
        self.wanted = ""
        self.asked = ""  # the reason that was sent, or that was heard from the coordinator
        self.reached = False  # whether a call has returned True
        self._closed = False
        self._failure = failure
        self._lock = Lock()
        # True between the question and the answer. A threading.Event might stay locked after an interrupt, see Lock.
        self._held_back = False
        self._joins = 0
        self._calls = 0
        self._point: tuple[int, int] | None = None

    def called(self) -> bool:
        """Count a call. Return whether the ranks act at this call or have acted at an earlier call.

        While the ranks agree on the call at which they act, this method waits. That takes a round trip to the
        coordinator. If the job fails during this wait, the error of the job is raised. If this rank leaves the job,
        Closed is raised.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise Closed(f"the job was shut down before the ranks had agreed at which {self._name} they act")
                # Checked under the lock: otherwise the question could be answered between the check and the count.
                if not self._held_back:
                    self._calls += 1
                    self.reached = self._point is not None and (self._joins, self._calls) >= self._point
                    return self.reached
            while self._held_back and not self._closed:
                if self._failure.given:
                    raise self._failure.error(self._name)
                time.sleep(_LOOK_S)

    def joined(self) -> None:
        """Begin to count at 0 again, because ``join()`` has returned on all ranks."""
        with self._lock:
            self._joins += 1
            self._calls = 0

    def count(self) -> CallCount:
        """Return the number of calls so far. Later calls wait until ``agreed`` is called."""
        with self._lock:
            self._held_back = True
            return CallCount(self._kind, self._joins, self._calls)

    def agreed(self, message: AgreedCall) -> None:
        """Record the coordinator's answer, which says at which call all ranks act. Waiting calls go on."""
        self.asked = self.asked or message.reason
        self._point = (message.joins, message.call)
        self._held_back = False

    def close(self) -> None:
        """Make waiting and later calls raise Closed, because this rank leaves the job. Any thread may call this."""
        self._closed = True
        self._held_back = False

    def take_wanted(self) -> str:
        """Return the text in ``wanted``, and set ``wanted`` to "". The text says why the ranks should act together.

        Return "" if no such text was written to ``wanted`` since the last call of this method.
        """
        wanted, self.wanted = self.wanted, ""
        self.asked = self.asked or wanted
        return wanted

    def go_on_from(self, before: CountedCalls) -> None:
        """Ask for what was asked for in ``before``, the last world, if the ranks have not acted there.

        The coordinator of that world may be lost, and with it the request.
        """
        if not before.reached:
            self.wanted = self.wanted or before.wanted or before.asked
