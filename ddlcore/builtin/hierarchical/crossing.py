"""The thread that has the transport across hosts: it opens it, does what it is told in order, and closes it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from ddlcore.contracts.transport import Context, Transport, Work
from ddlcore.errors import DeadlineExceeded, TransportError

__all__ = ["Crossing", "Task", "finish"]

Task = Callable[[Transport], Work]

SLICE_S = 0.1  # how soon a wait notices that it is to stop, where nobody says so
LATE_S = 5.0  # how long past its deadline an opening may go on
END_S = 2.0  # how long closing may take


class Crossing:
    """One communicator across hosts and its thread; ``open``, ``put``, ``wait`` and ``close`` are for one other thread.

    What the transport raises comes out of ``open`` or ``wait``, and again whenever one waits after that.
    """

    def __init__(self, make: Callable[[], Transport]) -> None:
        self._make = make
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._transport: Transport | None = None  # from when it begins to open until it is closed
        self._thread: threading.Thread | None = None
        self._opened = False
        self._aborted = False
        self._error: BaseException | None = None
        self._put = 0
        self._done = 0

    def begin(self, context: Context) -> None:
        """Begins to open, and returns at once; ``opened`` waits for it."""
        self._name = context.name
        self._thread = threading.Thread(target=self._live, args=(context,), name="ddl-crossing", daemon=True)
        self._thread.start()

    def opened(self, timeout_s: float) -> None:
        """Returns when it is open. Raises what opening raised, DeadlineExceeded long after ``timeout_s``."""
        until_s = time.monotonic() + timeout_s + LATE_S
        with self._changed:
            while not self._opened:
                self._check()
                if time.monotonic() > until_s:
                    raise DeadlineExceeded(f"{self._name} was not open after {timeout_s + LATE_S:g} s")
                self._changed.wait(SLICE_S)

    def put(self, task: Task) -> int:
        """Has ``task`` done after all before it; the ticket to wait with. Its Work is waited for there."""
        self._tasks.put(task)
        self._put += 1
        return self._put

    def wait(self, ticket: int) -> None:
        """Returns when the task is done; ``abort`` ends it. Raises what a task has raised."""
        with self._changed:
            while self._done < ticket:
                self._check()
                self._changed.wait(SLICE_S)

    def abort(self) -> None:
        """From any thread: whoever waits raises now, the thread as soon as its transport lets it."""
        with self._changed:
            self._aborted = True
            transport = self._transport
            self._changed.notify_all()
        if transport is not None and transport.capabilities.abort:
            transport.abort()

    def close(self) -> None:
        """Closes the transport and ends the thread. One that cannot be aborted may be left behind in its call."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(END_S)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._aborted:
            raise TransportError(f"{self._name} was aborted here")

    # --- the thread's own

    def _live(self, context: Context) -> None:
        transport = None
        try:
            transport = self._make()
            with self._changed:
                self._transport = transport
                self._check()
            transport.open(context)
            with self._changed:
                self._opened = True
                self._changed.notify_all()
            self._work(transport)
        except BaseException as error:  # whatever it is, the one who waits is to see it
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._transport = None  # nobody aborts what is closed
            if transport is not None:
                _close(transport)

    def _work(self, transport: Transport) -> None:
        while (task := self._tasks.get()) is not None:
            finish(task(transport), self._stop)
            with self._changed:
                self._done += 1
                self._changed.notify_all()
            del task  # it holds memory of a collective that is over

    def _stop(self) -> None:
        if self._aborted:
            raise TransportError(f"{self._name} was aborted here")


def finish(work: Work, check: Callable[[], None]) -> None:
    """Waits for ``work``, however slow the peers; ``check`` raises where that is to end."""
    while not work.wait(SLICE_S):
        check()


def _close(transport: Transport) -> None:
    with contextlib.suppress(Exception):  # nobody is left who could do something about it
        transport.close()
