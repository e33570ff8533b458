"""The engine thread: runs a rank's batches one after the other, in the order in which they were decided."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ddlcore.errors import DdlInternalError, TransportError
from ddlcore.messages import Batch
from ddlcore.runtime.checks import called
from ddlcore.runtime.executor import Executor, Unserved
from ddlcore.runtime.handle import Completion
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.request import Entry, Outcome

__all__ = ["Engine", "Verdict"]

log = logging.getLogger("ddl")
VERDICT_WAIT_S = 2.0  # how long a failed transport waits to hear that a peer died: the better explanation


class Verdict:
    """Why the job is over, once it is. The first verdict stands."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._make: Callable[[str], BaseException] | None = None
        self._lock = threading.Lock()

    def give(self, make: Callable[[str], BaseException]) -> bool:
        """``make(during)`` builds the error for one operation. True if this is the first verdict."""
        with self._lock:
            if self._make is not None:
                return False
            self._make = make
        self._given.set()
        return True

    def wait(self, timeout_s: float) -> bool:
        return self._given.wait(timeout_s)

    @property
    def given(self) -> bool:
        return self._make is not None

    def error(self, during: str = "") -> BaseException:
        assert self._make is not None
        return self._make(during)


class Engine:
    """Owns the communicators and the executor. ``broken`` is told when the data path fails by itself."""

    def __init__(
        self,
        executor: Executor,
        sets: ProcessSets,
        completion: Completion,
        verdict: Verdict,
        broken: Callable[[BaseException], None],
        name: str,
    ) -> None:
        self._executor = executor
        self._sets = sets
        self._completion = completion
        self._verdict = verdict
        self._broken = broken
        self._queue: deque[tuple[Batch, list[Entry | None]] | Callable[[], None] | None] = deque()
        self._work = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, item: tuple[Batch, list[Entry | None]] | Callable[[], None]) -> None:
        """Adds a batch, or a call to be made on this thread, behind what is there."""
        with self._work:
            self._queue.append(item)
            self._work.notify()

    def stop(self, timeout_s: float) -> bool:
        """Ends after what is queued, and closes the communicators. False if that took too long."""
        with self._work:
            self._queue.append(None)
            self._work.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            with self._work:
                while not self._queue:
                    self._work.wait()
                item = self._queue.popleft()
            if item is None:
                break
            if callable(item):
                item()
            else:
                self._run(*item)
        self._sets.close()

    def _run(self, batch: Batch, entries: Sequence[Entry | None]) -> None:
        if self._verdict.given:
            self.fail(entries, None, batch.index)
            return
        try:
            outcomes = self._executor.execute(batch, entries)
        except Unserved as error:
            self.fail(entries, error, batch.index)
        except BaseException as error:
            self._explain(error)
            self.fail(entries, None, batch.index)
        else:
            self._deliver(entries, outcomes, batch.index)

    def _explain(self, error: BaseException) -> None:
        """A transport that fails has most likely lost a peer: the control network knows which."""
        if isinstance(error, DdlInternalError) and self._verdict.wait(VERDICT_WAIT_S):
            return
        if not isinstance(error, DdlInternalError):
            log.error("the engine failed", exc_info=error)
            wrapped = TransportError(f"the engine failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._broken(error)

    def _deliver(self, entries: Sequence[Entry | None], outcomes: Sequence[Outcome | None], index: int) -> None:
        with self._completion.condition:
            for entry, outcome in zip(entries, outcomes):
                if entry is not None:
                    entry.handle.complete(entry.slot, outcome, index)
            self._completion.condition.notify_all()

    def fail(self, entries: Sequence[Entry | None], error: BaseException | None, index: int = -1) -> None:
        """Ends the entries' handles with ``error``, or with the verdict on the job."""
        with self._completion.condition:
            for entry in entries:
                if entry is not None:
                    during = called(entry.spec.kind, entry.name)
                    entry.handle.fail(error if error is not None else self._verdict.error(during))
            self._completion.condition.notify_all()
