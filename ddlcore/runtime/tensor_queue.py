"""The tensor queue: stores the operations that user threads have submitted, until these operations have completed.

User threads put operations into the queue by ``Submission``. The control thread and the engine process these operations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ddlcore.messages.to_coordinator import Paused, Request
from ddlcore.messages.to_rank import Bucket
from ddlcore.observe.flight import Flight
from ddlcore.reentry import Lock
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.events import NO_EVENTS, Events
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.pauses import Pauses
from ddlcore.runtime.request import ANONYMOUS, Entry, PersistentRequest
from ddlcore.runtime.schedule import Launch, Offer, Replay
from ddlcore.runtime.unfinished import Unfinished
from ddlcore.runtime.unnamed import UnnamedCalls, order_of

GONE = -1  # value of ``running``: a signal handler interrupted the thread that ran a bucket


class TensorQueue:
    """The submitted entries, by process set and name. During replay, this object also fills the slots of the schedule.

    Any thread may submit entries (``Submission``). The control thread sends requests for these entries to the coordinator. The engine
    launches buckets, which contain these entries. One lock protects the whole state, so a freeze and a launch never
    happen at the same time.

    A signal handler may raise an exception in the middle of any call that a user thread makes here. CPython runs signal
    handlers only at the beginning of a function, after a call, and where a loop jumps back. Each method therefore has
    three parts. First it does everything that calls a function. Then it changes the state by a sequence of plain
    stores; only the last of them may be a call, and only of a C function. If work is still to be done after these
    stores, the method sets ``behind`` before this work begins. If a signal handler interrupts this work, the next
    thread that takes the lock finishes the work (``catch_up``). The control thread takes the lock at least once a
    second.
    """

    def __init__(
        self,
        completion: Completion,
        outbox: Outbox,
        flight: Flight | None = None,
        events: Events = NO_EVENTS,
    ) -> None:
        self.lock = Lock()
        # The engine waits on this condition. All others take the lock itself: a condition is entered by Python code,
        # and a signal handler that raises there would leave it locked (see Lock).
        self.work = threading.Condition(self.lock)
        self.behind = False  # a call was interrupted or left work for ``catch_up``
        self.placing: Sequence[Entry] = ()  # submitted; some may still lack their slot or their place in ``unsent``
        self.completion = completion
        self.wake = outbox.wake  # wakes the control thread, which takes requests
        self.events = events
        self.unfinished = Unfinished()
        self.unnamed = UnnamedCalls()
        self.flight = flight if flight is not None else Flight(0)
        self.recent, self.recent_mask = self.flight.launches, self.flight.mask
        self.launched = 0
        # Launched, but neither delivered nor put back yet, by number. Single operations on a dict cannot interfere with
        # each other, so the engine removes a launch without the lock.
        self.launches: dict[int, Launch[Entry]] = {}
        self.unsent: list[Entry] = []
        self.unanswered = False  # at most one request is unanswered; entries that are submitted later go into the next
        self._serial = 0
        self.epoch = 0
        # Between Freeze and the next epoch: no request is sent then, and a bucket that completes waits until Drain has
        # decided on it. It may be read without the lock: a bucket that was complete before the freeze is valid, whether
        # it is delivered before the freeze or just after it.
        self.frozen = False
        self.refusal: Callable[[], BaseException] | None = None  # makes the error for those who submit an entry now
        self._closed = False
        self.usual_s: list[float | None] = []  # by position in the present schedule: the usual time to fill
        self.pauses = Pauses()
        self.replay: Replay[Entry] | None = None
        self.open: Replay[Entry] | None = None  # ``replay`` while its slots may be filled, else None
        self._steps = 0  # periods launched by replays that have ended
        self.conflict = False  # an entry has the name of a slot but another spec
        self.waits_since_s: float | None = None  # since when the oldest unlaunched entry has been in its slot
        # The thread that is running a bucket: the engine's thread or a waiting user thread; 0 if there is none. A
        # signal handler may interrupt a user thread at any moment. That thread then leaves GONE here, a plain store
        # that needs no call, and the bucket that it was running stays in ``own``. The engine's thread, which no signal
        # interrupts, continues from there.
        self.running = 0
        self.own: Launch[Entry] | None = None  # a bucket that a waiting user thread has launched and not completed

    def place_all(self, waits: bool) -> None:
        """Put each entry of ``placing`` into its slot, or else into ``unsent``, from which the next request is made.

        If a signal handler interrupts this method, ``catch_up`` later places the remaining entries. The caller holds the
        lock.
        """
        observed = self.completion.observed
        for entry in self.placing:
            if not isinstance(entry, PersistentRequest):
                self.unfinished.entries[entry.set_id, entry.name] = entry
                entry.stamp = observed
            self._place(entry, waits)
        self.placing = ()
        self.behind = False

    def catch_up(self) -> None:
        """Finish the work of interrupted calls, and put waiting entries of unnamed calls into slots that became free.

        Also do the work that ``launch`` leaves undone at the end of a period (one pass through the schedule). The
        caller holds the lock.
        """
        replay = self.replay
        for entry in self.placing:
            waiting = (*self.unsent, *self.unnamed.held)
            placed = any(entry is one for one in waiting) or (replay is not None and replay.holds(entry))
            # An interrupted ``place_all`` does not tell which entries it has placed. Each entry is therefore looked
            # for, and placed only if it is found nowhere: if it were placed twice, the coordinator would be asked for
            # the same tensor twice.
            if not placed:
                if not isinstance(entry, PersistentRequest):
                    self.unfinished.entries[entry.set_id, entry.name] = entry
                    entry.stamp = self.completion.observed
                self._place(entry)
        self.placing = ()
        if replay is not None:
            replay.refill()
            if replay.turned:
                self.pauses.turn(replay)
            if self.pauses.due:
                self.say_paused()
            if self.waits_since_s is None and not replay.frozen and replay.waits():
                self.waits_since_s = time.monotonic()
        self.behind = False

    def retire(self, entries: Iterable[PersistentRequest]) -> None:
        """Forget those requests of ``entries`` that are idle. A forgotten request may be started again later."""
        self.lock.refuse("an operation")
        with self.lock:
            self.unfinished.retire(entries)

    def _place(self, entry: Entry, waits: bool = False) -> None:
        """Put ``entry`` into its slot of the schedule, or into ``unsent`` if the schedule has no slot for it now.

        The next request is made from ``unsent``. ``waits`` says that the caller will wait next. Then the engine is not
        woken for a bucket that is ready, because the wait runs the bucket or wakes the engine.
        """
        replay = self.replay
        if replay is None or replay.frozen:
            self.unsent += [entry]
            return
        anonymous = entry.name.startswith(ANONYMOUS)
        held_up = anonymous and self.unnamed.strays and self.unnamed.must_wait(entry)
        if held_up and replay.fits(entry.set_id, entry.spec_bytes):
            self.unnamed.held += [entry]
            return
        offer = replay.offer(entry.set_id, entry.name, anonymous, entry.spec_bytes, entry)
        if offer is Offer.ALIEN:
            self.unsent += [entry]
            if anonymous:
                self.unnamed.strays[entry.set_id, entry.name] = time.monotonic()
            return
        if offer is Offer.CONFLICT:  # other ranks may be in a bucket that this rank will never fill
            self.unsent += [entry]
            self.conflict = True
            self.wake()  # the control thread asks to leave replay, see Lookout
            return
        if isinstance(entry, PersistentRequest):
            slot = replay.slot(entry.set_id, entry.name, entry.spec_bytes)
            if slot is not None:
                entry.replay = replay
                entry.position, entry.slot = slot
        ready = replay.ready()
        if ready and not waits:
            self.work.notify()
        # A ready bucket is launched immediately, unless the engine is in another bucket. The member that is missing in
        # that other bucket may be waiting, outside ddl, for the result of this bucket, which other members have ready
        # as well. So the waiting time must be measured for a ready bucket too, or nobody would notice this deadlock.
        if self.waits_since_s is None and (not ready or self.launches):
            self.waits_since_s = time.monotonic()

    # --- the control thread

    def take_request(self) -> Request | None:
        """Return a Request for all entries that were not yet requested. Return None if there is no such entry.

        Also return None if no request may be sent now: the last request is unanswered, or a freeze has begun and the
        next epoch has not.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            if self.unanswered or self.frozen or not self.unsent:
                return None
            self.unanswered = True
            self._serial += 1
            asks = tuple(entry.ask() for entry in self.unsent)
            self.unsent.clear()
            return Request(self.epoch, self._serial, asks)

    def take_pause(self) -> Paused | None:
        """Return the message Paused if this rank has reached the place where it must stop; otherwise None.

        The message is returned only once.
        """
        if self.pauses.message is None:
            return None
        with self.lock:
            pause, self.pauses.message = self.pauses.message, None
            return None if self.frozen else pause

    def answered(self, serial: int) -> None:
        """Record that the request with number ``serial`` has been answered.

        If it is the newest request, the next request may be sent now.
        """
        with self.lock:
            if serial == self._serial:
                self.unanswered = False

    def take(self, set_id: int, names: Sequence[str]) -> list[Entry | None]:
        """Return the entries of a negotiated bucket in the order of ``names``, and remove them from the tensor queue.

        A persistent request is returned too, but stays in the tensor queue, and its state changes to DECIDED. An entry
        is None if this rank has not submitted that tensor because it has joined.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            self._answered(set_id, names)
            return [self.unfinished.take(set_id, name) for name in names]

    def _answered(self, set_id: int, names: Sequence[str]) -> None:
        """Put the unnamed calls into slots that waited for a decision on the tensors ``names``."""
        for entry in self.unnamed.answered(set_id, names):
            if not self.frozen:  # otherwise ``enter`` places them
                self._place(entry)

    def fill(self, bucket: Bucket) -> bool:
        """Put the negotiated ``bucket`` into its negotiated slot of the schedule that is replayed, and return True.

        Return False if the schedule has no slot for ``bucket``, or if no schedule is replayed now.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            if self.replay is None or self.replay.frozen:
                return False
            entries = self.unfinished.find_all(bucket.set_id, bucket.names)
            if entries is None:
                return False  # this rank has joined, so no schedule runs
            anonymous = bucket.names[0].startswith(ANONYMOUS)
            if not self.replay.fill(bucket, entries, anonymous, entries[0].spec_bytes):
                return False
            self._answered(bucket.set_id, bucket.names)
            if self.waits_since_s is None:
                self.waits_since_s = time.monotonic()
            self.work.notify()
            return True

    def steps(self) -> int:
        """Return how many periods (passes through a schedule) this rank has launched since the job began.

        The periods of all schedules are counted. Any thread may call this at any moment, because it takes no lock.
        """
        steps, replay = self._steps, self.replay
        return steps + (replay.periods if replay is not None else 0)

    def end_replay(self) -> None:
        """End the present replay, if there is one, and count its periods. The caller holds the lock."""
        periods = self.replay.periods if self.replay is not None else 0
        self._steps += periods  # no call before the next line, because ``steps`` takes no lock
        self.replay = self.open = None

    # --- the engine

    def enter(self, epoch: int) -> None:
        """Enter ``epoch``, and put each pending entry into its slot, or else into the next request.

        At this time it is already known which launches of earlier epochs are valid and which are void. The caller holds
        the lock; see Epochs.
        """
        self.epoch = epoch
        self.frozen = False
        self.pauses.begin_epoch()
        self.unanswered = False
        self.unsent = []
        self.conflict = False
        self.waits_since_s = None
        self.unnamed.strays, self.unnamed.held = {}, []
        for entry in sorted(self.unfinished.pending(), key=order_of):
            self._place(entry)
        if self.unsent:
            self.wake()

    def launch(self, runner: int = 0) -> Launch[Entry] | None:
        """Launch the next bucket of the schedule and return it. If that is impossible, return None and launch nothing.

        The caller holds the lock. ``runner`` is the id of the user thread that will run the bucket, or 0 if the engine
        will run it. A user thread can only run a bucket that is resumable.
        """
        # Finish interrupted calls before the launch. ``catch_up`` puts each of their entries into a slot, unless the
        # entry is in its slot already. If the launch came first, the entries that it takes would have left their
        # slots: ``catch_up`` would then put them into slots again, and they would run twice.
        if self.behind:
            self.catch_up()
        replay = self.replay
        if replay is None or not replay.ready():
            return None
        position = replay.current
        if runner and position.resumable is None:
            return None
        number = self.launched + 1
        usual_s = None
        now_s = time.monotonic()
        at_ns = int(now_s * 1e9)
        if self.waits_since_s is not None:
            usual_s = max(now_s - self.waits_since_s, (position.usual_s or 0.0) * 0.9)
        leaves_room = replay.queued or replay.filled_negotiated_slots
        launch, fresh, following, current, paused, turn_at = replay.step(number)
        # Nothing from here on calls a function, so a signal handler cannot raise in between: the bucket is launched
        # completely or not at all. ``own`` and ``running`` belong to the same sequence of stores. If they came later,
        # an interrupt in between would leave a launched bucket that no thread runs, and all peers would wait for it.
        # The exception is the negotiated slot at the end. Only the engine's thread launches negotiated slots, and
        # signal handlers do not run on that thread.
        if fresh:
            replay.filled -= position.missing_when_empty
            position.entries = fresh
            position.missing = position.missing_when_empty
        replay.launched[position.set_id] = launch.place
        replay.next = following
        replay.current = current
        replay.paused = paused
        if turn_at >= 0:
            replay.turned = True
            replay.turn_at = turn_at
            self.behind = True
        self.launched = number
        self.launches[number] = launch
        self.recent[number & self.recent_mask] = (number, launch.place, position.planned, at_ns)
        if usual_s is not None:
            position.usual_s = usual_s
            self.usual_s[position.index] = usual_s
        self.waits_since_s = now_s if replay.filled else None  # for what stays in the slots, the time begins anew
        if leaves_room:
            self.behind = True
        if runner:
            self.own = launch
            self.running = runner
        if launch.bucket is not None:
            replay.take_negotiated_slot(position)
        if self.behind:
            self.catch_up()
        return launch

    def say_paused(self) -> None:
        """Have the control thread report that this rank has reached the place at which it must stop.

        The caller holds the lock.
        """
        self.pauses.build(self.epoch)
        self.wake()

    def is_ready(self) -> bool:
        """Return whether the next bucket of the schedule may be launched now. The caller holds the lock."""
        if self.behind:
            self.catch_up()
        return self.replay is not None and self.replay.ready()

    def drain(self, highest: Mapping[int, int]) -> list[Launch[Entry]]:
        """Return the launches in which this rank must still take part with dummy memory, before it leaves replay.

        ``highest`` contains, by process set, the last place that any rank has launched. The list is empty outside
        replay.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            return self.replay.drain(highest) if self.replay is not None else []

    def put_back(self, launch: Launch[Entry]) -> bool:
        """Make the entries of the void bucket ``launch`` pending again. Return False if the tensor queue is closed."""
        with self.lock:
            del self.launches[launch.number]
            self.unnamed.readmit(launch.entries or (), self.unfinished)
            return not self._closed

    def delivered(self, launch: Launch[Entry]) -> None:
        """Record that a bucket has ended, with or without an error. The names of its entries may then be used again.

        A negotiated slot that was run in a drain is not in ``launches``; this is allowed. No lock is needed, because
        only the thread that runs buckets calls this method, and no other thread removes these names.
        """
        in_flight = self.unfinished.entries
        if in_flight:
            for entry in launch.entries or ():
                key = (entry.set_id, entry.name)
                if in_flight.get(key) is entry:  # else a thread that was interrupted had already delivered it
                    in_flight.pop(key, None)
        self.launches.pop(launch.number, None)  # last: ``close`` returns the entries in flight that are in no launch

    # --- the end

    def close(self, refusal: Callable[[], BaseException]) -> list[Entry]:
        """Accept no more entries. Return the pending entries that are in no launched bucket.

        From now on ``submit`` raises the exception that ``refusal()`` returns.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            if self.refusal is None:
                self.refusal = refusal
            launched = {id(entry) for launch in list(self.launches.values()) for entry in launch.entries or ()}
            in_flight = self.unfinished.pending()
            self._closed = True
            self.unfinished.entries.clear()
            self.unsent.clear()
            self.unnamed.held.clear()
            self.end_replay()
        return [entry for entry in in_flight if id(entry) not in launched]

    def refuse(self, refusal: Callable[[], BaseException]) -> None:
        """Accept no more entries: from now on ``submit`` raises the exception that ``refusal()`` returns.

        Unlike ``close``, this method keeps the pending entries, because other ranks may need them for a bucket that was
        already decided.
        """
        with self.lock:
            if self.refusal is None:
                self.refusal = refusal
            self.open = None

    def disown(self, refusal: Callable[[], BaseException]) -> None:
        """Accept no entries in a forked child process: ``submit`` raises the exception that ``refusal()`` returns.

        The lock is replaced, because a thread that held the old lock in the parent does not exist in the child.
        """
        self.lock = Lock()
        self.work = threading.Condition(self.lock)
        self.placing, self.behind = (), False
        self.refusal = refusal
        self.replay = self.open = None  # the operations of the parent belong to the parent
