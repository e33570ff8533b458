"""The tensor queue: stores the operations that user threads have submitted, until these operations have completed.

User threads put operations into the queue. The control thread and the engine process these operations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from ddlcore.errors import InvalidArgument
from ddlcore.messages.observing import ReplayStatus
from ddlcore.messages.to_coordinator import Frozen, Leave, Paused, Request
from ddlcore.messages.to_rank import Arranged, Bucket, Planned, Resume
from ddlcore.observe.flight import Flight
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.events import NO_EVENTS, Events
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.reentry import Lock, reentrant
from ddlcore.runtime.request import ANONYMOUS, DECIDED, IDLE, PENDING, Entry, PersistentRequest
from ddlcore.runtime.schedule import MOST_KNOWN, Launch, Offer, Replay, Schedule

LEAVE_AFTER_S = 0.005  # or USUAL_TIMES times the bucket's usual wait, whichever is longer
USUAL_TIMES = 4.0
FIRST_USUAL_S = 0.05  # used while the schedule's usual wait is not yet known
STUCK_AFTER_S = 1.0  # replaces LEAVE_AFTER_S while no thread waits here: this rank or a peer is probably slow
WATCH_S = 0.1
GONE = -1  # value of ``running``: a signal handler interrupted the thread that ran a bucket


class TensorQueue:
    """The submitted entries, by process set and name. During replay, this object also fills the slots of the schedule.

    Any thread may submit entries. The control thread sends requests for these entries to the coordinator. The engine
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
        meter: Meter | None = None,
        events: Events = NO_EVENTS,
    ) -> None:
        self.lock = Lock()
        # The engine waits on this condition. All others take the lock itself: a condition is entered by Python code,
        # and a signal handler that raises there would leave it locked (see Lock).
        self.work = threading.Condition(self.lock)
        self.behind = False  # a call was interrupted or left work for ``catch_up``
        self._placing: Sequence[Entry] = ()  # submitted; some may still lack their slot or their place in ``_unsent``
        self._completion = completion
        self._outbox = outbox
        self._wake = outbox.wake  # the control thread, which takes requests
        self._meter = meter if meter is not None else Meter()
        self.events = events
        self._in_flight: dict[tuple[int, str], Entry] = {}  # from submit until taken or delivered
        self._persistent: dict[tuple[int, str], PersistentRequest] = {}  # the persistent requests that were started
        self.flight = flight if flight is not None else Flight(0)
        self._recent, self._recent_mask = self.flight.launches, self.flight.mask
        self._launched = 0
        # Launched, but neither delivered nor put back yet, by number. Single operations on a dict cannot interfere with
        # each other, so the engine removes a launch without the lock.
        self.launches: dict[int, Launch[Entry]] = {}
        self._unsent: list[Entry] = []
        self._unanswered = False  # at most one request is unanswered; entries that are submitted later go into the next
        self._serial = 0
        self._epoch = 0
        # Between Freeze and the next epoch: no request is sent then, and a bucket that completes waits until Drain has
        # decided on it. It may be read without the lock: a bucket that was complete before the freeze is valid, whether
        # it is delivered before the freeze or just after it.
        self.frozen = False
        self._freeze_at = -1  # an epoch that must be frozen as soon as it is entered
        self._anonymous: dict[int, int] = {}
        self._generation = 0  # how often all ranks have joined
        self._refusal: Callable[[], BaseException] | None = None
        self._closed = False
        self._schedules: dict[int, Arranged] = {}
        self._usual_s: dict[int, list[float | None]] = {}  # by schedule and position: the usual time to fill
        self._usual: list[float | None] = []  # the entry of ``_usual_s`` for the schedule that is replayed
        self._turns_ns: list[int] = []  # times at which periods ended, while a search times them
        self._to_pause = False  # a Paused message must still be built:
        self._pause: Paused | None = None  # built, but not sent yet
        self._replay: Replay[Entry] | None = None
        self._open: Replay[Entry] | None = None  # ``_replay`` while its slots may be filled, else None
        self._steps = 0  # periods launched by replays that have ended
        self._conflict = False  # an entry has the name of a slot but another spec
        self._waits_since_s: float | None = None  # since when the oldest unlaunched entry has been in its slot
        # The thread that is running a bucket: the engine's thread or a waiting user thread; 0 if there is none. A
        # signal handler may interrupt a user thread at any moment. That thread then leaves GONE here, a plain store
        # that needs no call, and the bucket that it was running stays in ``own``. The engine's thread, which no signal
        # interrupts, continues from there.
        self.running = 0
        self.own: Launch[Entry] | None = None  # a bucket that a waiting user thread has launched and not completed

    # --- the user's threads

    def submit(self, entries: Sequence[Entry], waits: bool = False) -> None:
        """Submit all entries or none of them.

        Raises InvalidArgument (a ValueError) if a name is already in flight, the job's error after the job has ended,
        and ReentrantCall if the calling thread is inside another call of ddl. If a signal handler raises an exception
        during this call, the caller gets that exception. ``Handle.submitted`` then says whether the entries were
        submitted.

        The entries of an unnamed call have the name ANONYMOUS without a number. They get a number here. ``waits`` says
        that the caller will wait for the operation next. That wait runs a ready bucket or wakes the engine, so this
        method does not wake the engine.
        """
        self.lock.refuse("an operation")
        if self.events.on:
            self.events.submitted(entries, False)
        try:
            with self.lock:
                if self.behind:
                    self.catch_up()
                if self._refusal is not None:
                    raise self._refusal()
                ordinal = self._name(entries)
                for entry in entries:
                    self._require_free(entry)
                handle, set_id = entries[0].handle, entries[0].set_id
                # From here to the store of ``behind`` nothing calls a function, so a signal handler cannot raise in
                # between. Either all of these stores happen or none: a caller that is interrupted can trust
                # ``Handle.submitted``.
                if ordinal >= 0:
                    self._anonymous[set_id] = ordinal
                handle.submitted = True
                self._placing = entries
                self.behind = True
                self._place_all(waits)
                wake = bool(self._unsent) and not self._unanswered and not self.frozen
            if wake:
                self._wake()
        except BaseException:
            self.behind = True  # here, because a second interrupt may raise at the beginning of the next call
            self._interrupted()
            raise

    def _name(self, entries: Sequence[Entry]) -> int:
        """Write the number of an unnamed call into the names of its entries, and return the new count of such calls.

        Unnamed calls are counted per process set. The caller must store the returned count in ``_anonymous``. If the
        call has a name, change nothing and return -1.
        """
        first = entries[0]
        if not first.name.startswith(ANONYMOUS) or first.name[len(ANONYMOUS) :][:1] not in ("", "["):
            return -1
        ordinal = self._anonymous.get(first.set_id, 0)
        for entry in entries:
            entry.name = f"{ANONYMOUS}{self._generation}.{ordinal}{entry.name[len(ANONYMOUS) :]}"
        return ordinal + 1

    def name(self, entries: Sequence[Entry]) -> None:
        """Write the number of an unnamed call into the names of its entries. The caller submits these entries later."""
        self.lock.refuse("an operation")
        with self.lock:
            ordinal = self._name(entries)
            if ordinal >= 0:
                self._anonymous[entries[0].set_id] = ordinal

    def start_request(self, entry: PersistentRequest, address: int, owner: object, waits: bool = False) -> None:
        """Start the persistent request ``entry`` on the tensor at ``address``, whose memory ``owner`` keeps alive.

        ``waits`` has the same meaning as in ``submit``, and the exceptions are the same. This method is called once per
        tensor and step. In replay it only fills the slot of the request.
        """
        self.start_all(((entry, address, owner),), waits)

    def start_all(self, started: Sequence[tuple[PersistentRequest, int, object]], waits: bool = True) -> None:
        """Start several persistent requests. Each item of ``started`` has the arguments of ``start_request``.

        If a request cannot be started, raise its error. The requests before it in ``started`` have then been started,
        and the requests after it have not. ``waits`` says that the caller will wait for the requests next. If a signal
        handler raises an exception, ``PersistentRequest.starts`` says which requests have been started.
        """
        if self.lock.held():
            raise reentrant("an operation")
        if self.events.on:
            self.events.submitted([one[0] for one in started], True)
        refusal: Exception | None = None
        try:
            with self.lock:
                if self.behind:
                    self.catch_up()
                replay = self._open
                observed = self._completion.observed
                for entry, address, owner in started:
                    position = entry.position
                    if entry.replay is not replay or entry.state != IDLE or position.entries[entry.slot] is not None:
                        try:
                            self._start_anew(entry, address, owner, waits)
                        except Exception as error:
                            refusal = error  # the requests before it must still be sent
                            break
                        replay = self._open  # ``_start_anew`` may have closed the replay
                        continue
                    # From here to the increment of ``starts`` nothing calls a function, so a signal handler cannot
                    # raise in between. A request is started completely or not at all, and ``starts`` tells which.
                    entry.stamp = observed
                    entry.state = PENDING
                    entry.error = None
                    buffer = entry.source
                    buffer.address = address
                    buffer.owner = owner
                    position.entries[entry.slot] = entry
                    position.missing -= 1
                    replay.filled += 1
                    entry.starts += 1
                    ready = position.missing == 0 and position is replay.current
                    if ready and not waits:
                        self.work.notify()
                    if self._waits_since_s is None and (not ready or self.launches):  # see ``_place``
                        self._waits_since_s = time.monotonic()
                wake = self.behind or (bool(self._unsent) and not self._unanswered and not self.frozen)
            if wake:
                self._wake()
        except BaseException:
            self.behind = True  # here, because a second interrupt may raise at the beginning of the next call
            self._interrupted()
            raise
        if refusal is not None:
            raise refusal

    def _start_anew(self, entry: PersistentRequest, address: int, owner: object, waits: bool) -> None:
        """Start a persistent request in the slow way, because its slot in the present replay is not known or not free.

        The request may also have no slot. Raises an error if the job has ended, or if the name is in flight.
        """
        if self._refusal is not None:
            raise self._refusal()
        self._require_free(entry)
        self._persistent[entry.set_id, entry.name] = entry
        placing = (entry,)
        entry.stamp = self._completion.observed
        entry.state = PENDING
        entry.error = None
        entry.source.address = address
        entry.source.owner = owner
        entry.starts += 1
        self._placing = placing
        self.behind = True
        self._place_all(waits)

    def _place_all(self, waits: bool) -> None:
        """Put each entry of ``_placing`` into its slot, or else into ``_unsent``, from which the next request is made.

        If a signal handler interrupts this method, ``catch_up`` later places the remaining entries.
        """
        observed = self._completion.observed
        for entry in self._placing:
            if not isinstance(entry, PersistentRequest):
                self._in_flight[entry.set_id, entry.name] = entry
                entry.stamp = observed
            self._place(entry, waits)
        self._placing = ()
        self.behind = False

    def catch_up(self) -> None:
        """Finish the work of interrupted calls, and put waiting entries of unnamed calls into slots that became free.

        Also do the work that ``launch`` leaves undone at the end of a period (one pass through the schedule). The
        caller holds the lock.
        """
        replay = self._replay
        for entry in self._placing:
            placed = any(entry is one for one in self._unsent) or (replay is not None and replay.holds(entry))
            # An interrupted ``_place_all`` does not tell which entries it has placed. Each entry is therefore looked
            # for, and placed only if it is found nowhere: if it were placed twice, the coordinator would be asked for
            # the same tensor twice.
            if not placed:
                if not isinstance(entry, PersistentRequest):
                    self._in_flight[entry.set_id, entry.name] = entry
                    entry.stamp = self._completion.observed
                self._place(entry)
        self._placing = ()
        if replay is not None:
            replay.refill()
            if replay.turned:
                self._turn(replay)
            if self._to_pause:
                self._say_paused()
            if self._waits_since_s is None and not replay.frozen and replay.waits():
                self._waits_since_s = time.monotonic()
        self.behind = False

    def _interrupted(self) -> None:
        """Wake the control thread, which finishes the work of a call that an exception has ended (see ``behind``)."""
        if self._refusal is None:  # otherwise this may be a forked child, which has no control thread
            self._wake()

    def retire(self, entries: Iterable[PersistentRequest]) -> None:
        """Forget those requests of ``entries`` that are idle. A forgotten request may be started again later."""
        self.lock.refuse("an operation")
        with self.lock:
            for entry in entries:
                key = (entry.set_id, entry.name)
                if entry.state == IDLE and self._persistent.get(key) is entry:
                    entry.replay = entry
                    del self._persistent[key]

    def forget(self, set_id: int) -> None:
        """Forget the idle persistent requests of process set ``set_id``, which has been removed."""
        with self.lock:
            self._persistent = {
                key: one for key, one in self._persistent.items() if key[0] != set_id or one.state != IDLE
            }

    def _require_free(self, entry: Entry) -> None:
        key = (entry.set_id, entry.name)
        other = self._persistent.get(key)
        if key in self._in_flight or (other is not None and other.state != IDLE):
            raise InvalidArgument(
                f"{entry.name!r} is already in flight on this rank; wait for its handle first, "
                "or give each call a name of its own"
            )
        if other is not None and other is not entry:  # a request for another tensor takes over the name
            other.replay = other
            del self._persistent[key]

    def _place(self, entry: Entry, waits: bool = False) -> None:
        """Put ``entry`` into its slot of the schedule, or into ``_unsent`` if the schedule has no slot for it now.

        The next request is made from ``_unsent``. ``waits`` says that the caller will wait next. Then the engine is not
        woken for a bucket that is ready, because the wait runs the bucket or wakes the engine.
        """
        replay = self._replay
        if replay is None or replay.frozen:
            self._unsent += [entry]
            return
        anonymous = entry.name.startswith(ANONYMOUS)
        offer = replay.offer(entry.set_id, entry.name, anonymous, entry.spec_bytes, entry)
        if offer is Offer.ALIEN:
            self._unsent += [entry]
            return
        if offer is Offer.CONFLICT:  # other ranks may be in a bucket that this rank will never fill
            self._unsent += [entry]
            self._conflict = True
            self.work.notify()
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
        if self._waits_since_s is None and (not ready or self.launches):
            self._waits_since_s = time.monotonic()

    def check_stall(self, since_s: float) -> float:
        """Ask the coordinator to end the replay if the calling user thread would otherwise probably wait forever.

        The user thread has waited since ``since_s``. The replay is ended under three conditions: tensors have waited in
        slots for longer than usual, the next bucket is not ready, and no bucket is running. Return a number of seconds:
        the caller should call this method again after at most this time.
        """
        if self.lock.held():
            return WATCH_S  # a finalizer polls while its thread is in another call
        with self.lock:
            if self.behind:
                self.catch_up()
            replay = self._open
            if replay is None or self._waits_since_s is None or self.launches or replay.ready() or replay.paused:
                return WATCH_S  # a paused rank waits for its peers; ``stuck`` gives them more time
            usual_s = replay.current.usual_s
            patience_s = max(LEAVE_AFTER_S, USUAL_TIMES * (FIRST_USUAL_S if usual_s is None else usual_s))
            left_s = max(since_s, self._waits_since_s) + patience_s - time.monotonic()
            if left_s > 0:
                return left_s
            self.leave(self._epoch)  # first, so that Ctrl-C between the two lines cannot lose the message
            self.stopped_waiting()
            return WATCH_S

    def leave(self, epoch: int, slow: bool = False) -> None:
        """Ask the coordinator to end the replay of ``epoch``. Any thread may call this.

        ``slow`` says that the cause may be a slow rank, so the schedule may still fit.
        """
        self._meter.divergences += 1
        self.flight.note("leave", epoch=epoch, slow=slow)
        self._outbox.say(Leave(epoch, "a bucket waits for tensors that do not come", slow))

    def anonymous(self, set_id: int) -> str:
        """Count one more unnamed call in the process set, and return a name that contains the number of this call.

        All kinds of operations share one count. So the coordinator can see that two ranks ask for different operations.
        The public operations do not call this method, because ``submit`` numbers their calls. So a call is not counted
        if a signal handler prevents its submission.
        """
        with self.lock:
            ordinal = self._anonymous.get(set_id, 0)
            self._anonymous[set_id] = ordinal + 1
            return f"{ANONYMOUS}{self._generation}.{ordinal}"

    def next_generation(self) -> None:
        """Number unnamed calls from 0 again, because all ranks have joined.

        Before they joined, some ranks had made fewer calls than others. So the old counts differ between ranks.
        """
        with self.lock:
            self._generation += 1
            self._anonymous.clear()

    # --- the control thread

    def take_request(self) -> Request | None:
        """Return a Request for all entries that were not yet requested. Return None if there is no such entry.

        Also return None if no request may be sent now: the last request is unanswered, or a freeze has begun and the
        next epoch has not.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            if self._unanswered or self.frozen or not self._unsent:
                return None
            self._unanswered = True
            self._serial += 1
            asks = tuple(entry.ask() for entry in self._unsent)
            self._unsent.clear()
            return Request(self._epoch, self._serial, asks)

    def take_pause(self) -> Paused | None:
        """Return the message Paused if this rank has reached the place where it must stop; otherwise None.

        The message is returned only once.
        """
        if self._pause is None:
            return None
        with self.lock:
            pause, self._pause = self._pause, None
            return None if self.frozen else pause

    def answered(self, serial: int) -> None:
        """Record that the request with number ``serial`` has been answered.

        If it is the newest request, the next request may be sent now.
        """
        with self.lock:
            if serial == self._serial:
                self._unanswered = False

    def take(self, set_id: int, names: Iterable[str]) -> list[Entry | None]:
        """Return the entries of a negotiated bucket in the order of ``names``, and remove them from the tensor queue.

        A persistent request is returned too, but stays in the tensor queue, and its state changes to DECIDED. An entry
        is None if this rank has not submitted that tensor because it has joined.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            return [self._take(set_id, name) for name in names]

    def _take(self, set_id: int, name: str) -> Entry | None:
        entry = self._in_flight.pop((set_id, name), None)
        if entry is None:
            entry = self._find(set_id, name)
            if isinstance(entry, PersistentRequest):
                entry.state = DECIDED
        return entry

    def _find(self, set_id: int, name: str) -> Entry | None:
        entry = self._in_flight.get((set_id, name))
        if entry is None:
            request = self._persistent.get((set_id, name))
            entry = request if request is not None and request.state == PENDING else None
        return entry

    def learn(self, arranged: Arranged) -> None:
        """Store the schedule ``arranged``, so that a message Resume may name it from now on.

        ``arranged`` replaces an older schedule with the same number.
        """
        self._usual_s.pop(arranged.schedule, None)
        self._schedules[arranged.schedule] = arranged

    def planned(self, schedule: int) -> Sequence[Planned]:
        """Return the buckets of the schedule with the number ``schedule``, which ``learn`` has stored."""
        return self._schedules[schedule].buckets

    def fill(self, bucket: Bucket) -> bool:
        """Put the negotiated ``bucket`` into its negotiated slot of the schedule that is replayed, and return True.

        Return False if the schedule has no slot for ``bucket``, or if no schedule is replayed now.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            if self._replay is None or self._replay.frozen:
                return False
            found = [self._find(bucket.set_id, name) for name in bucket.names]
            entries = [entry for entry in found if entry is not None]
            if len(entries) < len(found):
                return False  # this rank has joined, so no schedule runs
            anonymous = bucket.names[0].startswith(ANONYMOUS)
            if not self._replay.fill(bucket, entries, anonymous, entries[0].spec_bytes):
                return False
            if self._waits_since_s is None:
                self._waits_since_s = time.monotonic()
            self.work.notify()
            return True

    def freeze(self, epoch: int) -> Frozen | None:
        """Stop all launches of ``epoch``, and return the message Frozen, which says how far this rank has launched.

        Return None if this rank has not entered ``epoch`` yet. In that case ``resume`` later returns the message.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            # The control thread receives Freeze, but the engine enters an epoch only after the buckets that were
            # decided before it. So Freeze may come too early. It is kept, and ``resume`` answers it: an answer for the
            # old epoch would be dropped by the coordinator, which would then wait for this rank without end.
            if epoch != self._epoch:
                self._freeze_at = epoch
                return None
            return self._freeze()

    def _freeze(self) -> Frozen:
        # Launches and this run under the same lock. So each launch either comes before the freeze, and Frozen reports
        # it, or does not happen. Drain relies on that: a launch that Frozen does not report would wait in a collective
        # that the other ranks never enter.
        self.frozen = True
        self._open = None
        return Frozen(self._epoch, self._replay.freeze() if self._replay is not None else ())

    def steps(self) -> int:
        """Return how many periods (passes through a schedule) this rank has launched since the job began.

        The periods of all schedules are counted. Any thread may call this at any moment, because it takes no lock.
        """
        steps, replay = self._steps, self._replay
        return steps + (replay.periods if replay is not None else 0)

    def _end_replay(self) -> None:
        """End the present replay, if there is one, and add the number of its periods to ``_steps``."""
        periods = self._replay.periods if self._replay is not None else 0
        self._steps += periods  # no call before the next line, because ``steps`` takes no lock
        self._replay = self._open = None

    def stuck(self) -> int | None:
        """Return the epoch that this rank should leave, because an entry has been in a slot for too long; else None.

        Code outside ddl may be waiting for the result of such an entry. Or a peer may be waiting for it, while this
        rank's engine is still in an earlier collective. The epoch is returned only once, because the caller then asks
        to leave it.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            if self.is_ready() or self.running == GONE:  # its thread was interrupted by a signal
                self.work.notify()
            if self._open is None or self._waits_since_s is None:
                return None
            usual_s = max((position.usual_s or 0.0 for position in self._open.positions), default=0.0)
            if self._open.paused and len(self._turns_ns) > 1:  # peers may need the rest of a period to get here
                usual_s = max(usual_s, (self._turns_ns[-1] - self._turns_ns[-2]) * 1e-9)
            if time.monotonic() - self._waits_since_s < max(STUCK_AFTER_S, USUAL_TIMES * usual_s):
                return None
            return self.stopped_waiting()

    def under_way(self) -> set[int]:
        """Return the numbers of those launches that were neither delivered nor found to be void."""
        with self.lock:
            return set(self.launches)

    def pending(self) -> list[str]:
        """Return the names of this rank's operations that have not ended."""
        return [name for name, _ in self.pending_in_sets()]

    def pending_in_sets(self) -> list[tuple[str, int]]:
        """Return the names of this rank's operations that have not ended, each with its process set."""
        with self.lock:
            busy = [entry for entry in self._persistent.values() if entry.state != IDLE]
            return [(entry.name, entry.set_id) for entry in (*self._in_flight.values(), *busy)]

    def replay_status(self) -> ReplayStatus | None:
        """Return the place in the schedule that this rank has reached.

        Return None if this rank replays no schedule, or if its replay has paused.
        """
        with self.lock:
            replay = self._open
            if replay is None or (replay.paused and not self.launches):
                return None
            for first in list(self.launches.values())[:1]:
                return ReplayStatus(self._epoch, first.place, True, first.planned.set_id, first.planned.names)
            planned, entries = replay.current.planned, replay.current.entries
            missing = tuple(name for name, entry in zip(planned.names, entries) if entry is None)
            return ReplayStatus(self._epoch, replay.place, False, planned.set_id, planned.names, missing)

    # --- the engine

    def resume(self, message: Resume, sets: Mapping[int, Sequence[int]], rank: int) -> Frozen | None:
        """Begin to replay the schedule that ``message`` names. The engine calls this.

        Each pending entry is put into its slot, or else into the next request. ``sets`` contains the ranks of each
        process set, and ``rank`` is this rank. If the message Freeze for this epoch arrived on this rank before the
        epoch began, return the answer to Freeze; otherwise return None.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            arranged = self._schedules.pop(message.schedule)
            self._schedules[message.schedule] = arranged
            while len(self._schedules) > MOST_KNOWN:
                unused = next(iter(self._schedules))  # the one whose last Resume is longest ago
                del self._schedules[unused]
                self._usual_s.pop(unused, None)
            schedule = Schedule(arranged, sets, rank)
            self._end_replay()
            self._replay = Replay(schedule, message.start, dict(message.after), message.until)
            self._usual = self._usual_s.setdefault(message.schedule, [None] * len(schedule.buckets))
            for position, seconds in zip(self._replay.positions, self._usual):
                position.usual_s = seconds
            self._open = self._replay if self._refusal is None else None
            self._turns_ns = []
            self._enter(message.epoch)
            if self._replay.paused:  # all buckets of this rank had run before
                self._say_paused()
            return self._freeze() if self._freeze_at == message.epoch else None

    def discover(self, epoch: int) -> None:
        """Return from replay to negotiation, in the new ``epoch``. All pending entries go into the next request."""
        with self.lock:
            if self.behind:
                self.catch_up()
            self._end_replay()
            self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        """Enter ``epoch``, and put each pending entry into its slot, or else into the next request.

        At this time it is already known which launches of earlier epochs are valid and which are void.
        """
        self._epoch = epoch
        self.frozen = False
        self._pause = None
        self._to_pause = False
        self._unanswered = False
        self._unsent = []
        self._conflict = False
        self._waits_since_s = None
        busy = [entry for entry in self._persistent.values() if entry.state == PENDING]
        for entry in sorted([*self._in_flight.values(), *busy], key=_ordinal):
            self._place(entry)
        if self._unsent:
            self._wake()

    def launch(
        self,
        runner: int = 0,
        alone: PersistentRequest | None = None,
        address: int = 0,
        owner: object = None,
        at_ns: int = 0,
    ) -> Launch[Entry] | None:
        """Launch the next bucket of the schedule and return it. If that is impossible, return None and change nothing.

        The caller holds the lock. ``runner`` is the id of the user thread that will run the bucket, or 0 if the engine
        will run it. A user thread can only run a bucket that is resumable. If ``alone`` is None, the bucket must be
        ready. Otherwise the idle request ``alone`` must be the only entry of the next bucket. Then this method both
        starts the request on the tensor at ``address``, whose memory ``owner`` keeps alive, and launches the bucket.
        ``at_ns`` is the present time; it is only used with ``alone``.
        """
        # Finish interrupted calls before the launch. ``catch_up`` puts each of their entries into a slot, unless the
        # entry is in its slot already. If the launch came first, the entries that it takes would have left their
        # slots: ``catch_up`` would then put them into slots again, and they would run twice.
        if self.behind:
            self.catch_up()
        replay = self._replay
        if replay is None:
            return None
        position = replay.current
        if alone is None:
            if not replay.ready():
                return None
        elif (
            alone.position is not position
            or alone.replay is not self._open
            or alone.state != IDLE
            or position.missing != 1
            or len(position.entries) != 1
        ):
            return None
        if runner and not getattr(position.run, "resumable", False):
            return None
        number = self._launched + 1
        usual_s = None
        waits_since_s: float | None = None  # since when what stays in the slots waits: its time begins anew
        now_s = 0.0
        leaves_room = False
        observed = self._completion.observed
        if alone is None:
            now_s = time.monotonic()
            at_ns = int(now_s * 1e9)
            if self._waits_since_s is not None:
                usual_s = max(now_s - self._waits_since_s, (position.usual_s or 0.0) * 0.9)
            leaves_room = replay.queued or replay.filled_negotiated_slots
        elif replay.filled or (replay.negotiated_slots and replay.filled_negotiated_slots):  # mostly neither: no call
            waits_since_s = time.monotonic()
        launch, fresh, following, current, paused, turn_at = replay.step(number, alone)
        # Nothing from here on calls a function, so a signal handler cannot raise in between: the bucket is launched
        # completely or not at all. ``own`` and ``running`` belong to the same sequence of stores. If they came later,
        # an interrupt in between would leave a launched bucket that no thread runs, and all peers would wait for it.
        # The exception is the negotiated slot at the end. Only the engine's thread launches negotiated slots, and
        # signal handlers do not run on that thread.
        if alone is not None:
            alone.stamp = observed
            alone.state = PENDING
            alone.error = None
            alone.source.address = address
            alone.source.owner = owner
            alone.starts += 1
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
        self._launched = number
        self.launches[number] = launch
        self._recent[number & self._recent_mask] = (number, launch.place, position.planned, at_ns)
        if usual_s is not None:
            position.usual_s = usual_s
            self._usual[position.index] = usual_s
        if alone is None and replay.filled:
            waits_since_s = now_s
        self._waits_since_s = waits_since_s
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

    def _turn(self, replay: Replay[Entry]) -> None:
        """Record the present time as the end of a period (one pass through the schedule) on this rank.

        This is called only while a search for better settings measures the periods.
        """
        turns_ns = [*self._turns_ns, now_ns()]
        self._turns_ns = turns_ns
        self._to_pause = replay.paused
        replay.turned = False

    def _say_paused(self) -> None:
        turns = self._turns_ns
        pause = Paused(self._epoch, tuple(after - before for before, after in pairwise(turns)))
        self._pause = pause
        self._to_pause = False
        self._wake()

    def is_ready(self) -> bool:
        """Return whether the next bucket of the schedule may be launched now. The caller holds the lock."""
        if self.behind:
            self.catch_up()
        return self._replay is not None and self._replay.ready()

    @property
    def conflict(self) -> bool:
        """Return True if the schedule cannot continue: an entry has the name of a slot but another spec.

        The caller holds the lock.
        """
        return self._conflict and self._open is not None

    def stopped_waiting(self) -> int:
        """Record that this rank now asks to leave replay, and return the epoch that it leaves.

        After this, the rank does not ask a second time for the same reason. The caller holds the lock.
        """
        self._waits_since_s = None
        self._conflict = False
        return self._epoch

    def drain(self, highest: Mapping[int, int]) -> list[Launch[Entry]]:
        """Return the launches in which this rank must still take part with dummy memory, before it leaves replay.

        ``highest`` contains, by process set, the last place that any rank has launched. The list is empty outside
        replay.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            return self._replay.drain(highest) if self._replay is not None else []

    def put_back(self, launch: Launch[Entry]) -> bool:
        """Make the entries of the void bucket ``launch`` pending again. Return False if the tensor queue is closed."""
        with self.lock:
            del self.launches[launch.number]
            return not self._closed

    def delivered(self, launch: Launch[Entry]) -> None:
        """Record that a bucket has ended, with or without an error. The names of its entries may then be used again.

        A negotiated slot that was run in a drain is not in ``launches``; this is allowed. No lock is needed, because
        only the thread that runs buckets calls this method, and no other thread removes these names.
        """
        in_flight = self._in_flight
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
            if self._refusal is None:
                self._refusal = refusal
            launched = {id(entry) for launch in list(self.launches.values()) for entry in launch.entries or ()}
            in_flight = [
                *self._in_flight.values(),
                *(entry for entry in self._persistent.values() if entry.state == PENDING),
            ]
            self._closed = True
            self._in_flight.clear()
            self._unsent.clear()
            self._end_replay()
            return [entry for entry in in_flight if id(entry) not in launched]

    def refuse(self, refusal: Callable[[], BaseException]) -> None:
        """Accept no more entries: from now on ``submit`` raises the exception that ``refusal()`` returns.

        Unlike ``close``, this method keeps the pending entries, because other ranks may need them for a bucket that was
        already decided.
        """
        with self.lock:
            if self._refusal is None:
                self._refusal = refusal
            self._open = None

    def disown(self, refusal: Callable[[], BaseException]) -> None:
        """Accept no entries in a forked child process: ``submit`` raises the exception that ``refusal()`` returns.

        The lock is replaced, because a thread that held the old lock in the parent does not exist in the child.
        """
        self.lock = Lock()
        self.work = threading.Condition(self.lock)
        self._placing, self.behind = (), False
        self._refusal = refusal
        self._replay = self._open = None  # the operations of the parent belong to the parent


def _ordinal(entry: Entry) -> int:
    """Return the sort key for pending entries: the number of the unnamed call, or -1 if ``entry`` has a name.

    So the entries of unnamed calls get their slots in the order of these calls.
    """
    return int(entry.name.rpartition(".")[2].partition("[")[0]) if entry.name.startswith(ANONYMOUS) else -1
