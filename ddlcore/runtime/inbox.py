"""The one boundary between the user's threads and ddl's: what was asked for and has not come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ddlcore.messages import Arranged, Batch, Frozen, Request, Resume
from ddlcore.runtime.handle import Completion
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import MOST_KNOWN, Launch, Offer, Replay, Schedule

__all__ = ["Inbox"]

LEAVE_AFTER_S = 0.005  # or so many times what the batch usually waits, whichever is more
USUAL_TIMES = 4.0
FIRST_USUAL_S = 0.05  # before anything is known of a schedule's usual wait


class Inbox:
    """Entries by (process set, name), and the schedule they fill while one is replayed.

    Any thread may submit; the control thread takes requests out; the engine launches. One lock
    covers all: freezing and launching exclude each other.
    """

    def __init__(self, completion: Completion, wake: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)  # what the engine waits for
        self._completion = completion
        self._wake = wake
        self._pending: dict[tuple[int, str], Entry] = {}
        self._launched: set[tuple[int, str]] = set()  # in a batch of a schedule that may still turn out void
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
        self._replay: Replay[Entry] | None = None
        self._conflict = False  # an entry has the name of a slot, and another spec
        self._waits_since_s: float | None = None  # the oldest entry that stands in a slot unlaunched
        self._usual_s: dict[int, float] = {}  # by place in the period: how long its first entry waits

    # --- the user's threads

    def submit(self, entries: Sequence[Entry]) -> None:
        """Takes all of them, or none: ValueError for a name in flight; the job's error once it is over."""
        with self.lock:
            if self._refusal is not None:
                raise self._refusal()
            for entry in entries:
                key = (entry.set_id, entry.name)
                if key in self._pending or key in self._launched:
                    raise ValueError(
                        f"{entry.name!r} is already in flight on this rank; wait for its handle first, "
                        "or give each call a name of its own"
                    )
            for entry in entries:
                self._pending[entry.set_id, entry.name] = entry
                self._place(entry)
            wake = bool(self._unsent) and not self._unanswered and not self._moving
        if wake:
            self._wake()

    def _place(self, entry: Entry) -> None:
        """Into its slot of the schedule, or to the coordinator."""
        replay = self._replay
        if replay is None or replay.frozen:
            self._unsent.append(entry)
            return
        anonymous = entry.name.startswith("noname.")
        offer = replay.offer(entry.set_id, entry.name, anonymous, entry.spec_bytes, entry)
        if offer is Offer.ALIEN:
            self._unsent.append(entry)
        elif offer is Offer.CONFLICT:  # the others may sit in a batch that this rank will never fill
            self._unsent.append(entry)
            self._conflict = True
            self.work.notify()
        elif self._waits_since_s is None:
            self._waits_since_s = time.monotonic()
            self.work.notify()  # the engine watches how long it waits
        elif replay.ready():
            self.work.notify()

    def anonymous(self, set_id: int) -> str:
        """The name of the next call without one: its ordinal in the process set, whatever its kind.

        One count over all kinds lets the coordinator see that two ranks ask for different things.
        """
        with self.lock:
            ordinal = self._anonymous.get(set_id, 0)
            self._anonymous[set_id] = ordinal + 1
            return f"noname.{self._generation}.{ordinal}"

    def next_generation(self) -> None:
        """All ranks have joined: some of them had made fewer calls, so the count begins anew on all."""
        with self.lock:
            self._generation += 1
            self._anonymous.clear()

    # --- the control thread

    def take_request(self) -> Request | None:
        """What is ready and unsent, if the last request has been answered."""
        with self.lock:
            if self._unanswered or self._moving or not self._unsent:
                return None
            self._unanswered = True
            self._serial += 1
            stamp = self._completion.observed
            asks = tuple(entry.ask(stamp) for entry in self._unsent)
            self._unsent.clear()
            return Request(self._epoch, self._serial, asks)

    def answered(self, serial: int) -> None:
        """The request ``serial`` has its answer: the next may go out."""
        with self.lock:
            if serial == self._serial:
                self._unanswered = False

    def take(self, set_id: int, names: Iterable[str]) -> list[Entry | None]:
        """The entries of a batch, out of the inbox; None for what this rank has not asked for (it has joined)."""
        with self.lock:
            return [self._pending.pop((set_id, name), None) for name in names]

    def learn(self, arranged: Arranged) -> None:
        """A schedule that may be resumed from now on."""
        self._schedules[arranged.schedule] = arranged

    def fill(self, batch: Batch) -> bool:
        """A batch that may be a hole of the schedule that runs; False if it is none."""
        with self.lock:
            if self._replay is None or self._replay.frozen:
                return False
            found = [self._pending.get((batch.set_id, name)) for name in batch.names]
            entries = [entry for entry in found if entry is not None]
            if len(entries) < len(found):
                return False  # this rank has joined: no schedule runs
            anonymous = batch.names[0].startswith("noname.")
            if not self._replay.fill(batch, entries, anonymous, entries[0].spec_bytes):
                return False
            if self._waits_since_s is None:
                self._waits_since_s = time.monotonic()
            self.work.notify()
            return True

    def freeze(self, epoch: int) -> Frozen | None:
        """Nothing is launched after this. None: the epoch is still to be entered, see ``resume``."""
        with self.lock:
            if epoch != self._epoch:
                self._freeze_at = epoch
                return None
            return self._freeze()

    def _freeze(self) -> Frozen:
        self._moving = True
        return Frozen(self._epoch, self._replay.freeze() if self._replay is not None else ())

    # --- the engine

    def resume(self, message: Resume, sets: Mapping[int, Sequence[int]], rank: int) -> Frozen | None:
        """Replays a schedule from here on: what is pending goes into its slots.

        The answer to a Freeze that came before this was entered, if one did.
        """
        with self.lock:
            arranged = self._schedules.pop(message.schedule)
            self._schedules[message.schedule] = arranged
            while len(self._schedules) > MOST_KNOWN:
                del self._schedules[next(iter(self._schedules))]  # the longest unused
            schedule = Schedule(arranged, sets, rank)
            self._replay = Replay(schedule, message.start, dict(message.after))
            self._waits_since_s = None
            self._usual_s = {}
            self._enter(message.epoch)
            return self._freeze() if self._freeze_at == message.epoch else None

    def discover(self, epoch: int) -> None:
        """Back in discovery: all that is pending is asked for anew."""
        with self.lock:
            self._replay = None
            self._waits_since_s = None
            self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        self._epoch = epoch
        self._moving = False
        self._unanswered = False
        self._unsent = []
        self._conflict = False
        for entry in sorted(self._pending.values(), key=_ordinal):
            self._place(entry)
        if self._unsent:
            self._wake()

    @property
    def frozen(self) -> bool:
        """Whether what completes now must wait for a verdict. Lock held."""
        return self._moving

    def launch(self) -> Launch[Entry] | None:
        """The next batch of the schedule, if it is ready. The caller holds the lock."""
        replay = self._replay
        if replay is None or not replay.ready():
            return None
        launch = replay.launch()
        assert launch.entries is not None
        for entry in launch.entries:
            del self._pending[entry.set_id, entry.name]
            self._launched.add((entry.set_id, entry.name))
        now_s = time.monotonic()
        if self._waits_since_s is not None:
            position = launch.place % len(replay.schedule.batches)
            waited_s = now_s - self._waits_since_s
            self._usual_s[position] = max(waited_s, self._usual_s.get(position, 0.0) * 0.9)
        self._waits_since_s = now_s if replay.waits() else None
        return launch

    def leave_in_s(self) -> float | None:
        """Until when the next batch must be ready, lest this rank asks to leave; None: nothing waits. Lock held."""
        replay = self._replay
        if replay is None or replay.frozen:
            return None
        if self._conflict:
            return 0.0
        if self._waits_since_s is None:
            return None
        usual_s = self._usual_s.get(replay.position, FIRST_USUAL_S)
        return self._waits_since_s + max(LEAVE_AFTER_S, USUAL_TIMES * usual_s) - time.monotonic()

    def stopped_waiting(self) -> int:
        """This rank has asked to leave: it does so once. The epoch. Lock held."""
        self._waits_since_s = None
        self._conflict = False
        return self._epoch

    def drain(self, highest: Mapping[int, int]) -> list[Launch[Entry]]:
        """See Replay.drain."""
        with self.lock:
            return self._replay.drain(highest) if self._replay is not None else []

    def put_back(self, entries: Iterable[Entry]) -> bool:
        """Entries of a void batch are pending again; False once the inbox is closed."""
        with self.lock:
            if self._closed:
                return False
            for entry in entries:
                self._launched.discard((entry.set_id, entry.name))
                self._pending[entry.set_id, entry.name] = entry
            return True

    def delivered(self, entries: Iterable[Entry]) -> None:
        """The names of a batch that is valid may be used again."""
        with self.lock:
            for entry in entries:
                self._launched.discard((entry.set_id, entry.name))

    # --- the end

    def close(self, refusal: Callable[[], BaseException]) -> list[Entry]:
        """No more is taken: ``submit`` raises what ``refusal`` makes. Returns what was pending."""
        with self.lock:
            if self._refusal is None:
                self._refusal = refusal
            left = list(self._pending.values())
            self._closed = True
            self._pending.clear()
            self._unsent.clear()
            self._replay = None
            return left

    def refuse(self, refusal: Callable[[], BaseException]) -> None:
        """As ``close``, but what is pending stays pending: it may still be part of a promised batch."""
        with self.lock:
            if self._refusal is None:
                self._refusal = refusal


def _ordinal(entry: Entry) -> int:
    """Anonymous entries go into their slots in the order of their calls, whatever came back meanwhile."""
    return int(entry.name.rpartition(".")[2].partition("[")[0]) if entry.name.startswith("noname.") else -1
