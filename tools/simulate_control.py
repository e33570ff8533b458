"""Shows what control costs: the coordinator's CPU time for N ranks × T tensors in discovery, in replay, and between.

    python tools/simulate_control.py [--ranks 512,4096] [--tensors 400] [--steps 2]
    python tools/simulate_control.py --elastic 10000 --hosts 250    the worlds of an elastic job, see tools/elastic/members.py
    python tools/simulate_control.py --network 256      the real sockets instead, see tools/crowd_control.py

The coordinator is the real one: it gets the bytes that the ranks would send, and answers in bytes; only the network is
left out. A virtual clock decides what arrives when: tensors become ready over BACKWARD_S of a step, on each rank at
slightly different times; a rank has at most one unanswered request; the coordinator handles everything that has arrived
in one turn. CPU seconds are those of decoding, deciding and encoding, measured on this machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds modules in its own folder only

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.control.post import packed
from ddlcore.coordinator.sessions import Sessions
from ddlcore.messages.coding import decode_from_coordinator, decode_to_coordinator, encode
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL, Ask, Spec
from ddlcore.messages.to_coordinator import Bye, Frozen, Hello, Leave, Request, ToCoordinator
from ddlcore.messages.to_rank import Answer, Arranged, Bucket, Drain, Farewell, Freeze, FromCoordinator, Resume, Welcome
from ddlcore.runtime.schedule import Offer, Replay, Schedule
from ddlcore.types import DType, Kind, ReduceOp
from tools.elastic.members import simulate_worlds

BACKWARD_S = 0.030  # time over which a step's tensors become ready
SKEW_S = 0.002  # by how much a tensor's time differs from rank to rank (standard deviation)
LATENCY_S = 0.0002  # of a message, one way
MESSAGE_S = 15e-6  # coordinator's time for one message sent or received, as tools/crowd_control.py shows
TARGET_S = 0.5  # for a discovered step with the numbers of ranks and tensors below
TARGET_RANKS, TARGET_TENSORS = 512, 400
FUSION_BYTES = 64 << 20


@dataclass
class Cost:
    """What one part of the simulation cost the coordinator."""

    cpu_s: float = 0.0
    requests: int = 0
    up: int = 0  # messages to the coordinator
    down: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    buckets: int = 0  # that rank 0 was told to run, or has launched by itself in replay


@dataclass
class Rank:
    """One rank, as the coordinator sees it: its tensor queue, and the schedule that it replays."""

    rank: int
    size: int
    epoch: int = 0
    serial: int = 0
    unanswered: bool = False
    pending: dict[str, Ask] = field(default_factory=dict)
    unsent: list[Ask] = field(default_factory=list)
    schedules: dict[int, Arranged] = field(default_factory=dict)
    replay: Replay[Ask] | None = None
    buckets: int = 0
    coming: deque[tuple[float, Ask]] = field(default_factory=deque)  # (when, what) becomes ready in this step

    def submit(self, ask: Ask) -> None:
        """Submit a tensor, as the user's thread does."""
        self.pending[ask.name] = ask
        self._place(ask)

    def _place(self, ask: Ask) -> None:
        if (
            self.replay is None
            or self.replay.frozen
            or self.replay.offer(ask.set_id, ask.name, False, ask.spec, ask) is not Offer.TAKEN
        ):
            self.unsent.append(ask)

    def launch(self) -> None:
        """Launch what is ready, as the engine does."""
        while self.replay is not None and self.replay.ready():
            for ask in self.replay.launch().entries or ():
                del self.pending[ask.name]
            self.buckets += 1

    def request(self) -> Request | None:
        """Return the next request, or None if there is nothing to send or a request is unanswered."""
        if self.unanswered or not self.unsent or (self.replay is not None and self.replay.frozen):
            return None
        self.unanswered = True
        self.serial += 1
        asks, self.unsent = tuple(self.unsent), []
        return Request(self.epoch, self.serial, asks)

    def receive(self, message: FromCoordinator) -> ToCoordinator | None:
        """Return the immediate reply to ``message``, or None."""
        if isinstance(message, Answer):
            if message.serial == self.serial:
                self.unanswered = False
            self._items(message.items)
        elif isinstance(message, Freeze):
            assert self.replay is not None
            return Frozen(message.epoch, self.replay.freeze())
        elif isinstance(message, Drain):
            assert self.replay is not None
            assert not self.replay.drain(dict(message.highest)), "all ranks had launched the same"
            self.replay = None
            self._enter(message.epoch + 1, None)
            self._items(message.items)
        else:
            assert isinstance(message, (Welcome, Farewell)), message
        return None

    def _items(self, items: tuple[object, ...]) -> None:
        for item in items:
            if isinstance(item, Bucket):
                for name in item.names:
                    del self.pending[name]
                self.buckets += 1
            elif isinstance(item, Arranged):
                self.schedules[item.schedule] = item
            else:
                assert isinstance(item, Resume), item
                schedule = Schedule(self.schedules[item.schedule], {0: range(self.size)}, self.rank)
                self._enter(item.epoch, Replay(schedule, item.start, dict(item.after)))

    def _enter(self, epoch: int, replay: Replay[Ask] | None) -> None:
        self.epoch, self.replay, self.unanswered, self.unsent = epoch, replay, False, []
        for ask in self.pending.values():
            self._place(ask)
        self.launch()


class World:
    """All ranks, the coordinator, and the virtual time."""

    def __init__(self, size: int, tensors: int, seed: int = 0) -> None:
        self.sessions = Sessions(size, ThresholdFusion())
        self.ranks = [Rank(rank, size) for rank in range(size)]
        self.asks = [
            _ask(f"layer{i // 2}.{'bias' if i % 2 else 'weight'}", (64, 64) if i % 2 else (64,)) for i in range(tensors)
        ]
        self.now_s = 0.0
        self._rng = np.random.default_rng(seed)
        self._events: list[tuple[float, int, str, int, bytes]] = []  # (when, tie, what, rank, data)
        self._ties = itertools.count()
        self._arrived: list[tuple[int, bytes]] = []
        self._turn_due = False
        self._last: tuple[bytes, FromCoordinator] = (b"", Farewell())

    def step(self, asks: Sequence[Ask]) -> Cost:
        """Make ``asks`` ready on all ranks during one step. Return the cost of control until all of them ran."""
        start_s = self.now_s + np.linspace(0.0, BACKWARD_S, len(asks))
        for rank in self.ranks:
            times = start_s + np.abs(self._rng.normal(0.0, SKEW_S, len(asks)))
            rank.coming = deque((float(times[i]), asks[i]) for i in np.argsort(times))
        return self._play()

    def say(self, messages: Mapping[int, ToCoordinator]) -> Cost:
        """Send messages that no tensor causes. Return the cost of these and of everything that follows."""
        return self._play(messages)

    def _play(self, messages: Mapping[int, ToCoordinator] | None = None) -> Cost:
        self.cost = Cost()
        before = self.ranks[0].buckets
        for number, message in (messages or {}).items():
            self._send(number, message)
        for rank in self.ranks:
            self._go_on(rank)
        while self._events:
            self.now_s, _, what, number, data = heapq.heappop(self._events)
            if what == "up":
                self._arrived.append((number, data))
                if not self._turn_due:
                    self._turn_due = True
                    self._at(0.0, "turn")
            elif what == "turn":
                self._turn()
            elif what == "down":
                self._hear(self.ranks[number], data)
            else:
                self._go_on(self.ranks[number])
        assert not any(rank.pending or rank.coming for rank in self.ranks), "every tensor has run everywhere"
        self.cost.buckets = self.ranks[0].buckets - before
        return self.cost

    # --- a rank's side

    def _go_on(self, rank: Rank) -> None:
        """Submit what has become ready by now, and send what there is to send."""
        while rank.coming and rank.coming[0][0] <= self.now_s:
            rank.submit(rank.coming.popleft()[1])
        rank.launch()
        request = rank.request()
        if request is not None:
            self.cost.requests += 1
            self._send(rank.rank, request)
        elif rank.coming and not rank.unanswered:
            self._at(rank.coming[0][0] - self.now_s, "ready", rank.rank)

    def _hear(self, rank: Rank, data: bytes) -> None:
        if self._last[0] is not data:
            self._last = data, decode_from_coordinator(data)
        reply = rank.receive(self._last[1])
        if reply is not None:
            self._send(rank.rank, reply)
        self._go_on(rank)

    def _send(self, rank: int, message: ToCoordinator) -> None:
        data = encode(message)
        self.cost.up += 1
        self.cost.up_bytes += len(data)
        self._at(LATENCY_S, "up", rank, data)

    # --- the coordinator's side

    def _turn(self) -> None:
        """Answer what has arrived, as Server does; what arrives meanwhile waits for the next turn."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            self._turn_due = False
            return
        begin_s = time.thread_time()
        said = [
            one
            for rank, data in arrived
            for one in self.sessions.handle(LaunchedRank(rank), decode_to_coordinator(data))
        ]
        told = packed(said)
        self.cost.cpu_s += time.thread_time() - begin_s
        busy_s = MESSAGE_S * (len(arrived) + len(told))
        for to, data in told:
            self.cost.down += 1
            self.cost.down_bytes += len(data)
            self._at(busy_s + LATENCY_S, "down", to, data)
        self._at(busy_s, "turn")

    def _at(self, in_s: float, what: str, rank: int = -1, data: bytes = b"") -> None:
        heapq.heappush(self._events, (self.now_s + in_s, next(self._ties), what, rank, data))


def _ask(name: str, shape: tuple[int, ...]) -> Ask:
    return Ask(0, name, encode(Spec(Kind.ALLREDUCE, DType.F32, shape, ReduceOp.Average)))


def program(world: World, steps: int) -> Iterator[tuple[str, Cost]]:
    """Yield the parts of a job from its first message to its last: the name of each part, and its cost."""
    size = len(world.ranks)
    ranks = tuple(map(LaunchedRank, range(size)))
    yield "init", world.say({rank: Hello(rank, ranks, 1, PROTOCOL, "", FUSION_BYTES) for rank in ranks})
    yield "discovered, the first", world.step(world.asks)
    yield "discovered, a later one", world.step(world.asks)
    yield "discovered, arranged at its end", world.step(world.asks)
    assert all(rank.replay is not None for rank in world.ranks), "the third equal step begins replay"
    for _ in range(steps):
        yield "replayed", world.step(world.asks)
    yield "a metric: freeze, drain, resume", world.step([_ask("metric", ())])
    assert all(rank.replay is not None for rank in world.ranks), "an insertion does not end replay"
    yield "replayed", world.step(world.asks)
    yield "a rank leaves: freeze, drain", world.say({0: Leave(world.ranks[0].epoch, "a tensor has another shape")})
    assert not any(rank.replay is not None for rank in world.ranks), "a divergence ends it"
    yield "discovered, after leaving", world.step(world.asks)
    yield "shutdown", world.say({rank: Bye("shutdown") for rank in ranks})


def verdict(stretch: str, cost: Cost) -> str:
    """Return "ok" or "MISSED" for a part that has a target, and otherwise ""."""
    if stretch == "replayed":
        return "ok" if cost.up == cost.down == 0 and cost.cpu_s == 0.0 and cost.buckets > 0 else "MISSED"
    if stretch.startswith("discovered"):
        return "ok" if cost.cpu_s <= TARGET_S else "MISSED"
    return ""


def simulate(ranks: int, tensors: int, steps: int) -> bool:
    """Print one table, and return whether all targets that apply were met."""
    applies = ranks <= TARGET_RANKS and tensors <= TARGET_TENSORS
    print(
        f"{ranks} ranks x {tensors} tensors; messages and bytes are those of one rank, up to and down from the coordinator"
    )
    print(f"{'':32}{'CPU s':>9}{'buckets':>9}{'up':>7}{'down':>7}{'KB up':>9}{'KB down':>9}   target")
    met = True
    for stretch, cost in program(World(ranks, tensors), steps):
        word = verdict(stretch, cost) if applies or stretch == "replayed" else ""
        met = met and word != "MISSED"
        limit = "" if not word else "0 messages, 0 s: " if stretch == "replayed" else f"{TARGET_S:g} s: "
        print(
            f"{stretch:32}{cost.cpu_s:9.3f}{cost.buckets:9d}{cost.up / ranks:7.1f}{cost.down / ranks:7.1f}"
            f"{cost.up_bytes / ranks / 1e3:9.2f}{cost.down_bytes / ranks / 1e3:9.2f}   {limit}{word}",
            flush=True,
        )
    print()
    return met


def main() -> int:
    """Run the simulations and return the exit status: 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="512,4096", help="how many, separated by commas (default %(default)s)")
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--steps", type=int, default=2, help="replayed steps in a row")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="exit 1 on a miss")
    parser.add_argument("--elastic", type=int, metavar="MEMBERS", help="simulate the worlds of an elastic job")
    parser.add_argument("--hosts", type=int, default=0, help="on how many hosts its members are (default: 8 on each)")
    parser.add_argument("--network", type=int, metavar="CLIENTS", help="try the control network with so many clients")
    options = parser.parse_args()
    if options.network:  # in a fresh process, because its CPU time is printed
        crowd = Path(__file__).with_name("crowd_control.py")
        arguments = [f"--clients={options.network}", f"--tensors={options.tensors}"]
        return subprocess.run([sys.executable, str(crowd), *arguments], check=False).returncode
    if options.elastic:
        return 0 if simulate_worlds(options.elastic, options.hosts) or not options.check else 1
    met = [simulate(int(ranks), options.tensors, options.steps) for ranks in options.ranks.split(",")]
    return 0 if all(met) or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
