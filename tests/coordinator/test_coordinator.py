"""The coordinator as a state machine: random programs of up to 64 ranks, and each decision by itself."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from ddl_conform.world import run_world
from hypothesis import given
from hypothesis import strategies as st

import ddlcore
from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.coordinator import request_table
from ddlcore.coordinator.coordinator import Coordinator
from ddlcore.coordinator.pending_request import PendingRequest
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Ask, Spec
from ddlcore.messages.to_coordinator import Bye, Frozen, Leave, Request
from ddlcore.messages.to_rank import Answer, Bucket, Failure, Farewell, Lost
from ddlcore.process.job import Job
from ddlcore.types import DType, Kind, ReduceOp
from tests.runtime.effort import examples


def spec(kind: Kind = Kind.ALLREDUCE, **kwargs: object) -> bytes:
    return encode(Spec(kind, DType.F32, **{"shape": (4,), **kwargs}))


def coordinator(size: int, fusion_bytes: int = 1 << 20) -> Coordinator:
    return Coordinator(size, ThresholdFusion(), fusion_bytes)


def ask(one: Coordinator, rank: int, *asks: Ask, serial: int = 1) -> dict[int, list[object]]:
    """What each rank is told when ``rank`` sends ``asks``."""
    told: dict[int, list[object]] = {}
    for to, message in one.handle(rank, Request(0, serial, asks)):
        assert isinstance(message, Answer)
        assert message.serial == (serial if to == rank else 0)
        told.setdefault(to, []).extend(message.items)
    assert rank in told, "every request is acknowledged"
    return told


class Simulation:
    """Ranks that run programs of asks against a coordinator over ordered, arbitrarily delayed lines.

    A program is a list of (set id, name, spec bytes); a rank sends one request at a time and joins
    later asks into the next one, as the tensor queue does.
    """

    def __init__(self, size: int, one: Coordinator, programs: list[list[Ask]], rng: random.Random) -> None:
        self.one, self.programs, self.rng, self.size = one, programs, rng, size
        self.up: list[deque[Request]] = [deque() for _ in range(size)]
        self.down: list[deque[Answer]] = [deque() for _ in range(size)]
        self.unsent: list[list[Ask]] = [[] for _ in range(size)]
        self.unanswered = [False] * size
        self.position = [0] * size
        self.serial = 0
        self.ran: list[list[tuple[int, int, tuple[str, ...]]]] = [[] for _ in range(size)]
        self.failed: list[set[str]] = [set() for _ in range(size)]

    def run(self) -> None:
        while True:
            choices = [(self.submit, r) for r in range(self.size) if self.position[r] < len(self.programs[r])]
            choices += [(self.send, r) for r in range(self.size) if self.unsent[r] and not self.unanswered[r]]
            choices += [(self.deliver_up, r) for r in range(self.size) if self.up[r]]
            choices += [(self.deliver_down, r) for r in range(self.size) if self.down[r]]
            if not choices:
                return
            action, rank = self.rng.choice(choices)
            action(rank)

    def submit(self, rank: int) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if self.position[rank] < len(self.programs[rank]):
                self.unsent[rank].append(self.programs[rank][self.position[rank]])
                self.position[rank] += 1

    def send(self, rank: int) -> None:
        self.serial += 1
        self.unanswered[rank] = True
        self.up[rank].append(Request(0, self.serial, tuple(self.unsent[rank])))
        self.unsent[rank].clear()

    def deliver_up(self, rank: int) -> None:
        for to, message in self.one.handle(rank, self.up[rank].popleft()):
            assert isinstance(message, Answer)
            self.down[to].append(message)

    def deliver_down(self, rank: int) -> None:
        answer = self.down[rank].popleft()
        if answer.serial:
            assert self.unanswered[rank]
            self.unanswered[rank] = False
        for item in answer.items:
            if isinstance(item, Bucket):
                self.ran[rank].append((item.index, item.set_id, item.names))
            else:
                assert isinstance(item, Failure)
                self.failed[rank].update(item.names)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, dict[int, tuple[int, ...]], list[list[Ask]], set[str], int, int]:
    """Size, process sets, programs in a random order on each rank, names that ranks disagree on, fusion bytes, seed."""
    size = draw(st.one_of(st.integers(1, 6), st.integers(1, 64)))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    sets = {0: tuple(range(size))}
    for set_id in range(1, 1 + draw(st.integers(0, 3))):
        sets[set_id] = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
    programs: list[list[Ask]] = [[] for _ in range(size)]
    wrong: set[str] = set()
    for number in range(draw(st.integers(1, 12))):
        set_id = rng.choice(list(sets))
        kind = rng.choice([Kind.ALLREDUCE] * 4 + [Kind.BROADCAST, Kind.ALLGATHER, Kind.REDUCESCATTER, Kind.BARRIER])
        name = f"t{number}"
        shape = (rng.randint(0, 8),)
        bad = len(sets[set_id]) > 1 and rng.random() < 0.15
        liar = rng.choice(sets[set_id])
        if bad:
            wrong.add(name)
        for rank in sets[set_id]:
            own = (shape[0] + 1,) if bad and rank == liar else shape
            root = sets[set_id][0] if kind is Kind.BROADCAST else -1
            data = encode(Spec(kind, DType.F32, own, root=root))
            programs[rank].append(Ask(set_id, name, data, (rank,) if kind is Kind.ALLGATHER else ()))
    for program in programs:
        if rng.random() < 0.7:
            rng.shuffle(program)
    return size, sets, programs, wrong, rng.choice([0, 40, 1 << 20]), rng.randint(0, 1 << 30)


@examples(300)
@given(worlds())
def test_random_programs_end_in_one_order(
    world: tuple[int, dict[int, tuple[int, ...]], list[list[Ask]], set[str], int, int],
) -> None:
    """Whatever the delays: everything asked runs once or fails on all its ranks, and all see one order."""
    size, sets, programs, wrong, fusion_bytes, seed = world
    one = coordinator(size, fusion_bytes)
    one.sets.update(sets)
    simulation = Simulation(size, one, programs, random.Random(seed))
    simulation.run()
    buckets: dict[int, tuple[int, tuple[str, ...]]] = {}
    for rank in range(size):
        indexes = [index for index, _, _ in simulation.ran[rank]]
        assert indexes == sorted(set(indexes)), "buckets arrive in their total order"
        ran = [name for _, _, names in simulation.ran[rank] for name in names]
        asked = {one_ask.name for one_ask in programs[rank]}
        assert sorted(ran) == sorted(asked - wrong)
        assert simulation.failed[rank] == asked & wrong
        for index, set_id, names in simulation.ran[rank]:
            assert buckets.setdefault(index, (set_id, names)) == (set_id, names)
            assert rank in sets[set_id]
    assert not one.table.all()


@examples(200)
@given(worlds(), st.data())
def test_random_departures_leave_nobody_waiting(
    world: tuple[int, dict[int, tuple[int, ...]], list[list[Ask]], set[str], int, int], data: st.DataObject
) -> None:
    """A rank that says Bye at any moment: nothing that needs it stays pending, and what does not need it goes on."""
    size, sets, programs, wrong, fusion_bytes, seed = world
    one = coordinator(size, fusion_bytes)
    one.sets.update(sets)
    leaver = data.draw(st.integers(0, size - 1))
    cut = data.draw(st.integers(0, len(programs[leaver])))
    programs[leaver] = programs[leaver][:cut]
    simulation = Simulation(size, one, programs, random.Random(seed))
    simulation.run()
    said = one.handle(leaver, Bye("left"))
    assert said[-1] == (leaver, Farewell())
    for to, message in said[:-1]:
        assert isinstance(message, Answer)
        simulation.down[to].append(message)
    simulation.run()
    for rank in range(size):
        if rank == leaver:
            continue
        ran = {name for _, _, names in simulation.ran[rank] for name in names}
        for one_ask in programs[rank]:
            done = one_ask.name in ran or one_ask.name in simulation.failed[rank]
            assert done, f"{one_ask.name} waits for ever on rank {rank}"
            if leaver not in sets[one_ask.set_id] and one_ask.name not in wrong:
                assert one_ask.name in ran


@examples(100)
@given(st.integers(2, 12), st.integers(0, 6), st.integers(0, 1 << 30))
def test_joined_ranks_are_always_ready(size: int, tensors: int, seed: int) -> None:
    """Ranks with fewer tensors join; every tensor runs on all ranks, then all learn who joined last."""
    rng = random.Random(seed)
    one = coordinator(size, rng.choice([0, 1 << 20]))
    programs = []
    for _ in range(size):
        own = [Ask(0, f"t{i}", spec()) for i in range(rng.randint(0, tensors))]
        programs.append([*own, Ask(0, "join", spec(Kind.JOIN))])
    simulation = Simulation(size, one, programs, rng)
    simulation.run()
    names = {name for program in programs for name in (a.name for a in program)}
    for rank in range(size):
        assert {name for _, _, bucket in simulation.ran[rank] for name in bucket} == names
        assert simulation.ran[rank] == simulation.ran[0], "joined ranks take part in everything"
        assert simulation.ran[rank][-1][2] == ("join",)


def test_fusion_follows_the_policy() -> None:
    """Tensors that become ready together share buckets up to the threshold."""
    one = coordinator(2, fusion_bytes=32)
    asks = [Ask(0, f"t{i}", spec()) for i in range(5)]  # 16 bytes each
    assert ask(one, 0, *asks) == {0: []}
    told = ask(one, 1, *asks)
    assert [item.names for item in told[0]] == [("t0", "t1"), ("t2", "t3"), ("t4",)]  # type: ignore[attr-defined]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (spec(), spec(shape=(5,)), "shape"),
        (spec(), encode(Spec(Kind.ALLREDUCE, DType.F64, (4,))), "dtype"),
        (spec(), spec(op=ReduceOp.Min), "op"),
        (spec(), spec(prescale=0.5), "prescale"),
        (spec(), spec(postscale=0.5), "postscale"),
        (spec(Kind.BROADCAST, root=0), spec(Kind.BROADCAST, root=1), "root"),
        (spec(), spec(Kind.BROADCAST, root=1), "kind"),
        (spec(), spec(compressor="fp16"), "compression"),
        (spec(), spec(strides=(1,)), "layout"),
        (spec(), spec(group=2), "group"),
    ],
)
def test_disagreement_is_told_to_every_rank_with_a_table(first: bytes, second: bytes, words: str) -> None:
    """The message names what differs, and what each rank asked; the next tensor runs as if nothing had been."""
    one = coordinator(3)
    ask(one, 0, Ask(0, "x[0]", first))
    ask(one, 1, Ask(0, "x[0]", first))
    told = ask(one, 2, Ask(0, "x[0]", second))
    for rank in range(3):
        (failure,) = told[rank]
        assert isinstance(failure, Failure)
        assert failure.error == "mismatch"
        assert words in failure.text
        assert "0-1" in failure.text
    for rank in range(2):
        ask(one, rank, Ask(0, "x[0]", spec()))
    assert isinstance(ask(one, 2, Ask(0, "x[0]", spec()))[0][0], Bucket)


def test_a_group_runs_when_all_of_it_is_ready_everywhere() -> None:
    """No tensor of a grouped call runs before its last; a mismatch in one fails all of them."""
    one = coordinator(2)
    group = [Ask(0, f"g[{i}]", spec(group=2)) for i in range(2)]
    ask(one, 0, *group)
    assert ask(one, 1, group[0])[1] == []
    assert ask(one, 1, group[1])[1][0].names == ("g[0]", "g[1]")  # type: ignore[attr-defined]
    ask(one, 0, *group)
    told = ask(one, 1, group[0], Ask(0, "g[1]", spec(group=2, shape=(9,))))
    assert sorted(name for item in told[0] for name in item.names) == ["g[0]", "g[1]"]  # type: ignore[attr-defined]
    assert all(isinstance(item, Failure) for items in told.values() for item in items)
    assert not one.table.all()


def test_process_sets_are_entries_of_the_order() -> None:
    """A set exists for everybody at one place of the order; asking in a removed one is an error to the asker."""
    one = coordinator(3)
    add = spec(Kind.ADD_SET, shape=(), ranks=(0, 2))
    for rank in range(2):
        ask(one, rank, Ask(0, "noname.0.0", add))
    told = ask(one, 2, Ask(0, "noname.0.0", add))
    (bucket,) = told[1]
    assert isinstance(bucket, Bucket)
    assert bucket.result == 1
    ask(one, 0, Ask(1, "x", spec()))
    assert set(ask(one, 2, Ask(1, "x", spec()))) == {0, 2}
    (refused,) = ask(one, 1, Ask(1, "x", spec()))[1]
    assert isinstance(refused, Failure)
    assert "rank 1 is not in" in refused.text


def test_a_dead_rank_is_told_to_all_others() -> None:
    """Everyone but the dead is told; asks that come later change nothing."""
    one = coordinator(3)
    told = one.lost(1, "killed by signal 9 (SIGKILL)")
    assert [to for to, _ in told] == [0, 2]
    assert all(isinstance(message, Lost) and message.ranks == (1,) for _, message in told)
    assert one.handle(1, Request(0, 1, (Ask(0, "x", spec()),))) == []
    (failure,) = ask(one, 0, Ask(0, "x", spec()))[0]
    assert isinstance(failure, Failure)
    assert failure.error == "lost"


def test_only_the_first_loss_is_told() -> None:
    """It has ended the job on all ranks. When a large elastic job recovers, each would otherwise tell all others."""
    one = coordinator(4)
    first = Lost((1,), "killed")
    assert one.lost(1, "killed") == [(rank, first) for rank in (0, 2, 3)]
    assert one.lost(2, "killed, too") == []
    assert one.lost(0, "it has left for the next world") == []


def test_a_joined_root_cannot_broadcast() -> None:
    """A broadcast from a rank that has joined fails with words, on the ranks that wait for it."""
    one = coordinator(2)
    ask(one, 0, Ask(0, "join", spec(Kind.JOIN)))
    (failure,) = ask(one, 1, Ask(0, "b", spec(Kind.BROADCAST, root=0)))[1]
    assert isinstance(failure, Failure)
    assert "has joined" in failure.text


def _noise(rng: random.Random, epoch: int) -> Request | Leave | Frozen | Bye:
    """Something that a rank may say wrongly, too late, or twice."""
    epoch -= rng.random() < 0.1
    chance = rng.random()
    if chance < 0.1:
        return Leave(epoch, "x", rng.random() < 0.5)
    if chance < 0.4:
        return Frozen(epoch, tuple((rng.randint(-1, 2), rng.randint(-3, 9)) for _ in range(rng.randint(0, 2))))
    if chance < 0.43:
        return Bye("left", broken=rng.random() < 0.2)
    asks = []
    for _ in range(rng.randint(0, 3)):
        shape = tuple(rng.randint(-1, 3) for _ in range(rng.randint(0, 2)))
        ranks = rng.choice([None, (), (0, 1), (1,), (5,), (0,)])
        data = encode(
            Spec(rng.choice(list(Kind)), shape=shape, root=rng.randint(-2, 4), group=rng.choice([0, 2]), ranks=ranks)
        )
        if rng.random() < 0.1:
            data = rng.randbytes(rng.randint(0, 6))
        name = rng.choice(["a", "b[0]", "b[1]", "noname.0.1", "noname", "join", ""])
        rows = tuple(rng.randint(-1, 2) for _ in range(rng.randint(0, 3)))
        asks.append(Ask(rng.randint(-1, 3), name, data, rows))
    return Request(epoch, rng.randint(0, 5), tuple(asks))


@examples(150)
@given(st.integers(1, 4), st.integers(0, 1 << 30))
def test_nothing_that_a_rank_says_breaks_the_coordinator(size: int, seed: int) -> None:
    """Unreadable specs, sets that are not there, answers nobody asked for, old epochs: it never raises, and loops go on in between."""
    rng = random.Random(seed)
    one = coordinator(size)
    epoch = 0
    for _ in range(200):
        if rng.random() < 0.4:
            for rank in range(size):
                one.handle(rank, Request(one.epoch, 1, tuple(Ask(0, name, spec()) for name in "xyz")))
        else:
            one.handle(rng.randrange(size), _noise(rng, one.epoch))
        assert one.epoch >= epoch
        epoch = one.epoch
        assert 0 in one.sets
        assert all(rank < size for pending in one.table.all() for rank in one.table.missing(pending))


def test_an_ask_that_cannot_be_read_fails_on_who_asked() -> None:
    """The one rank gets words; the next ask runs."""
    one = coordinator(2)
    (failure,) = ask(one, 0, Ask(0, "x", b"?"))[0]
    assert isinstance(failure, Failure)
    assert "cannot be read" in failure.text
    (failure,) = ask(one, 0, Ask(0, "g", spec(Kind.ALLTOALL), rows=(1,)))[0]
    assert isinstance(failure, Failure)
    assert "rows [1]" in failure.text
    ask(one, 0, Ask(0, "x", spec()))
    assert isinstance(ask(one, 1, Ask(0, "x", spec()))[0][0], Bucket)


def test_a_large_grouped_call_beside_replay_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for each of its tensors, which took seconds for thousands of them."""
    count, looks = 600, [0]
    same_call = request_table._same_call

    def counted(one: PendingRequest, other: PendingRequest) -> bool:
        looks[0] += 1
        return same_call(one, other)

    monkeypatch.setattr(request_table, "_same_call", counted)

    def play(rank: int, job: Job) -> float:
        for _ in range(20):
            ddlcore.allreduce(np.ones(1), name="step")
        assert ddlcore.stats()["buckets_replayed"]
        return float(np.sum(ddlcore.grouped_allreduce([np.ones(1)] * count, name="many", op=ddlcore.Sum)))

    assert run_world(2, play) == [2.0 * count] * 2
    assert looks[0] < 40 * count
