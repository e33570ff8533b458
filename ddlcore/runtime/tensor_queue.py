"""The one boundary between the user's threads and ddl's: what was asked for and has not come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ddlcore.errors import InvalidArgument
from ddlcore.messages import Arranged, Bucket, Frozen, Paused, Planned, ReplayStatus, Request, Resume
from ddlcore.observe.flight import Flight
from ddlcore.runtime.handle import Completion
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.reentry import Lock, reentrant
from ddlcore.runtime.request import ANONYMOUS, DECIDED, IDLE, PENDING, Entry, PersistentRequest
from ddlcore.runtime.schedule import MOST_KNOWN, Launch, Offer, Replay, Schedule

__all__ = ["GONE", "TensorQueue"]

LEAVE_AFTER_S = 0.005  # or so many times what the bucket usually waits, whichever is more
USUAL_TIMES = 4.0
FIRST_USUAL_S = 0.05  # before anything is known of a schedule's usual wait
STUCK_AFTER_S = 1.0  # the same while nobody waits here: this rank, or a peer, is most likely just slow
WATCH_S = 0.1
GONE = -1  # in place of the thread that runs a bucket: a signal handler has called it away


class TensorQueue:
    """Entries by (process set, name), and the schedule they fill while one is replayed.

    Any thread may submit; the control thread takes requests out; the engine launches. One lock
    covers all: freezing and launching exclude each other.

    A signal handler may raise in the middle of any call that a user's thread makes here. CPython runs handlers where a
    function begins, behind a call, and where a loop turns; nowhere else. So each call first does all that calls
    something, then changes the state by a run of plain stores, to which at most one call of C may belong, as the last;
    and what is still to be done behind that, it notes first: ``behind``. Whoever takes the lock next, on whatever
    thread, does that (``catch_up``), and the control thread looks once a second.
    """

    def __init__(self, completion: Completion, wake: Callable[[], None], flight: Flight | None = None) -> None:
        self.lock = Lock()
        # What the engine waits for. Others take the lock itself, see Lock.
        self.work = threading.Condition(self.lock)
        self.behind = False  # a call was interrupted, or has left something to ``catch_up``
        self._placing: Sequence[Entry] = ()  # submitted, and not all of them in their slots, or with those unsent
        self._completion = completion
        completion.check_stall = self.check_stall
        self._wake = wake
        self._in_flight: dict[tuple[int, str], Entry] = {}  # from submit until taken or delivered
        self._persistent: dict[tuple[int, str], PersistentRequest] = {}  # those that have been started by ``again``
        self.flight = flight if flight is not None else Flight(0)
        self._recent, self._recent_mask = self.flight.launches, self.flight.mask
        self._launched = 0
        self._launches: list[Launch[Entry]] = []  # launched, and neither delivered nor put back
        self._unsent: list[Entry] = []
        self._unanswered = False  # one request is unanswered at a time; what comes later joins the next
        self._serial = 0
        self._epoch = 0
        self._moving = False  # between Freeze and the next epoch nothing is asked
        self._freeze_at = -1  # an epoch that is to be frozen as soon as it is entered
        self._anonymous: dict[int, int] = {}
        self._generation = 0  # how many times all ranks have joined
        self._refusal: Callable[[], BaseException] | None = None
        self._closed = False
        self._schedules: dict[int, Arranged] = {}
        self._usual_s: dict[int, list[float | None]] = {}  # by schedule and position: how long it fills
        self._usual: list[float | None] = []  # of the schedule that is replayed
        self._turns_ns: list[int] = []  # when periods ended, while these are timed
        self._to_pause = False  # it is still to be worked out what is to be said:
        self._pause: Paused | None = None  # still to be said
        self._replay: Replay[Entry] | None = None
        self._open: Replay[Entry] | None = None  # the same, while its slots may be filled
        self._steps = 0  # of replays that are over
        self._conflict = False  # an entry has the name of a slot, and another spec
        self._waits_since_s: float | None = None  # the oldest entry that stands in a slot unlaunched
        self.leave: Callable[[int], None] = lambda epoch: None  # asks the coordinator to leave this epoch
        # Which thread, the engine's or a waiting user thread, is in the middle of something; 0: none. The latter may be
        # called away by a signal handler, at any moment. It leaves GONE here, which needs no call, and in ``own`` what
        # it was in; the engine's thread, which no signal calls away, goes on from there.
        self.running = 0
        self.own: Launch[Entry] | None = None  # launched by a waiting user thread, and not complete

    # --- the user's threads

    def submit(self, entries: Sequence[Entry], waits: bool = False) -> None:
        """Takes all of them, or none: ValueError for a name in flight; the job's error once it is over.

        So it does where a signal handler raises meanwhile; ``Handle.submitted`` tells which. Names that are only
        ANONYMOUS get their number here.
        ReentrantCall, where this thread is in the middle of another call. ``waits``: the caller's next step is to wait,
        so it will run what is ready itself or wake the engine.
        """
        self.lock.refuse("an operation")
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
                # Submitted, or not: nothing is called before ``behind``.
                if ordinal >= 0:
                    self._anonymous[set_id] = ordinal
                handle.submitted = True
                self._placing = entries
                self.behind = True
                self._place_all(waits)
                wake = bool(self._unsent) and not self._unanswered and not self._moving
            if wake:
                self._wake()
        except BaseException:
            self._interrupted()
            raise

    def _name(self, entries: Sequence[Entry]) -> int:
        """Numbers a call without a name. How many of its process set have been numbered then; -1 where it has a name."""
        first = entries[0]
        if not first.name.startswith(ANONYMOUS) or first.name[len(ANONYMOUS) :][:1] not in ("", "["):
            return -1
        ordinal = self._anonymous.get(first.set_id, 0)
        for entry in entries:
            entry.name = f"{ANONYMOUS}{self._generation}.{ordinal}{entry.name[len(ANONYMOUS) :]}"
        return ordinal + 1

    def name(self, entries: Sequence[Entry]) -> None:
        """Numbers a call without a name now, for a caller who submits it later."""
        self.lock.refuse("an operation")
        with self.lock:
            ordinal = self._name(entries)
            if ordinal >= 0:
                self._anonymous[entries[0].set_id] = ordinal

    def start_request(self, entry: PersistentRequest, address: int, owner: object, waits: bool = False) -> None:
        """Starts a persistent request on the tensor at ``address``, which ``owner`` keeps alive. The rest as ``submit``.

        This runs once a tensor and step. In replay it does no more than fill the slot.
        """
        self.start_all(((entry, address, owner),), waits)

    def start_all(self, started: Sequence[tuple[PersistentRequest, int, object]], waits: bool = True) -> None:
        """``again`` for each (entry, address, owner). Where one is refused, those before it have been started.

        Where a signal handler raises, ``PersistentRequest.starts`` tells which have been.
        """
        if self.lock.held():
            raise reentrant("an operation")
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
                            refusal = error  # those before it still want to be asked for
                            break
                        replay = self._open  # which that may have closed
                        continue
                    # Started, or not: nothing is called before ``starts``.
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
                    if self._waits_since_s is None and (not ready or self._launches):  # see ``_place``
                        self._waits_since_s = time.monotonic()
                wake = self.behind or (bool(self._unsent) and not self._unanswered and not self._moving)
            if wake:
                self._wake()
        except BaseException:
            self._interrupted()
            raise
        if refusal is not None:
            raise refusal

    def _start_anew(self, entry: PersistentRequest, address: int, owner: object, waits: bool) -> None:
        """Starts one that has no slot in what is replayed now."""
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
        """Where what was submitted belongs. Interrupted, ``catch_up`` goes on with it."""
        observed = self._completion.observed
        for entry in self._placing:
            if not isinstance(entry, PersistentRequest):
                self._in_flight[entry.set_id, entry.name] = entry
                entry.stamp = observed
            self._place(entry, waits)
        self._placing = ()
        self.behind = False

    def catch_up(self) -> None:
        """Does what interrupted calls have left undone, and the anonymous calls that a launch makes room for. Lock held."""
        replay = self._replay
        for entry in self._placing:
            placed = any(entry is one for one in self._unsent) or (replay is not None and replay.holds(entry))
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
        """A call ends with an error: the control thread looks after what it may have left."""
        self.behind = True  # before all else: who is interrupted here, too, has said so
        if self._refusal is None:  # else this may be a forked child, which has no control thread
            self._wake()

    def launch_alone(
        self, entry: PersistentRequest, address: int, owner: object, now_ns: int = 0, runner: int = 0
    ) -> Launch[Entry] | None:
        """``again`` and ``launch`` in one, for an entry that is the next bucket all by itself. The caller holds the lock.

        None, and nothing has changed, where it is not, or where that bucket cannot be run by the caller.
        """
        replay, position = self._open, entry.position
        if (
            entry.replay is not replay
            or position is not replay.current
            or entry.state != IDLE
            or position.missing != 1
            or len(position.entries) != 1
            or not getattr(position.run, "resumable", False)
        ):
            return None
        observed = self._completion.observed
        since_s = self._waits_since_s
        if since_s is not None:  # others stand behind it: their time begins anew, as with any launch
            since_s = time.monotonic() if replay.waits() else None
        number = self._launched + 1
        launch: Launch[Entry]
        launch, _, following, current, paused, turn_at = replay.step(number, entry)
        # Launched, or not: nothing is called from here on.
        entry.stamp = observed
        entry.state = PENDING
        entry.error = None
        entry.source.address = address
        entry.source.owner = owner
        entry.starts += 1
        replay.launched[position.set_id] = launch.place
        replay.next = following
        replay.current = current
        replay.paused = paused
        if turn_at >= 0:
            replay.turned = True
            replay.turn_at = turn_at
            self.behind = True
        self._launched = number
        self._launches += [launch]
        self._recent[number & self._recent_mask] = (number, launch.place, position.planned, now_ns)
        self._waits_since_s = since_s
        if runner:
            self.own = launch
            self.running = runner
        return launch

    def land_alone(self, launch: Launch[Entry], entry: PersistentRequest, meter: Meter, took_ns: int) -> bool:
        """As ``delivered`` for what ``launch_alone`` gave, and counts it; False, where Drain must decide first. Lock held."""
        if self._moving:
            return False
        position = launch.position
        kind = position.planned.kind
        launches = [one for one in self._launches if one is not launch]
        # Landed, or not: nothing is called from here on.
        self._launches = launches
        entry.index = -1
        entry.source.owner = None
        entry.state = IDLE
        self.own = None
        self.running = 0
        meter.replayed += 1
        meter.nbytes[kind] += position.nbytes
        meter.busy_ns += took_ns
        meter.idle_ns -= took_ns  # the engine's thread takes it for idle
        meter.alone_ns += took_ns
        return True

    def retire(self, entries: Iterable[PersistentRequest]) -> None:
        """Forgets those that are idle; they may be started again all the same."""
        self.lock.refuse("an operation")
        with self.lock:
            for entry in entries:
                key = (entry.set_id, entry.name)
                if entry.state == IDLE and self._persistent.get(key) is entry:
                    entry.replay = entry
                    del self._persistent[key]

    def forget(self, set_id: int) -> None:
        """A process set is gone: its persistent requests will not come again."""
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
        if other is not None and other is not entry:  # another tensor takes the name over
            other.replay = other
            del self._persistent[key]

    def _place(self, entry: Entry, waits: bool = False) -> None:
        """Into its slot of the schedule, or to the coordinator."""
        replay = self._replay
        if replay is None or replay.frozen:
            self._unsent += [entry]
            return
        anonymous = entry.name.startswith(ANONYMOUS)
        offer = replay.offer(entry.set_id, entry.name, anonymous, entry.spec_bytes, entry)
        if offer is Offer.ALIEN:
            self._unsent += [entry]
            return
        if offer is Offer.CONFLICT:  # the others may sit in a bucket that this rank will never fill
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
        # A bucket that is ready is launched at once, unless the engine sits in another. That one's missing member may
        # wait, outside ddl, for just this bucket, which other members have too: then it must not stand here unwatched.
        if self._waits_since_s is None and (not ready or self._launches):
            self._waits_since_s = time.monotonic()

    def check_stall(self, since_s: float) -> float:
        """For a user's thread that waits since ``since_s``: asks to leave if what it waits for cannot come in replay.

        That is when a bucket holds some of its tensors for longer than usual and the engine has nothing to
        do. Returns how many seconds it may take till the next call.
        """
        if self.lock.held():
            return WATCH_S  # a finalizer polls in the middle of another call
        with self.lock:
            if self.behind:
                self.catch_up()
            replay = self._open
            if replay is None or self._waits_since_s is None or self._launches or replay.ready() or replay.paused:
                return WATCH_S  # who has paused waits for its peers, which ``stuck`` gives more time
            usual_s = replay.current.usual_s
            patience_s = max(LEAVE_AFTER_S, USUAL_TIMES * (FIRST_USUAL_S if usual_s is None else usual_s))
            left_s = max(since_s, self._waits_since_s) + patience_s - time.monotonic()
            if left_s > 0:
                return left_s
            self.leave(self._epoch)  # first, lest Ctrl-C come in between
            self.stopped_waiting()
            return WATCH_S

    def anonymous(self, set_id: int) -> str:
        """The name of the next call without one: its ordinal in the process set, whatever its kind.

        One count over all kinds lets the coordinator see that two ranks ask for different things. The verbs leave it to
        ``submit``, so that no call is counted that a signal handler keeps from being submitted.
        """
        with self.lock:
            ordinal = self._anonymous.get(set_id, 0)
            self._anonymous[set_id] = ordinal + 1
            return f"{ANONYMOUS}{self._generation}.{ordinal}"

    def next_generation(self) -> None:
        """All ranks have joined: some of them had made fewer calls, so the count begins anew on all."""
        with self.lock:
            self._generation += 1
            self._anonymous.clear()

    # --- the control thread

    def take_request(self) -> Request | None:
        """What is ready and unsent, if the last request has been answered."""
        with self.lock:
            if self.behind:
                self.catch_up()
            if self._unanswered or self._moving or not self._unsent:
                return None
            self._unanswered = True
            self._serial += 1
            asks = tuple(entry.ask() for entry in self._unsent)
            self._unsent.clear()
            return Request(self._epoch, self._serial, asks)

    def take_pause(self) -> Paused | None:
        """What is to be said, once, when this rank has come to where it is to stop."""
        if self._pause is None:
            return None
        with self.lock:
            pause, self._pause = self._pause, None
            return None if self._moving else pause

    def answered(self, serial: int) -> None:
        """The request ``serial`` has its answer: the next may go out."""
        with self.lock:
            if serial == self._serial:
                self._unanswered = False

    def take(self, set_id: int, names: Iterable[str]) -> list[Entry | None]:
        """The entries of a bucket, out of the tensor queue; None for what this rank has not asked for (it has joined)."""
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
        """A schedule that may be resumed from now on; laid out anew, it takes the place of the one of its number."""
        self._usual_s.pop(arranged.schedule, None)
        self._schedules[arranged.schedule] = arranged

    def planned(self, schedule: int) -> Sequence[Planned]:
        """The buckets of a schedule that was learned."""
        return self._schedules[schedule].buckets

    def fill(self, bucket: Bucket) -> bool:
        """A bucket that may be a ragged slot of the schedule that runs; False if it is none."""
        with self.lock:
            if self.behind:
                self.catch_up()
            if self._replay is None or self._replay.frozen:
                return False
            found = [self._find(bucket.set_id, name) for name in bucket.names]
            entries = [entry for entry in found if entry is not None]
            if len(entries) < len(found):
                return False  # this rank has joined: no schedule runs
            anonymous = bucket.names[0].startswith(ANONYMOUS)
            if not self._replay.fill(bucket, entries, anonymous, entries[0].spec_bytes):
                return False
            if self._waits_since_s is None:
                self._waits_since_s = time.monotonic()
            self.work.notify()
            return True

    def freeze(self, epoch: int) -> Frozen | None:
        """Nothing is launched after this. None: the epoch is still to be entered, see ``resume``."""
        with self.lock:
            if self.behind:
                self.catch_up()
            if epoch != self._epoch:
                self._freeze_at = epoch
                return None
            return self._freeze()

    def _freeze(self) -> Frozen:
        self._moving = True
        self._open = None
        return Frozen(self._epoch, self._replay.freeze() if self._replay is not None else ())

    def steps(self) -> int:
        """How many periods were launched, of whatever schedule. Any thread, at any moment: it takes no lock."""
        steps, replay = self._steps, self._replay
        return steps + (replay.periods if replay is not None else 0)

    def _end_replay(self) -> None:
        """Whatever was replayed is over: its steps are counted."""
        periods = self._replay.periods if self._replay is not None else 0
        self._steps += periods  # no call between these two: ``steps`` takes no lock
        self._replay = self._open = None

    def stuck(self) -> int | None:
        """The epoch to leave, if an entry has stood in a slot for so long that somebody may be waiting for it.

        That may be elsewhere than in ddl; or a peer, while this engine sits in a collective that comes before.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            if self.is_ready() or self.running == GONE:  # whoever was to launch it has been called away
                self.work.notify()
            if self._open is None or self._waits_since_s is None:
                return None
            usual_s = max((position.usual_s or 0.0 for position in self._open.positions), default=0.0)
            if self._open.paused and len(self._turns_ns) > 1:  # peers take what is left of a period to come here
                usual_s = max(usual_s, (self._turns_ns[-1] - self._turns_ns[-2]) * 1e-9)
            if time.monotonic() - self._waits_since_s < max(STUCK_AFTER_S, USUAL_TIMES * usual_s):
                return None
            return self.stopped_waiting()

    def under_way(self) -> set[int]:
        """Numbers of the launches that have not ended."""
        with self.lock:
            return {launch.number for launch in self._launches}

    def pending(self) -> list[str]:
        """Names of what was asked for and has not ended."""
        with self.lock:
            busy = [entry for entry in self._persistent.values() if entry.state != IDLE]
            return [entry.name for entry in (*self._in_flight.values(), *busy)]

    def replay_status(self) -> ReplayStatus | None:
        """Where this rank is in replay; None outside."""
        with self.lock:
            replay = self._open
            if replay is None or (replay.paused and not self._launches):
                return None
            if self._launches:
                first = self._launches[0]
                return ReplayStatus(self._epoch, first.place, True, first.planned.set_id, first.planned.names)
            planned, entries = replay.current.planned, replay.current.entries
            missing = tuple(name for name, entry in zip(planned.names, entries) if entry is None)
            return ReplayStatus(self._epoch, replay.place, False, planned.set_id, planned.names, missing)

    # --- the engine

    def resume(self, message: Resume, sets: Mapping[int, Sequence[int]], rank: int) -> Frozen | None:
        """Replays a schedule from here on: what is pending goes into its slots.

        The answer to a Freeze that came before this was entered, if one did.
        """
        with self.lock:
            if self.behind:
                self.catch_up()
            arranged = self._schedules.pop(message.schedule)
            self._schedules[message.schedule] = arranged
            while len(self._schedules) > MOST_KNOWN:
                unused = next(iter(self._schedules))  # the longest
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
            if self._replay.paused:  # all its own had run before
                self._say_paused()
            return self._freeze() if self._freeze_at == message.epoch else None

    def discover(self, epoch: int) -> None:
        """Back in discovery: all that is pending is asked for anew."""
        with self.lock:
            if self.behind:
                self.catch_up()
            self._end_replay()
            self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        """Everything launched has been judged by now, so what is in flight is pending."""
        self._epoch = epoch
        self._moving = False
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

    @property
    def frozen(self) -> bool:
        """Whether what completes now must wait until Drain has decided on it. Lock held."""
        return self._moving

    def launch(self) -> Launch[Entry] | None:
        """The next bucket of the schedule, if it is ready. The caller holds the lock."""
        launch = self.advance()
        if self.behind:
            self.catch_up()
        return launch

    def advance(self, runner: int = 0) -> Launch[Entry] | None:
        """As ``launch``, for a caller who does ``catch_up`` itself. ``runner``: the thread that is to run it, if not the engine's."""
        replay = self._replay
        if replay is None or not replay.ready():
            return None
        now_s = time.monotonic()
        at_ns = int(now_s * 1e9)
        number = self._launched + 1
        position = replay.current
        usual_s = None
        if self._waits_since_s is not None:
            usual_s = max(now_s - self._waits_since_s, (position.usual_s or 0.0) * 0.9)
        leaves_room = replay.queued or replay.filled_ragged_slots
        launch, fresh, following, current, paused, turn_at = replay.step(number)
        # Launched, or not: nothing is called from here on, but for a ragged slot, which no user's thread launches.
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
        self._launches += [launch]
        self._recent[number & self._recent_mask] = (number, launch.place, position.planned, at_ns)
        if usual_s is not None:
            position.usual_s = usual_s
            self._usual[position.index] = usual_s
        self._waits_since_s = now_s if replay.filled else None
        if leaves_room:
            self.behind = True
        if runner:
            self.own = launch
            self.running = runner
        if launch.bucket is not None:
            replay.take_ragged_slot(position)
        return launch

    def _turn(self, replay: Replay[Entry]) -> None:
        """A period has ended on this rank, while periods are timed."""
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

    def next_run(self) -> Any:
        """How the bucket is run that is to be launched next, if it is ready: see Position.run. Lock held."""
        replay = self._replay
        return replay.current.run if replay is not None and replay.ready() else None

    def is_ready(self) -> bool:
        """Whether a bucket may be launched. Lock held."""
        if self.behind:
            self.catch_up()
        return self._replay is not None and self._replay.ready()

    @property
    def conflict(self) -> bool:
        """Whether an entry has come that the schedule cannot go on with. Lock held."""
        return self._conflict and self._open is not None

    def stopped_waiting(self) -> int:
        """This rank has asked to leave: it does so once. The epoch. Lock held."""
        self._waits_since_s = None
        self._conflict = False
        return self._epoch

    def drain(self, highest: Mapping[int, int]) -> list[Launch[Entry]]:
        """See Replay.drain."""
        with self.lock:
            if self.behind:
                self.catch_up()
            return self._replay.drain(highest) if self._replay is not None else []

    def put_back(self, launch: Launch[Entry]) -> bool:
        """A void bucket's entries are pending again; False once the tensor queue is closed."""
        with self.lock:
            self._launches.remove(launch)
            return not self._closed

    def delivered(self, launch: Launch[Entry]) -> None:
        """The bucket is over, for better or worse: its names may be used again. No effect on a ragged slot that was drained."""
        with self.lock:
            self._launches = [one for one in self._launches if one is not launch]
            in_flight = self._in_flight
            if in_flight:
                for entry in launch.entries or ():
                    key = (entry.set_id, entry.name)
                    if in_flight.get(key) is entry:  # else it was delivered before, by a thread that was interrupted
                        del in_flight[key]

    # --- the end

    def close(self, refusal: Callable[[], BaseException]) -> list[Entry]:
        """No more is taken: ``submit`` raises what ``refusal`` makes. Returns what was pending."""
        with self.lock:
            if self.behind:
                self.catch_up()
            if self._refusal is None:
                self._refusal = refusal
            launched = {id(entry) for launch in self._launches for entry in launch.entries or ()}
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
        """As ``close``, but what is pending stays pending: it may still be part of a promised bucket."""
        with self.lock:
            if self._refusal is None:
                self._refusal = refusal
            self._open = None

    def disown(self, refusal: Callable[[], BaseException]) -> None:
        """In a forked child: nothing is taken here, and whoever held the lock does not exist."""
        self.lock = Lock()
        self.work = threading.Condition(self.lock)
        self._placing, self.behind = (), False
        self._refusal = refusal
        self._replay = self._open = None  # what the parent has under way is the parent's


def _ordinal(entry: Entry) -> int:
    """Anonymous entries go into their slots in the order of their calls, whatever came back meanwhile."""
    return int(entry.name.rpartition(".")[2].partition("[")[0]) if entry.name.startswith(ANONYMOUS) else -1
