"""A signal handler raises at each place of a call at which CPython may run one: it was made, or it was not, and nothing is lost."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddlcore.contracts.memory import Memory, view
from ddlcore.contracts.transport import PreparedMove
from ddlcore.errors import MismatchError, ReentrantCall
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_coordinator import Request
from ddlcore.messages.to_rank import Arranged, Planned, Resume
from ddlcore.runtime.atomic_move import AtomicMove
from ddlcore.runtime.buffers import FusionBuffers
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.engine import Engine
from ddlcore.runtime.epochs import Epochs
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.host_moves import movement
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.lookout import Lookout
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.request import ANONYMOUS, IDLE, Entry, Given, PersistentMove, PersistentRequest
from ddlcore.runtime.submission import Submission
from ddlcore.runtime.tensor_queue import GONE, TensorQueue
from ddlcore.runtime.vote import Vote
from ddlcore.runtime.waiter import Waiter
from ddlcore.types import Buffer, DType, Kind
from tests.runtime.strikes import Strike, each_place, strike
from tests.runtime.waiting import Alone, NoDevices

SPEC = Spec(Kind.ALLREDUCE, DType.F32, (4,))
DATA = encode(SPEC)


class Rank:
    """A tensor queue and an engine without threads: the test plays all of them, one after the other."""

    def __init__(self, *buckets: tuple[str, ...], kind: Kind = Kind.ALLREDUCE, data: bytes = DATA) -> None:
        self.completion = Completion()
        self.woken = 0
        self.meter = Meter()
        outbox = Outbox(self._wake)
        self.tensor_queue = TensorQueue(self.completion, outbox)
        self.submission, self.epochs = Submission(self.tensor_queue), Epochs(self.tensor_queue)
        self.broken: list[BaseException] = []
        self.ran: list[list[str]] = []
        executor: Any = SimpleNamespace(execute=None, replay=lambda launch, use: self._run(launch))
        none = cast("Any", None)
        failure = JobFailure()
        in_flight = DevicesInFlight(self.completion, self.meter, NoDevices())
        self.engine = Engine(
            executor,
            none,
            self.tensor_queue,
            self.completion,
            in_flight,
            failure,
            self.broken.append,
            self.meter,
            "engine",
        )
        self.lookout = Lookout(self.tensor_queue, self.engine, lambda: None, outbox, self.meter)
        self.waiter = Waiter(self.completion, self.engine.user_threads, self.lookout, failure)
        if buckets:
            planned = tuple(Planned(0, kind, names, (data,) * len(names), False) for names in buckets)
            self.epochs.learn(Arranged(0, b"", planned))
            self.epochs.resume(Resume(1, 0, 0, ((0, -1),)), {0: (0,)}, 0)
            for position in self.tensor_queue.replay.positions if self.tensor_queue.replay is not None else ():
                position.resumable = run = Run(self)
                position.run = lambda launch, use, run=run: run.resume(launch)

    def _wake(self) -> None:
        self.woken += 1

    def _run(self, launch: Any) -> Any:
        return launch.position.resumable.resume(launch)

    def request(self, name: str) -> PersistentRequest:
        return PersistentRequest(self.waiter, 0, name, SPEC, DATA, Buffer(64, 4, DType.F32, (4,)))

    def entries(self, *names: str) -> tuple[Handle, list[Entry]]:
        handle = Handle(self.waiter, len(names), lambda outcomes: list(outcomes))
        source = Buffer(64, 4, DType.F32, (4,))
        return handle, [Entry(handle, number, 0, name, SPEC, DATA, source, source) for number, name in enumerate(names)]

    def look(self) -> Request | None:
        """What the control thread does."""
        self.lookout.look()
        return self.tensor_queue.take_request()

    def work(self, looks: bool = True) -> None:
        """What the engine's thread does until there is nothing to do, after the control thread if this ``looks``."""
        assert not (self.tensor_queue.lock.held() or self.completion.lock.held()), "it would wait for ever"
        if looks:
            self.look()
        self.engine._agenda.stopped = True  # it does not wait
        self.engine._me = 7
        while (todo := self.engine._next()) is not None:
            if callable(todo):
                todo()
            else:
                self.engine._replay(cast("Any", todo))
        self.tensor_queue.running = 0
        self.engine._agenda.stopped = False
        assert self.broken == []
        if looks:
            assert self.tensor_queue.launches == {}
            assert self.tensor_queue.own is None
            assert not self.tensor_queue.behind


class Run:
    """How a bucket is run: the same ticket again has no effect, as with shared memory."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._tickets: set[int] = set()

    def resume(self, launch: Any, operation: object = None) -> Any:
        if launch.number not in self._tickets:
            self._tickets.add(launch.number)
            self._rank.ran.append([entry.name for entry in launch.entries])
        return lambda: [None] * 9

    def forget(self) -> None:
        pass


def test_a_call_of_several_tensors_is_asked_for_as_a_whole_or_not_at_all() -> None:
    def scene(at: int) -> bool:
        rank = Rank()
        _, entries = rank.entries("g[0]", "g[1]", "g[2]")
        struck = strike(at, lambda: rank.submission.submit(entries))
        request = rank.look()
        asked = [ask.name for ask in request.asks] if request is not None else []
        assert asked in ([], ["g[0]", "g[1]", "g[2]"])
        if not asked:
            assert struck
            rank.submission.submit(entries)
            assert len(cast("Request", rank.look()).asks) == 3
        else:
            with pytest.raises(ValueError, match="in flight"):
                rank.submission.submit(entries)
        return struck

    assert each_place(scene) > 10


def test_a_call_without_a_name_is_counted_if_it_is_submitted() -> None:
    """Counted and not submitted it would leave all later calls of this rank beside those of its peers."""

    def scene(at: int) -> bool:
        rank = Rank()
        _, entries = rank.entries(ANONYMOUS)
        struck = strike(at, lambda: rank.submission.submit(entries))
        first = rank.look()
        _, others = rank.entries(ANONYMOUS)
        rank.tensor_queue.answered(1)
        rank.submission.submit(others)
        second = rank.look()
        asked = [ask.name for request in (first, second) if request is not None for ask in request.asks]
        assert asked == [f"noname.0.{i}" for i in range(len(asked))]
        assert first is not None or struck
        return struck

    assert each_place(scene) > 10


@pytest.mark.parametrize("names", [("x", "y"), ("", "")], ids=["named", "anonymous"])
def test_calls_of_a_replayed_step_run_once(names: tuple[str, str]) -> None:
    def scene(at: int) -> bool:
        rank = Rank(names)
        handles = []
        struck = False
        for step in range(3):
            for name in names:
                handle, entries = rank.entries(name or ANONYMOUS)
                if step == 1:
                    called_away = strike(at, lambda entries=entries: rank.submission.submit(entries))  # type: ignore[misc]
                    struck = struck or called_away
                    rank.lookout.look()  # the control thread looks
                    if called_away and entries[0].name not in rank.lookout.pending():
                        handle, entries = rank.entries(name or ANONYMOUS)
                        rank.submission.submit(entries)
                else:
                    rank.submission.submit(entries)
                handles.append(handle)
            rank.work()
        assert not any(handle.pending for handle in handles)
        assert [len(bucket) for bucket in rank.ran] == [2, 2, 2]
        return struck

    assert each_place(scene) > 10


def test_nothing_runs_twice_if_the_engine_comes_before_the_control_thread() -> None:
    """The engine launches the entries that an interrupted call has put into slots. They are not put there again."""

    def scene(at: int) -> bool:
        rank = Rank(("x",), ("g[0]", "g[1]"))
        x, struck = rank.request("x"), False
        for step in range(3):
            start = partial(rank.submission.start_request, x, 64, None, True)
            struck = _call(start, at if step == 0 else -1) or struck  # the first start has no slot yet
            rank.work(looks=False)
            if x.starts == step:
                start()
            rank.work()
            handle, entries = rank.entries("g[0]", "g[1]")
            submit = partial(rank.submission.submit, entries, True)
            struck = _call(submit, at if step == 1 else -1) or struck
            rank.work(looks=False)
            if not handle.submitted:
                submit()
            rank.work()
            assert not handle.pending
            assert rank.ran == [["x"], ["g[0]", "g[1]"]] * (step + 1)
        return struck

    assert each_place(scene) > 10


def _call(call: Callable[[], None], at: int) -> bool:
    """Call ``call`` with a strike at place ``at``, or without a strike if ``at`` is negative.

    Return whether the strike has come.
    """
    if at >= 0:
        return strike(at, call)
    call()
    return False


def test_a_second_interrupt_at_once_loses_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler may raise again before the first statement of what handles the first one's error."""
    interrupted = Submission._interrupted

    def scene(at: int) -> bool:
        rank = Rank(("a", "b"))
        a, b = rank.request("a"), rank.request("b")
        for _ in range(2):
            rank.submission.start_all([(a, 64, None), (b, 64, None)])
            rank.work()
        monkeypatch.setattr(Submission, "_interrupted", _raise)
        struck = strike(at, lambda: rank.submission.start_all([(a, 64, None)]))
        monkeypatch.setattr(Submission, "_interrupted", interrupted)
        rank.work()
        assert a.starts == 2 or rank.tensor_queue.waits_since_s is not None, "nobody would leave replay"
        return struck

    assert each_place(scene) >= 4


def _raise(queue: TensorQueue) -> None:
    raise Strike


def test_starts_tells_which_of_many_have_been_started() -> None:
    """Seated ones, one that comes for the first time, and one that the schedule does not know."""

    def scene(at: int) -> bool:
        rank = Rank(("a", "b", "c"))
        known = [rank.request(name) for name in ("a", "b")]
        first = rank.request("c")
        rank.submission.start_all([(one, 64, None) for one in (*known, first)])
        rank.work()
        everything = [*known, rank.request("c"), rank.request("alien")]
        before = [one.starts for one in everything]
        struck = strike(at, lambda: rank.submission.start_all([(one, 128, None) for one in everything]))
        rank.look()
        rest = [one for one, count in zip(everything, before) if one.starts == count]
        assert all(one.state == IDLE for one in rest)
        assert struck or not rest
        rank.submission.start_all([(one, 128, None) for one in rest])
        rank.work()
        assert rank.ran == [["a", "b", "c"]] * 2
        assert [one.starts - count for one, count in zip(everything, before)] == [1] * 4
        assert [one.pending for one in everything] == [False, False, False, True]
        return struck

    assert each_place(scene) > 20


def test_an_allreduce_that_a_thread_runs_itself_is_finished_by_the_engine() -> None:
    def scene(at: int) -> bool:
        rank = Rank(("x",))
        entry = rank.request("x")
        rank.submission.start_request(entry, 64, None)
        rank.work()
        before = entry.starts
        replayed = rank.meter.replayed
        struck = strike(at, lambda: rank.engine.user_threads.start_and_wait(entry, 128, "owner"))
        rank.work()
        assert not entry.pending
        assert entry.starts - before in (0, 1)
        assert struck or entry.starts > before
        assert len(rank.ran) == 1 + entry.starts - before
        assert rank.meter.replayed - replayed == entry.starts - before
        rank.engine.user_threads.start_and_wait(entry, 64, None)
        assert rank.ran[-1] == ["x"]
        assert rank.tensor_queue.running == 0
        return struck

    assert each_place(scene) > 15


def test_a_call_without_a_name_that_a_thread_runs_itself_is_counted_if_it_is_made() -> None:
    """It is made once or not at all, and the engine finishes it."""

    def scene(at: int) -> bool:
        rank = Rank(("",))
        entry = rank.request(ANONYMOUS)
        struck = strike(at, lambda: rank.engine.user_threads.run_unnamed(entry, 128, "owner"))
        made = entry.starts
        assert made == 1 or struck
        assert rank.tensor_queue.unnamed.counts.get(0, 0) == made
        rank.work()
        assert (entry.pending, entry.source.owner, rank.meter.replayed) == (False, None, made)
        assert rank.engine.user_threads.run_unnamed(entry, 64, None)
        assert (entry.name, rank.meter.replayed) == (f"{ANONYMOUS}0.{made}", made + 1)
        return struck

    assert each_place(scene) > 20


def test_what_a_waiting_thread_hands_over_reaches_every_entry_once() -> None:
    """Persistent requests and those of a grouped call in one bucket, whose names are free again behind it."""

    def scene(at: int) -> bool:
        rank = Rank(("a", "g[0]", "b", "g[1]"))
        entries = [rank.request("a"), rank.request("b")]
        struck = False
        for step in range(3):
            rank.submission.start_all([(one, 64, None) for one in entries], waits=True)
            handle, members = rank.entries("g[0]", "g[1]")
            called: list[int] = []
            rank.submission.submit(members, waits=True)
            handle.then(lambda called=called: called.append(1))  # type: ignore[misc]
            if step == 1:
                struck = strike(at, lambda: rank.engine.user_threads.progress(handle))  # noqa: B023  # called at once
            else:
                rank.engine.user_threads.progress(handle)
            rank.work()
            assert called == [1]
            assert handle.wait() == [None, None]
            assert not any(one.pending for one in entries)
        assert len(rank.ran) == 3
        assert rank.lookout.pending() == []
        assert rank.meter.replayed == 3
        return struck

    assert each_place(scene) > 20


def test_a_waiting_thread_that_runs_several_buckets_leaves_the_rest_to_the_engine() -> None:
    """An interrupt may come anywhere, also between two buckets. After it, the thread no longer counts as running buckets."""
    names = ("a", "b", "c")

    def scene(at: int) -> bool:
        rank = Rank(*((name,) for name in names))
        entries = [rank.request(name) for name in names]
        struck = False
        for step in range(2):
            rank.submission.start_all([(one, 64, None) for one in entries], waits=True)
            struck = _call(lambda: rank.engine.user_threads.progress(entries[-1]), at if step == 1 else -1)
            assert rank.tensor_queue.running in (0, GONE)
            rank.work()
            assert not any(one.pending for one in entries)
        assert rank.ran == [[name] for name in names] * 2
        return struck

    assert each_place(scene) > 40


class Voted(Vote):
    """A vote of two ranks. The other rank has three rows, and votes after the first try."""

    atomic = resumable = True

    def __init__(self) -> None:
        self.tickets: list[int] = []

    def cast(self, mine: Sequence[int], real: bool) -> bool:
        assert real
        self._told = [*mine, 3]
        return True

    def try_cast(self, mine: Sequence[int], ticket: int) -> bool | None:
        self.tickets.append(ticket)
        self._told = [*mine, 3]
        return True if self.tickets.count(ticket) > 1 else None

    def told(self) -> list[int]:
        return list(self._told)


class MovedOnce(PreparedMove):
    """A move that writes the result only once for a ticket, as if the other rank sent its rows only once."""

    def __init__(self) -> None:
        self.tickets: list[int] = []

    def run(self, source: Buffer, target: Buffer, counts: Any, ticket: int) -> None:
        assert tuple(counts) == (2, 3)
        if not self.tickets or self.tickets[-1] != ticket:
            view(target.address, 5)[:] = bytes([*view(source.address, 2), 7, 8, ticket])
            self.tickets.append(ticket)


def test_an_allgather_that_a_thread_runs_itself_moves_its_rows_once() -> None:
    """The engine continues with the memory that the interrupted thread has chosen for the result."""
    spec = Spec(Kind.ALLGATHER, DType.U8, ())
    data = encode(spec)
    rows = Memory(2)
    view(rows.address, 2)[:] = b"ab"
    source = Buffer(rows.address, 2, DType.U8, (2,), owner=rows)
    communicator: Any = SimpleNamespace(ranks=(0, 1), rank=0, buffers=FusionBuffers(cast("Any", None)))

    def scene(at: int) -> bool:
        rank = Rank(("x",), kind=Kind.ALLGATHER, data=data)
        assert rank.tensor_queue.replay is not None
        (position,) = rank.tensor_queue.replay.positions
        vote, move = Voted(), MovedOnce()
        position.run = position.resumable = run = AtomicMove(
            vote, movement(Kind.ALLGATHER, communicator, spec), move, True
        )
        position.nbytes = -1
        struck = False
        for step in range(3):
            handle = Handle(rank.waiter, 1, lambda outcomes: outcomes[0])
            rank.submission.submit([Entry(handle, 0, 0, "x", spec, data, source, rows=(2,))], waits=True)
            if step == 1:
                struck = strike(at, lambda: rank.engine.user_threads.progress(handle))  # noqa: B023  # called at once
            else:
                rank.engine.user_threads.progress(handle)
            rank.work()
            outcome = handle.wait()
            assert outcome.rows == ((2,), (3,))
            assert bytes(view(outcome.memory.address, 5)) == bytes([*b"ab", 7, 8, step + 1])
            if not struck:  # the memory of the result is the user's alone
                assert run._movement is not None and run._movement.target.owner is None
        assert move.tickets == [1, 2, 3]
        assert rank.meter.nbytes[Kind.ALLGATHER] == 6
        assert rank.meter.replayed == 3
        return struck

    assert each_place(scene) > 40


def test_a_blocking_allgather_is_made_or_not_and_its_result_is_its_own() -> None:
    """The next start does not take the result of the one before, and no start gets the rows of another."""
    spec = Spec(Kind.ALLGATHER, DType.U8, ())
    data = encode(spec)
    rows = Memory(2)
    source = Buffer(rows.address, 2, DType.U8, (2,), owner=rows)
    communicator: Any = SimpleNamespace(ranks=(0, 1), rank=0, buffers=FusionBuffers(cast("Any", None)))

    def scene(at: int) -> bool:
        rank = Rank(("x",), kind=Kind.ALLGATHER, data=data)
        assert rank.tensor_queue.replay is not None
        (position,) = rank.tensor_queue.replay.positions
        move = MovedOnce()
        run = AtomicMove(Voted(), movement(Kind.ALLGATHER, communicator, spec), move, True)
        position.run, position.resumable, position.nbytes = run, run, -1
        request = PersistentMove(rank.waiter, 0, "x", spec, data, Buffer(0, 0, DType.U8, (0,)))
        results: list[Given] = []
        struck, starts = False, 0
        for step in range(4):
            view(rows.address, 2)[:] = bytes([step, step])
            given = Given(source, None, (2,))
            call = partial(rank.engine.user_threads.start_and_wait, request, 0, given)
            if step == 2:
                struck = strike(at, call)
                if request.starts > starts and not given.done:
                    rank.work()
            elif step == 0:
                rank.submission.start_request(request, 0, given, True)  # it has no slot yet
                rank.work()
            else:
                call()
            assert given.done == (request.starts > starts)
            assert given.done or struck
            assert request.source.owner is None
            starts = request.starts
            results.append(given)
        for step, given in enumerate(results):
            if given.done:
                number = given.outcome.memory
                assert bytes(view(number.address, 4)) == bytes([step, step, 7, 8])
        assert len(move.tickets) == starts
        assert rank.meter.nbytes[Kind.ALLGATHER] == 2 * starts
        return struck

    assert each_place(scene) > 40


def test_an_interrupted_wait_for_a_device_is_not_wanted_any_more() -> None:
    def scene(at: int) -> bool:
        rank = Rank()
        entry = rank.request("x")
        rank.submission.start_request(entry, 64, None)

        class Ends(Alone):
            def check_stall(self, since_s: float) -> float:
                entry.complete(0, None, -1)
                rank.completion.announce()
                return 0.01

        waiter = Waiter(rank.completion, rank.engine.user_threads, Ends(), JobFailure())
        struck = strike(at, lambda: waiter.wait_for_device(entry))
        assert not rank.completion.wanted
        return struck

    assert each_place(scene) > 5


def test_an_error_is_told_until_the_next_start() -> None:
    rank = Rank()
    entry = rank.request("x")
    rank.submission.start_request(entry, 64, None)
    entry.fail(MismatchError("of this call"))
    for _ in range(2):  # the first may have been interrupted behind it
        with pytest.raises(MismatchError, match="of this call"):
            entry.wait()
    rank.tensor_queue.retire([entry])
    rank.submission.start_request(entry, 64, None)
    assert entry.error is None


def test_a_thread_that_is_inside_gets_a_named_error_and_changes_nothing() -> None:
    """Verbs from a finalizer: in the middle of the lock, in the middle of a bucket, and on a thread of ddl's own."""
    rank = Rank(("x",))
    entry = rank.request("x")
    handle, entries = rank.entries("y")
    calls: list[Callable[[], object]] = [
        lambda: rank.submission.submit(entries),
        lambda: rank.submission.start_request(entry, 64, None),
        lambda: rank.engine.user_threads.start_and_wait(entry, 64, None),
        lambda: rank.submission.name(entries),
    ]
    with rank.tensor_queue.lock:
        for call in calls:
            with pytest.raises(ReentrantCall, match="signal handler or a finalizer"):
                call()
        assert rank.tensor_queue.steps() == 0
    assert entry.starts == 0
    rank.submission.submit(entries)
    waits: list[Callable[[], object]] = [handle.wait, lambda: rank.engine.user_threads.start_and_wait(entry, 64, None)]

    for runner, threads in ((get_ident(), set()), (0, {get_ident()})):
        rank.tensor_queue.running, rank.engine.user_threads.own_threads = runner, threads
        for call in waits:
            with pytest.raises(ReentrantCall):
                call()
    assert rank.waiter.waited_s >= 0
    assert entry.starts == 0
