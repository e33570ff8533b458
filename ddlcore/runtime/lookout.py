"""Tells other threads what waits in a rank's tensor queue, and asks to leave replay when something waits too long."""

from __future__ import annotations

import math
import time
from _thread import get_ident
from collections.abc import Callable

from ddlcore.messages.observing import Busy, ReplayStatus
from ddlcore.messages.to_coordinator import Leave
from ddlcore.runtime.checks import describe
from ddlcore.runtime.engine import Engine
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.tensor_queue import GONE, TensorQueue

LEAVE_AFTER_S = 0.005  # or USUAL_TIMES times the bucket's usual wait, whichever is longer
USUAL_TIMES = 4.0
FIRST_USUAL_S = 0.05  # used while the schedule's usual wait is not yet known
STUCK_AFTER_S = 1.0  # replaces LEAVE_AFTER_S while no thread waits here: this rank or a peer is probably slow
WATCH_S = 0.1


class Lookout:
    """Watches the tensor queue and the engine of one rank. Any thread may call the methods, at any moment."""

    def __init__(
        self,
        tensor_queue: TensorQueue,
        engine: Engine,
        engaged: Callable[[], Busy | None],
        outbox: Outbox,
        meter: Meter,
    ) -> None:
        """``engaged`` returns other work of the engine than buckets, see ``Decisions.engaged``."""
        self._tensor_queue = tensor_queue
        self._engine = engine
        self._engaged = engaged
        self._outbox = outbox
        self._meter = meter

    def begin(self) -> None:
        """Register the calling thread as one of ddl's own threads. Such a thread must not wait for an operation."""
        self._engine.user_threads.own_threads.add(get_ident())

    # --- questions

    def under_way(self) -> set[int]:
        """Return the numbers of those launches that were neither delivered nor found to be void."""
        with self._tensor_queue.lock:
            return set(self._tensor_queue.launches)

    def pending(self) -> list[str]:
        """Return the names of this rank's operations that have not ended."""
        return [name for name, _ in self.pending_in_sets()]

    def pending_in_sets(self) -> list[tuple[str, int]]:
        """Return the names of this rank's operations that have not ended, each with its process set."""
        with self._tensor_queue.lock:
            return [(entry.name, entry.set_id) for entry in self._tensor_queue.unfinished]

    def replay_status(self) -> ReplayStatus | None:
        """Return the place in the schedule that this rank has reached.

        Return None if this rank replays no schedule, or if its replay has paused.
        """
        queue = self._tensor_queue
        with queue.lock:
            replay = queue.open
            if replay is None or (replay.paused and not queue.launches):
                return None
            # The values are copied first, because the engine may remove a launch at any moment.
            first = next(iter(list(queue.launches.values())), None)
            if first is not None:
                return ReplayStatus(queue.epoch, first.place, True, first.planned.set_id, first.planned.names)
            planned, entries = replay.current.planned, replay.current.entries
            missing = tuple(name for name, entry in zip(planned.names, entries) if entry is None)
            return ReplayStatus(queue.epoch, replay.place, False, planned.set_id, planned.names, missing)

    def doing(self) -> ReplayStatus | Busy | None:
        """Return which work of this rank other ranks may delay, or None if there is no such work now.

        Such work is a negotiated bucket, a drain or another item of the engine, or a bucket of the schedule that is
        launched or has some of its tensors.
        """
        bucket = self._engine.bucket
        if bucket is not None:
            what = f"{bucket.kind.name.lower()} {describe(bucket.names, bucket.set_id)}"
            return Busy(what, bucket.index, bucket.set_id, bucket.names)
        engaged = self._engaged()
        if engaged is not None:
            return engaged
        replay_status = self.replay_status()
        waits = replay_status is not None and len(replay_status.missing) < len(replay_status.names)
        return replay_status if waits else None

    def describe_state(self) -> str:
        """Return a text that says what this rank is doing now. Any thread may call this."""
        doing = self.doing()
        if isinstance(doing, Busy):
            return f"its engine is in {doing.what}"
        if doing is not None:
            where = "in" if doing.launched else "at"
            return f"it is {where} {describe(doing.names, doing.set_id)} of its schedule (place {doing.place})"
        pending = self.pending()
        if pending:
            return f"it waits for {describe(pending, 0)}"
        return "all its operations are complete; it is running its own code"

    # --- leaving replay

    def check_stall(self, since_s: float) -> float:
        """Ask the coordinator to end the replay if the calling user thread would otherwise probably wait forever.

        The user thread has waited since ``since_s``. The replay is ended under three conditions: tensors have waited in
        slots for longer than usual, the next bucket is not ready, and no bucket is running. Return a number of seconds:
        the caller should call this method again after at most this time.
        """
        queue = self._tensor_queue
        if queue.lock.held():
            return WATCH_S  # a finalizer polls while its thread is in another call
        with queue.lock:
            if queue.behind:
                queue.catch_up()
            replay = queue.open
            if replay is None or queue.waits_since_s is None or queue.launches or replay.ready() or replay.paused:
                return WATCH_S  # a paused rank waits for its peers; ``look`` gives them more time
            usual_s = replay.current.usual_s
            patience_s = max(LEAVE_AFTER_S, USUAL_TIMES * (FIRST_USUAL_S if usual_s is None else usual_s))
            left_s = max(since_s, queue.waits_since_s) + patience_s - time.monotonic()
            if left_s > 0:
                return left_s
            self._leave()
            return WATCH_S

    def look(self) -> None:
        """Ask to leave replay if the schedule cannot continue, or if an entry has been in a slot for too long.

        Code outside ddl may be waiting for the result of such an entry. Or a peer may be waiting for it, while this
        rank's engine is still in an earlier collective. Or peers may be in a bucket that this rank will not fill,
        because it has made another call without a name in its place; outside of replay, this is found to be a mismatch.
        This method asks only once. The control thread calls it at least once a second. It also finishes calls that a
        signal handler has interrupted.
        """
        queue = self._tensor_queue
        with queue.lock:
            if queue.behind:
                queue.catch_up()
            if queue.is_ready() or queue.running == GONE:  # its thread was interrupted by a signal
                queue.work.notify()
            replay = queue.open
            if replay is None:
                return
            if queue.conflict:
                self._leave()
                return
            waits_since_s = math.inf if queue.waits_since_s is None else queue.waits_since_s
            since_s = min(waits_since_s, *queue.unnamed.strays.values(), math.inf)
            if since_s == math.inf:
                return
            usual_s = max((position.usual_s or 0.0 for position in replay.positions), default=0.0)
            if replay.paused:  # peers may need the rest of a period to get here
                usual_s = max(usual_s, queue.pauses.last_period_s())
            if time.monotonic() - since_s >= max(STUCK_AFTER_S, USUAL_TIMES * usual_s):
                self._leave(slow=True)

    def _leave(self, slow: bool = False) -> None:
        """Ask the coordinator to end the present replay. The caller holds the lock.

        ``slow`` says that the cause may be a slow rank, so the schedule may still fit. After this, the rank does not
        ask a second time for the same reason.
        """
        queue = self._tensor_queue
        self._meter.divergences += 1
        queue.flight.note("leave", epoch=queue.epoch, slow=slow)
        self._outbox.say(Leave(queue.epoch, "a bucket waits for tensors that do not come", slow))
        # The message comes first, so that Ctrl-C after it cannot lose it.
        queue.waits_since_s = None
        queue.conflict = False
        queue.unnamed.strays = dict.fromkeys(queue.unnamed.strays, math.inf)  # they still hold up later calls
