"""Runs programs of several ranks on the real coordinator and the real tensor queues, one event at a time, in any order.

No thread, socket or clock. What the engine does with a tensor queue is written anew here, step by step, so that a
schedule can put anything between any two steps. Collectives are matched by hand: each carries whose call it holds, or
that it holds a dummy.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.coordinator.coordinator import Coordinator
from ddlcore.coordinator.tuning import SearchDriver
from ddlcore.messages.coding import decode_spec
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.to_coordinator import Bye, Frozen, Leave, Paused, Request, ToCoordinator
from ddlcore.messages.to_rank import (
    Adjust,
    Answer,
    Bucket,
    Drain,
    Farewell,
    Freeze,
    FromCoordinator,
    Resume,
)
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.decisions import Decisions
from ddlcore.runtime.epochs import Epochs
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.launching_alone import launch_unnamed
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import ANONYMOUS, Entry, PersistentRequest, Todo
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.submission import Submission
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.types import Buffer, DType, Kind
from tests.runtime.deeds import Call, Join, Meet, Order, Program, Wait
from tests.runtime.waiting import waiter_of
from tests.runtime.wire import Content, Flight, Sets, Wire

__all__ = ["Machines"]

_RESUMABLE: Any = "a user's thread may run the bucket"


class _Node:
    """One rank: its tensor queue, its engine's place, the line to and from the coordinator."""

    def __init__(self, world: Machines, rank: int, program: Program, depth: int) -> None:
        self.world, self.rank, self.program, self.depth = world, rank, program, depth
        self.completion = Completion()
        self.tensor_queue = TensorQueue(self.completion, Outbox(lambda: None))
        self.submission, self.epochs = Submission(self.tensor_queue), Epochs(self.tensor_queue)
        self.waiter = waiter_of(self.completion)
        self.up: deque[ToCoordinator] = deque()
        self.down: deque[FromCoordinator] = deque()
        self.decisions = Decisions(self.tensor_queue, self.epochs, self)
        self.queue: deque[Todo] = deque()
        self.flights: list[Flight] = []
        self.dummies: deque[Launch[Entry]] = deque()
        self.verdict: Drain | None = None  # a drain under way
        self.held: list[tuple[Launch[Entry], bool]] = []
        self.position = [0] * len(program)
        self.handles: dict[str, Handle | PersistentRequest] = {}
        self.request: dict[tuple[int, str, bytes], PersistentRequest] = {}
        self.lacking: dict[str, int] = {}  # by call: entries not done
        self.failed: set[str] = set()
        self.calls: dict[tuple[int, str], int] = {}
        self.content: dict[int, tuple[str, int]] = {}  # by id of an entry
        self.labels: dict[int, str] = {}
        self.entries: list[Entry] = []  # keeps the ids unique
        self.joined = False
        self.parted = False
        self.adjusted: list[dict[str, str | int | float | bool]] = []  # what it was told, in the total order
        self.messages = self.unnamed = self.replayed = self.void = self.negotiated = self.left = 0

    # --- the user's threads

    def can_do(self, thread: int) -> bool:
        if self.position[thread] == len(self.program[thread]) or self.parted:
            return False
        deed = self.program[thread][self.position[thread]]
        if isinstance(deed, Wait):
            return self.lacking[deed.label] == 0
        if isinstance(deed, Meet):
            return self.world.at(deed) == deed.parties
        return not (isinstance(deed, Join) and self.lacking.get(deed.label, 0))

    def do(self, thread: int) -> None:
        deed = self.program[thread][self.position[thread]]
        if isinstance(deed, Meet):
            self.world.pass_by(deed)
            return
        if isinstance(deed, Join):
            if deed.label not in self.lacking:
                self._submit(deed.label, 0, [("join", self.world.join_spec)])
                return
            self.tensor_queue.unnamed.next_generation()
        elif isinstance(deed, Call):
            self._submit(deed.label, deed.set_id, deed.tensors)
        elif isinstance(deed, Wait):
            self.handles[deed.label].poll()
        else:
            self.parted = True
            self.tensor_queue.refuse(lambda: RuntimeError("left"))
            self.up.append(Bye("left"))
        self.position[thread] += 1

    def _submit(self, label: str, set_id: int, tensors: Sequence[tuple[str, bytes]]) -> None:
        self.lacking[label] = len(tensors)
        if len(tensors) == 1 and self._recurs(*tensors[0]):
            self._start(label, set_id, *tensors[0])
            return
        if len(tensors) == 1 and not tensors[0][0] and self._run_unnamed(label, set_id, tensors[0][1]):
            return
        handle = Handle(self.waiter, len(tensors), lambda outcomes: None)
        self.handles[label] = handle
        entries = []
        for number, (name, data) in enumerate(tensors):
            spec = decode_spec(data)
            rows = (self.rank,) * (len(self.world.sets[set_id]) if spec.kind is Kind.ALLTOALL else 1)
            entry = Entry(
                handle, number, set_id, name or ANONYMOUS, spec, data, rows=rows if spec.kind.is_ragged else ()
            )
            self.submission.name([entry])
            self._count(label, entry)
            entries.append(entry)
        self.entries += entries
        self.submission.submit(entries)

    def _run_unnamed(self, label: str, set_id: int, data: bytes) -> bool:
        """Have a user's thread launch a call without a name, if the engine is idle; return whether it could.

        Each rank does so with other calls. The engine goes on with the bucket, as after a signal.
        """
        chosen = zlib.crc32(label.encode()) >> self.rank & 1
        if not chosen or decode_spec(data).kind is not Kind.ALLREDUCE:
            return False
        if self.verdict is not None or self.queue or len(self.flights) >= self.depth:
            return False
        entry = self.request.get((set_id, "", data))
        if entry is None:
            buffer = Buffer(0, 0, DType.F32, ())
            entry = PersistentRequest(self.waiter, set_id, ANONYMOUS, decode_spec(data), data, buffer)
            self.request[set_id, "", data] = entry
        with self.tensor_queue.lock:
            if self.tensor_queue.replay is not None:
                self.tensor_queue.replay.current.resumable = _RESUMABLE
            launch = launch_unnamed(self.tensor_queue, 1, entry, 0, None, 0)
            self.tensor_queue.running, self.tensor_queue.own = 0, None
        if launch is None:
            return False
        self.unnamed += 1
        self.handles[label] = entry
        self._count(label, entry)
        self._enter(launch)
        return True

    def _recurs(self, name: str, data: bytes) -> bool:
        """Half of the named allreduces are persistent requests, others on each rank."""
        spec = decode_spec(data)
        return bool(name) and spec.kind is Kind.ALLREDUCE and not spec.group and zlib.crc32(data) >> self.rank & 1 == 1

    def _start(self, label: str, set_id: int, name: str, data: bytes) -> None:
        entry = self.request.get((set_id, name, data))
        if entry is None:
            buffer = Buffer(0, 0, DType.F32, ())
            entry = PersistentRequest(self.waiter, set_id, name, decode_spec(data), data, buffer)
            self.request[set_id, name, data] = entry
        self.handles[label] = entry
        self._count(label, entry)
        self.submission.start_request(entry, 0, None)

    def _count(self, label: str, entry: Entry) -> None:
        key = (entry.set_id, entry.name)
        self.calls[key] = self.calls.get(key, -1) + 1
        self.content[id(entry)] = (entry.name, self.calls[key])
        self.labels[id(entry)] = label

    # --- the control thread

    def ask(self) -> bool:
        request = self.tensor_queue.take_request()
        if request is not None:
            self.up.append(request)
        return request is not None

    def pause(self) -> None:
        pause = self.tensor_queue.take_pause()
        if pause is not None:
            self.up.append(pause)

    def receive(self) -> None:
        message = self.down.popleft()
        self.messages += 1
        if isinstance(message, Answer):
            self.decisions.answer(message)
        elif isinstance(message, Freeze):
            frozen = self.decisions.freeze(message)
            if frozen is not None:
                self.up.append(frozen)
        elif isinstance(message, Drain):
            self.decisions.drain(message)
        else:
            assert isinstance(message, Farewell)

    # --- the engine, in whose queue the decisions are posted

    def post(self, item: Todo) -> None:
        self.queue.append(item)

    def adjust(self, message: Adjust) -> None:
        self.adjusted.append(dict(message.values))

    def fail(self, entries: Sequence[Entry | None], error: BaseException | None) -> None:
        for entry in entries:
            if entry is not None:
                self._done(entry, None, -1, failed=True)

    def can_engage(self) -> bool:
        """Whether the engine can begin something."""
        if len(self.flights) >= self.depth:
            return False
        if self.verdict is not None:
            return bool(self.dummies) or not self.flights
        if self.queue:
            return isinstance(self.queue[0], tuple) or not self.flights
        return self._is_ready()

    def _is_ready(self) -> bool:
        replay = self.tensor_queue.replay
        return replay is not None and replay.ready()

    def engage(self) -> None:
        if self.verdict is not None:
            if self.dummies:
                self._enter(self.dummies.popleft())
            else:
                self._judge()
            return
        if self.queue:
            todo = self.queue.popleft()
            if isinstance(todo, tuple):
                self._run(*todo)
            else:
                todo()
            return
        with self.tensor_queue.lock:
            launch = self.tensor_queue.launch()
        assert launch is not None
        self._enter(launch)

    def _run(self, bucket: Bucket, entries: list[Entry | None]) -> None:
        self.world.order[self.rank].append(bucket.index)
        if bucket.kind is Kind.JOIN:
            self.joined = False
            self._finish_bucket(bucket, entries)
            return
        contents = tuple(self.content[id(entry)] if entry is not None else None for entry in entries)
        assert bucket.specs or None not in contents, "a dummy in a bucket that was negotiated"
        number = self.world.wire.enter(bucket.set_id, self.rank, ("negotiated", bucket.index, bucket.names), contents)
        self.flights.append(Flight(bucket.set_id, number, lambda: self._finish_bucket(bucket, entries)))

    def _finish_bucket(self, bucket: Bucket, entries: list[Entry | None]) -> None:
        self.negotiated += 1
        if bucket.kind is Kind.ADD_SET and entries[0] is not None:
            self.world.add_set(bucket.result, entries[0].spec.ranks or ())
        for entry in entries:
            if entry is not None:
                self._done(entry, None, bucket.index)

    def _enter(self, launch: Launch[Entry]) -> None:
        planned = launch.planned
        contents: tuple[Content, ...] = (None,) * len(planned.names)
        if launch.entries is not None:
            contents = tuple(self.content[id(entry)] for entry in launch.entries)
        assert (launch.bucket is not None) == planned.negotiated or launch.entries is None
        signature = ("replayed", self.tensor_queue.epoch, launch.place, launch.bucket.index if launch.bucket else -1)
        number = self.world.wire.enter(planned.set_id, self.rank, signature, contents)
        drained = self.verdict is not None
        self.flights.append(Flight(planned.set_id, number, lambda: self._returned(launch, number, drained)))

    def _returned(self, launch: Launch[Entry], number: int, drained: bool) -> None:
        if drained:
            return
        real = self.world.wire.real(launch.planned.set_id, number)
        with self.tensor_queue.lock:
            frozen = self.tensor_queue.frozen
        if frozen:
            self.held.append((launch, real))
            return
        assert real, "a bucket with a dummy in it was handed over"
        self._hand_over(launch)

    def _hand_over(self, launch: Launch[Entry]) -> None:
        assert launch.entries is not None
        self.replayed += 1
        self.tensor_queue.delivered(launch)
        for entry in launch.entries:
            self._done(entry, None, -1)

    def drain(self, message: Drain) -> None:
        self.verdict = message
        self.dummies = deque(self.tensor_queue.drain(dict(message.highest)))

    def _judge(self) -> None:
        message, self.verdict = self.verdict, None
        assert message is not None
        lowest = dict(message.lowest)
        held, self.held = self.held, []
        for launch, real in held:
            valid = launch.place <= lowest[launch.planned.set_id]
            if not launch.planned.negotiated:
                assert valid == real, "the verdict of Drain is not the truth"
            if valid:
                self._hand_over(launch)
            else:
                self.void += 1
                assert self.tensor_queue.put_back(launch)
        if not any(isinstance(item, Resume) for item in message.items):
            self.epochs.discover(message.epoch + 1)

    def resume(self, message: Resume) -> None:
        frozen = self.epochs.resume(message, self.world.sets, self.rank)
        if frozen is not None:
            self.up.append(frozen)

    def _done(self, entry: Entry, outcome: Outcome | None, index: int, failed: bool = False) -> None:
        label = self.labels[id(entry)]
        if failed:
            self.failed.add(label)
            self.lacking[label] = 0
            entry.handle.fail(RuntimeError("failed"))
            return
        assert label in self.failed or self.lacking[label] > 0, f"{label} was done twice"
        self.lacking[label] = max(0, self.lacking[label] - 1)
        entry.handle.complete(entry.number, outcome, index)

    # --- the deadline

    def can_leave(self) -> bool:
        """Whether something has waited for its place: the engine, or who watches it, may find it too long."""
        with self.tensor_queue.lock:
            waits = self.tensor_queue.waits_since_s is not None or self.tensor_queue.conflict
            return waits and self.tensor_queue.open is not None and not (self.world.blind and self.flights)

    def leave(self) -> None:
        with self.tensor_queue.lock:
            epoch = self.tensor_queue.epoch
            self.tensor_queue.waits_since_s, self.tensor_queue.conflict = None, False
        self.left += 1
        self.up.append(Leave(epoch, "waited too long", slow=bool(self.flights)))  # as the control thread would say it


class Machines:
    """A world of ranks with one program each. ``depth``: collectives an engine may be in at once.

    ``blind``: a deadline passes only while the engine is in no collective.
    """

    def __init__(
        self,
        sets: Sets,
        programs: Sequence[Program],
        *,
        replay: bool = True,
        fusion_bytes: int = 1 << 20,
        depth: int = 1,
        blind: bool = False,
        join_spec: bytes = b"",
        driver: SearchDriver | None = None,
    ) -> None:
        self.sets = dict(sets)
        self.blind = blind
        self.join_spec = join_spec
        self.coordinator = Coordinator(len(sets[0]), ThresholdFusion(), fusion_bytes, replay, driver=driver)
        self.coordinator.sets.update({set_id: tuple(map(WorldRank, ranks)) for set_id, ranks in sets.items()})
        self.coordinator._negotiation._next_set = len(sets)
        self.wire = Wire(sets)
        self.order: list[list[int]] = [[] for _ in programs]
        self.nodes = [_Node(self, rank, program, depth) for rank, program in enumerate(programs)]
        self.events = 0

    def add_set(self, set_id: int, ranks: tuple[int, ...]) -> None:
        self.sets[set_id] = self.wire.sets[set_id] = ranks

    def at(self, meet: Meet) -> int:
        """How many threads stand at this meeting."""
        return sum(self._stands(node, thread, meet) for node in self.nodes for thread in range(len(node.program)))

    def pass_by(self, meet: Meet) -> None:
        for node in self.nodes:
            for thread in range(len(node.program)):
                node.position[thread] += self._stands(node, thread, meet)

    def _stands(self, node: _Node, thread: int, meet: Meet) -> bool:
        row, position = node.program[thread], node.position[thread]
        return position < len(row) and row[position] == meet

    def run(self, order: Order, most: int = 1_000_000) -> None:
        """Until nothing can happen any more, deadlines included."""
        while True:
            self.events += 1
            assert self.events < most, "it goes on for ever"
            actors, deeds = self._possible()
            late = [node for node in self.nodes if node.can_leave()]
            if late and (not deeds or order.rng.random() < order.eager):
                order.rng.choice(late).leave()
            elif deeds:
                deeds[order.choose(actors)]()
            else:
                return

    def _possible(self) -> tuple[list[str], list[Callable[[], object]]]:
        actors: list[str] = []
        deeds: list[Callable[[], object]] = []

        def may(actor: str, deed: Callable[[], object]) -> None:
            actors.append(actor)
            deeds.append(deed)

        for node in self.nodes:
            rank = node.rank
            for thread in range(len(node.program)):
                if node.can_do(thread):
                    may(f"user {rank}.{thread}", lambda node=node, thread=thread: node.do(thread))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
            tensor_queue = node.tensor_queue
            if tensor_queue.unsent and not tensor_queue.unanswered and not tensor_queue.frozen:
                may(f"ask {rank}", node.ask)
            if tensor_queue.pauses.message is not None:
                may(f"pause {rank}", node.pause)
            if node.up:
                may(f"up {rank}", lambda node=node: self._deliver(node))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
            if node.down:
                may(f"down {rank}", node.receive)
            if node.can_engage():
                may(f"engine {rank}", node.engage)
            for flight in node.flights:
                if self.wire.is_complete(flight.set_id, flight.number):
                    may(f"flight {rank}", lambda node=node, flight=flight: self._land(node, flight))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
        return actors, deeds

    def _deliver(self, node: _Node) -> None:
        message = node.up.popleft()
        node.messages += 1
        assert isinstance(message, (Request, Bye, Leave, Frozen, Paused))
        for to, answer in self.coordinator.handle(WorldRank(node.rank), message):
            self.nodes[to].down.append(answer)

    def _land(self, node: _Node, flight: Flight) -> None:
        node.flights.remove(flight)
        flight.finish()

    # --- afterwards

    def done(self) -> list[set[str]]:
        """By rank: the calls that ended well."""
        return [{label for label, n in node.lacking.items() if not n} - node.failed for node in self.nodes]

    def failed(self) -> list[set[str]]:
        return [node.failed for node in self.nodes]

    def has_ended(self) -> bool:
        """Whether every thread has come to the end of its program."""
        return all(position == len(row) for node in self.nodes for position, row in zip(node.position, node.program))

    def unnamed(self) -> int:
        """How many calls without a name the users' threads have launched, over all ranks."""
        return sum(node.unnamed for node in self.nodes)

    def replayed(self) -> int:
        """How many buckets of schedules were handed over, over all ranks."""
        return sum(node.replayed for node in self.nodes)

    def check_rest(self) -> None:
        """Nothing is lost, and who is not in a collective that lacks somebody has nothing under way."""
        for node in self.nodes:
            assert node.verdict is None and not node.held and not node.queue
            undone = {label for label, lacking in node.lacking.items() if lacking}
            held = [
                *node.tensor_queue.unfinished.entries.values(),
                *(one for one in node.tensor_queue.unfinished.requests.values() if one.pending),
                *(one for launch in node.tensor_queue.launches.values() for one in launch.entries or ()),
            ]
            assert undone == {node.labels[id(entry)] for entry in held}
            assert bool(node.tensor_queue.launches) == bool(node.flights)
            assert own_order_is_total(self.order[node.rank])
        assert len({node.tensor_queue.epoch for node in self.nodes if not node.parted}) <= 1


def own_order_is_total(indexes: Sequence[int]) -> bool:
    return list(indexes) == sorted(set(indexes))
