"""The engine thread: runs a rank's batches one after the other, in the order in which they were decided."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ddlcore.errors import DdlInternalError, TransportError
from ddlcore.messages import Batch, Drain, Frozen, Leave, Resume
from ddlcore.runtime.checks import called
from ddlcore.runtime.executor import Deliver, Executor, Unserved
from ddlcore.runtime.handle import Completion
from ddlcore.runtime.inbox import Inbox
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.request import IDLE, Entry, Outcome, Recurring
from ddlcore.runtime.schedule import Launch

__all__ = ["Engine", "Todo", "Verdict"]

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


Todo = tuple[Batch, list[Entry | None]] | Callable[[], None]


class Engine:
    """Owns the communicators and the executor. ``broken`` is told when the data path fails by itself.

    What was decided (``post``) comes first, in order; then the schedule that is replayed gives what is
    ready. ``say`` reaches the coordinator.
    """

    def __init__(
        self,
        executor: Executor,
        sets: ProcessSets,
        inbox: Inbox,
        completion: Completion,
        verdict: Verdict,
        broken: Callable[[BaseException], None],
        name: str,
    ) -> None:
        self._executor = executor
        self._sets = sets
        self._inbox = inbox
        self._completion = completion
        self._verdict = verdict
        self._broken = broken
        inbox.leave = self.leave
        self.say: Callable[[Leave | Frozen], None] = lambda message: None
        self._queue: deque[Todo | None] = deque()
        self._held: list[tuple[Launch[Entry], Deliver]] = []
        self.replayed = 0
        self.void = 0
        self.negotiated = 0
        self.divergences = 0
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, item: Todo) -> None:
        """Adds a batch, or a call to be made on this thread, behind what is there."""
        with self._inbox.work:
            self._queue.append(item)
            self._inbox.work.notify()

    def stop(self, timeout_s: float) -> bool:
        """Ends after what is queued, and closes the communicators. False if that took too long."""
        with self._inbox.work:
            self._queue.append(None)
            self._inbox.work.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            todo = self._next()
            if todo is None:
                break
            if isinstance(todo, Launch):
                self._replay(todo)
            elif callable(todo):
                self._call(todo)
            else:
                self._run(*todo)
        self._sets.close()

    def _next(self) -> Todo | Launch[Entry] | None:
        """Waits for what comes next; asks to leave when the schedule has been waited for too long."""
        with self._inbox.work:
            while True:
                if self._queue:
                    return self._queue.popleft()
                launch = self._inbox.launch()
                if launch is not None:
                    return launch
                if self._inbox.conflict:
                    self.leave(self._inbox.stopped_waiting())
                self._inbox.work.wait()

    def leave(self, epoch: int) -> None:
        """Asks to leave replay; from any thread."""
        self.divergences += 1
        self.say(Leave(epoch, "a batch waits for tensors that do not come"))

    def _call(self, todo: Callable[[], None]) -> None:
        try:
            todo()
        except BaseException as error:
            self._explain(error)
            self.abandon()

    # --- batches that were decided

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
            self.negotiated += 1
            self._deliver(entries, outcomes, batch.index)

    # --- batches of a schedule

    def _replay(self, launch: Launch[Entry]) -> None:
        """Runs a batch with this rank's data; hands it over at once while nothing is frozen, else after Drain."""
        deliver = self._take_part(launch, "fusion")
        if deliver is None:
            return
        with self._inbox.lock:
            frozen = self._inbox.frozen
        if frozen:
            self._held.append((launch, deliver))
            if self._verdict.given:
                self.abandon()
        else:
            self._hand_over(launch, deliver)

    def _take_part(self, launch: Launch[Entry], use: str) -> Deliver | None:
        if self._verdict.given:
            self._failed(launch, None)
            return None
        try:
            return self._executor.replay(launch, use)
        except Unserved as error:
            self._failed(launch, error)
            return None
        except BaseException as error:
            self._explain(error)
            self._failed(launch, None)
            return None

    def _hand_over(self, launch: Launch[Entry], deliver: Deliver) -> None:
        assert launch.entries is not None
        try:
            outcomes = deliver()
        except BaseException as error:
            self._explain(error)
            self._failed(launch, None)
            return
        self.replayed += 1
        self._inbox.delivered(launch)
        self._deliver(launch.entries, outcomes, -1)

    def _failed(self, launch: Launch[Entry], error: BaseException | None) -> None:
        if launch.entries is not None:
            self._inbox.delivered(launch)
            self.fail(launch.entries, error)

    def drain(self, message: Drain) -> None:
        """On the engine's thread: takes part in what others have launched, then judges what is held."""
        if self._verdict.given:
            return  # ``abandon`` sees to what is held
        highest, lowest = dict(message.highest), dict(message.lowest)
        for launch in self._inbox.drain(highest):
            self._take_part(launch, "dummy")
        held, self._held = self._held, []
        for launch, deliver in held:
            if launch.place <= lowest[launch.planned.set_id]:
                self._hand_over(launch, deliver)
            else:
                self.void += 1
                if not self._inbox.put_back(launch):
                    self.fail(launch.entries or (), None)
        if not any(isinstance(item, Resume) for item in message.items):
            self._inbox.discover(message.epoch + 1)

    def resume(self, message: Resume, sets: Mapping[int, Sequence[int]], rank: int) -> None:
        """On the engine's thread: what was decided before has run; from here on the schedule gives what is ready."""
        frozen = self._inbox.resume(message, sets, rank)
        if frozen is not None:
            self.say(frozen)

    def abandon(self) -> None:
        """On the engine's thread: the job is over, no verdict will come for what is held."""
        held, self._held = self._held, []
        for launch, _ in held:
            self._failed(launch, None)

    # --- ends

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
                if type(entry) is Recurring:  # as its ``complete`` would, hundreds of times a step
                    entry.index = index
                    entry.state = IDLE
                elif entry is not None:
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
