"""Simulates the members of a large elastic job, to show what their worlds cost the coordinator. It opens no socket.

The coordinator is the real one, with the history that the launcher keeps, and with what it tells the agents of all hosts of
each world. It gets the bytes that members and agents would send and answers in bytes, of which each member gets a copy of its
own, as from a socket.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.builtin.ssh import SshLauncher
from ddlcore.contracts.launcher import AgentPlace
from ddlcore.control.post import packed
from ddlcore.control.server import Server
from ddlcore.coordinator.membership import Coordinating, ElasticMembership, MemberPatience
from ddlcore.coordinator.quorum import Quorum
from ddlcore.coordinator.sessions import Sessions
from ddlcore.launch.agents.agent_pool import AgentPool
from ddlcore.launch.agents.wire import Adopt, Look, decode_from_agent
from ddlcore.launch.agents.wire import encode as encode_for_launcher
from ddlcore.launch.job.handover import tell_of_world
from ddlcore.launch.job.history import History
from ddlcore.launch.job.network import ObservedCoordinator
from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages.coding import decode_from_coordinator, decode_to_coordinator, encode
from ddlcore.messages.elastic import NextWorld, Process, Register
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_coordinator import COMMIT, Bye, CallCount, Done, Hello, ToCoordinator
from ddlcore.messages.to_rank import AgreedCall, CountCalls, Farewell, FromCoordinator, Outgoing
from ddlcore.version import VERSION

FUSION_BYTES = 64 << 20
HOST_RANKS = 8  # ranks of one host, if the number of hosts is not given
TURN = 64  # messages that have arrived when the server looks
DEATH = "a rank dies: all register, and world 2 is announced"
HOST = "a host is lost: all others register, and world 4 is announced"
SUCCESSOR = "the launcher's host is lost, and its successor opens world 5"
# Targets for the coordinator's CPU with 10,000 members on 250 hosts.
LIMITS_S = {DEATH: 2.0, HOST: 3.0, SUCCESSOR: 3.0}
MEMORY_BYTES = 2 * 10**9  # target for the peak, of the members' side of the simulation, too


@dataclass
class WorldCost:
    """What one part of the simulation cost the coordinator: CPU seconds, messages to and from it, and their bytes."""

    cpu_s: float = 0.0
    up: int = 0
    down: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


class _Wire:
    """What agents are told, in place of the control server."""

    def __init__(self) -> None:
        self.nbytes = 0

    def tell(self, agent: int, data: bytes) -> None:
        self.nbytes += len(data)

    def give_up(self, agent: int) -> None:
        pass

    def admit(self, key: str) -> None:
        pass


class Members:
    """The members of one elastic job of ``size`` places, its coordinator, and the history of its worlds.

    Places are on ``hosts`` hosts in turn. The coordinator is on the first one; each of the others has an agent.
    """

    def __init__(self, size: int, hosts: int = 0) -> None:
        self.size, self.hosts = size, hosts or -(-size // HOST_RANKS)
        self.host_of = [place * self.hosts // size for place in map(LaunchedRank, range(size))]
        self.said: list[str] = []  # lines for the user
        self.worlds: dict[LaunchedRank, NextWorld] = {}  # by living place: the newest world of which it was told
        self.told: dict[LaunchedRank, list[FromCoordinator]] = {}  # by place: what it was told in the last turns
        self._decoded: tuple[bytes, FromCoordinator] = (b"", Farewell())
        self.wire = _Wire()
        self._coordinate(self.host_of, Coordinating(host=0), range(1, self.hosts))

    def _coordinate(self, at: list[int], coordinating: Coordinating, agents: Iterable[int]) -> None:
        """Create a new coordinator. ``at`` has the host of the process at each place, or -1 if no process runs there."""
        self.membership = ElasticMembership(at, 1, self.size, MemberPatience(600.0), 0, Quorum(), coordinating)
        sessions = Sessions(self.size, ThresholdFusion(), membership=self.membership)
        self.history = History(self.said.append)
        places = [AgentPlace(index, f"host{host}", ()) for index, host in enumerate(agents)]
        pool = AgentPool(places, SshLauncher(), self.said.append)
        pool.call((), cast(Server, self.wire), str, {}, 3.0, Look("/", (), "sh", (), "", 0, 0))
        for member in pool.members:
            member.here = True
        opened = partial(tell_of_world, pool, self.membership, self.history)
        self.coordinator = ObservedCoordinator(sessions, sessions.dead, history=self.history, opened=opened)

    def say(self, messages: Mapping[LaunchedRank, ToCoordinator]) -> WorldCost:
        """Send ``messages``, each from its place. Returns the cost until all have been answered."""
        cost = WorldCost()
        self.told.clear()
        arriving = [(place, encode(message)) for place, message in messages.items()]
        for first in range(0, len(arriving), TURN):
            turn = arriving[first : first + TURN]
            cost.up += len(turn)
            cost.up_bytes += sum(len(data) for _, data in turn)
            begin_s = time.thread_time()
            said: Outgoing[LaunchedRank] = []
            for place, data in turn:
                said += self.coordinator.handle(place, decode_to_coordinator(data))
                self.coordinator.lost()  # the server asks this after each message
            self._send(said, begin_s, cost)
        return cost

    def kill(self, places: Iterable[LaunchedRank], certain: bool = True) -> WorldCost:
        """Kill the processes at ``places``. Returns the cost until all others were told."""
        cost = WorldCost()
        self.told.clear()
        said: Outgoing[LaunchedRank] = []
        begin_s = time.thread_time()
        for place in places:
            self.worlds.pop(place, None)
            self.history.ended(End(place, -9, time.monotonic()))
            said += self.coordinator.rank_ended(place, "killed by signal 9 (SIGKILL)", certain)
        self._send(said, begin_s, cost)
        return cost

    def succeed(self, agents: list[int]) -> WorldCost:
        """Lose the coordinator with its host. Returns the cost until its successor on the first of ``agents`` has them all."""
        opened = self.membership.opened()
        assert opened is not None
        for place in [place for place in self.worlds if self.host_of[place] not in agents]:
            del self.worlds[place]
        starts = dict(opened.processes)
        running: dict[int, list[tuple[Process, int]]] = {host: [] for host in agents}
        for place in self.worlds:
            running[self.host_of[place]].append(((place, starts[place]), 1000 + place))
        told = [encode_for_launcher(Adopt(os.getpid(), tuple(running[host]), (), (opened,))) for host in agents]
        cost = WorldCost(up_bytes=sum(map(len, told)))
        begin_s = time.thread_time()
        self._coordinate([-1] * self.size, Coordinating(1 + agents[0], agents[0]), agents[1:])
        adopted = [cast(Adopt, decode_from_agent(data)) for data in told]
        processes = {process: host for host, one in zip(agents, adopted, strict=True) for process, _ in one.running}
        self.history.goes_on(opened, [place for place, _ in processes])
        self.membership.adopt([world for one in adopted for world in one.worlds], processes, ())
        cost.cpu_s += time.thread_time() - begin_s
        return cost

    def start(self, place: LaunchedRank) -> None:
        """Start another process at ``place``."""
        self.coordinator.rank_started(place)

    def _send(self, said: Outgoing[LaunchedRank], begin_s: float, cost: WorldCost) -> None:
        sent = [(place, bytes(bytearray(data))) for place, data in packed(said)]  # copies, as a socket makes them
        cost.cpu_s += time.thread_time() - begin_s
        cost.down += len(sent)
        cost.down_bytes += sum(len(data) for _, data in sent)
        for place, data in sent:
            if self._decoded[0] != data:
                self._decoded = data, decode_from_coordinator(data)
            message = self._decoded[1]
            self.told.setdefault(place, []).append(message)
            if isinstance(message, NextWorld):
                self.worlds[place] = message


def _sum(*costs: WorldCost) -> WorldCost:
    names = ("cpu_s", "up", "down", "up_bytes", "down_bytes")
    return WorldCost(*(sum(getattr(cost, name) for cost in costs) for name in names))


def play(members: Members, size: int) -> Iterator[tuple[str, WorldCost]]:
    """Play a job of ``size`` places until a rank that has died is back. Yields each part, with its cost."""
    yield (
        "the first world is announced",
        members.say({place: _register(0, -1) for place in map(LaunchedRank, range(size))}),
    )
    yield "its members arrive", members.say(_hellos(members))
    victim = LaunchedRank(size // 2)
    died = members.kill([victim])
    ready = {place: _register(1, 100 + place % 2, f"rank {victim} lost") for place in members.worlds}
    yield DEATH, _sum(died, members.say(ready))
    yield "its members arrive", members.say(_hellos(members))
    yield "the rank is back: all leave, and world 3 is announced", _let_in(members, victim)
    yield "its members arrive", members.say(_hellos(members))
    lost = members.hosts - 1
    died = members.kill(
        [place for place in map(LaunchedRank, range(size)) if members.host_of[place] == lost], certain=False
    )
    ready = {place: _register(3, 300 + place % 2, f"rank {size - 1} lost") for place in members.worlds}
    yield HOST, _sum(died, members.say(ready))
    yield "its members arrive", members.say(_hellos(members))
    came = members.succeed(list(range(1, lost)))
    ready = {place: _register(4, 400 + place % 2, "the coordinator is lost") for place in members.worlds}
    yield SUCCESSOR, _sum(came, members.say(ready))


def _let_in(members: Members, place: LaunchedRank) -> WorldCost:
    """Let a new process at ``place`` into the training, at a call of ``commit()`` that the members agree on."""
    members.start(place)
    asked = members.say({place: _register(0, -1)})
    counted = members.say(
        {one: CallCount(COMMIT, 0, 7) for one, told in members.told.items() if _has(told, CountCalls)}
    )
    agreed = [one for one, told in members.told.items() if _has(told, AgreedCall)]
    left = members.say({one: Bye("has come to an agreed call") for one in agreed})
    done = members.say({one: Done() for one, told in members.told.items() if _has(told, Farewell)})
    return _sum(asked, counted, left, done, members.say({one: _register(2, 200) for one in agreed}))


def _has(told: Iterable[FromCoordinator], kind: type[FromCoordinator]) -> bool:
    return any(isinstance(message, kind) for message in told)


def _register(generation: int, steps: int, reason: str = "") -> Register:
    return Register(PROTOCOL, VERSION, generation, steps, reason, int(bool(reason)))


def _hellos(members: Members) -> dict[LaunchedRank, ToCoordinator]:
    return {
        place: Hello(place, (), world.generation, PROTOCOL, VERSION, FUSION_BYTES)
        for place, world in members.worlds.items()
    }


def simulate_worlds(size: int, hosts: int = 0) -> bool:
    """Print what the worlds of a job of ``size`` members on ``hosts`` hosts cost, and return whether the targets were met."""
    members = Members(size, hosts)
    print(
        f"{size} members on {members.hosts} hosts; messages and bytes are those of one member, up to and down from the "
        "coordinator"
    )
    print(f"{'':66}{'CPU s':>9}{'up':>7}{'down':>7}{'KB up':>9}{'KB down':>9}{'KB an agent':>13}   target")
    met = True
    for part, cost in play(members, size):
        limit_s = LIMITS_S.get(part)
        holds = limit_s is None or cost.cpu_s <= limit_s
        met = met and holds
        target = "" if limit_s is None else f"<= {limit_s:g} s: {'ok' if holds else 'MISSED'}"
        nbytes, members.wire.nbytes = members.wire.nbytes, 0
        print(
            f"{part:66}{cost.cpu_s:9.3f}{cost.up / size:7.1f}{cost.down / size:7.1f}{cost.up_bytes / size / 1e3:9.2f}"
            f"{cost.down_bytes / size / 1e3:9.2f}{nbytes / members.hosts / 1e3:13.2f}   {target}",
            flush=True,
        )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    holds = peak_bytes <= MEMORY_BYTES
    print(
        f"peak memory of this process: {peak_bytes / 1e9:.2f} GB   <= {MEMORY_BYTES / 1e9:g} GB: {'ok' if holds else 'MISSED'}"
    )
    return met and holds
