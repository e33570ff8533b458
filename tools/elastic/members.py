"""Simulates the members of a large elastic job, to show what their worlds cost the coordinator. It opens no socket.

The coordinator is the real one, with the history that the launcher keeps. It gets the bytes that the members would send
and answers in bytes, of which each member gets a copy of its own, as from a socket.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.control.coordinator_protocol import Outgoing
from ddlcore.control.post import packed
from ddlcore.coordinator.membership import MemberPatience, Membership
from ddlcore.coordinator.sessions import Sessions
from ddlcore.job import VERSION
from ddlcore.launch.job.history import History
from ddlcore.launch.job.network import FailureLog
from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages import (
    COMMIT,
    PROTOCOL,
    AgreedCall,
    Bye,
    CallCount,
    CountCalls,
    Done,
    Farewell,
    FromCoordinator,
    Hello,
    Register,
    ToCoordinator,
    World,
    decode_from_coordinator,
    decode_to_coordinator,
    encode,
)

FUSION_BYTES = 64 << 20
HOST_RANKS = 8  # ranks of one host
TURN = 64  # messages that have arrived when the server looks
DEATH = "a rank dies: all register, and world 2 is announced"
DEATH_S = 2.0  # target for it with 4096 members, of the coordinator's CPU
MEMORY_BYTES = 10**9  # target for the peak, of the members' side of the simulation, too


@dataclass
class WorldCost:
    """What one part of the simulation cost the coordinator: CPU seconds, messages to and from it, and their bytes."""

    cpu_s: float = 0.0
    up: int = 0
    down: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


class Members:
    """The members of one elastic job of ``size`` places, its coordinator, and the history of its worlds."""

    def __init__(self, size: int) -> None:
        hosts = [place // HOST_RANKS for place in range(size)]
        self.membership = Membership(hosts, 1, size, MemberPatience(600.0))
        sessions = Sessions(size, ThresholdFusion(), membership=self.membership)
        self.said: list[str] = []  # lines for the user
        self.coordinator = FailureLog(sessions, sessions.dead)
        self.history = self.coordinator.history = History(self.said.append)
        self.worlds: dict[int, World] = {}  # by living place: the newest world of which it was told
        self.told: dict[int, list[FromCoordinator]] = {}  # by place: what it was told in the last turns
        self._decoded: tuple[bytes, FromCoordinator] = (b"", Farewell())

    def say(self, messages: Mapping[int, ToCoordinator]) -> WorldCost:
        """Send ``messages``, each from its place. Returns the cost until all have been answered."""
        cost = WorldCost()
        self.told.clear()
        arriving = [(place, encode(message)) for place, message in messages.items()]
        for first in range(0, len(arriving), TURN):
            turn = arriving[first : first + TURN]
            cost.up += len(turn)
            cost.up_bytes += sum(len(data) for _, data in turn)
            begin_s = time.thread_time()
            said: Outgoing = []
            for place, data in turn:
                said += self.coordinator.handle(place, decode_to_coordinator(data))
                self.coordinator.lost()  # the server asks this after each message
            self._send(said, begin_s, cost)
        return cost

    def kill(self, place: int) -> WorldCost:
        """Kill the process at ``place``. Returns the cost until all others were told."""
        cost = WorldCost()
        self.told.clear()
        del self.worlds[place]
        begin_s = time.thread_time()
        self.history.ended(End(place, -9, time.monotonic()))
        self._send(self.coordinator.rank_ended(place, "killed by signal 9 (SIGKILL)"), begin_s, cost)
        return cost

    def start(self, place: int) -> None:
        """Start another process at ``place``."""
        self.coordinator.rank_started(place)

    def _send(self, said: Outgoing, begin_s: float, cost: WorldCost) -> None:
        sent = [(place, bytes(bytearray(data))) for place, data in packed(said)]  # copies, as a socket makes them
        cost.cpu_s += time.thread_time() - begin_s
        cost.down += len(sent)
        cost.down_bytes += sum(len(data) for _, data in sent)
        for place, data in sent:
            if self._decoded[0] != data:
                self._decoded = data, decode_from_coordinator(data)
            message = self._decoded[1]
            self.told.setdefault(place, []).append(message)
            if isinstance(message, World):
                self.worlds[place] = message


def _sum(*costs: WorldCost) -> WorldCost:
    names = ("cpu_s", "up", "down", "up_bytes", "down_bytes")
    return WorldCost(*(sum(getattr(cost, name) for cost in costs) for name in names))


def play(members: Members, size: int) -> Iterator[tuple[str, WorldCost]]:
    """Play a job of ``size`` places until a rank that has died is back. Yields each part, with its cost."""
    yield "the first world is announced", members.say({place: _register(0, -1) for place in range(size)})
    yield "its members arrive", members.say(_hellos(members))
    victim = size // 2
    died = members.kill(victim)
    ready = {place: _register(1, 100 + place % 2, f"rank {victim} lost") for place in members.worlds}
    yield DEATH, _sum(died, members.say(ready))
    yield "its members arrive", members.say(_hellos(members))
    yield "the rank is back: all leave, and world 3 is announced", _let_in(members, victim)
    yield "its members arrive", members.say(_hellos(members))


def _let_in(members: Members, place: int) -> WorldCost:
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


def _hellos(members: Members) -> dict[int, ToCoordinator]:
    return {
        place: Hello(place, (), world.generation, PROTOCOL, VERSION, FUSION_BYTES)
        for place, world in members.worlds.items()
    }


def simulate_worlds(size: int) -> bool:
    """Print what the worlds of a job of ``size`` members cost, and return whether the targets were met."""
    print(f"{size} members; messages and bytes are those of one member, up to and down from the coordinator")
    print(f"{'':56}{'CPU s':>9}{'up':>7}{'down':>7}{'KB up':>9}{'KB down':>9}   target")
    met = True
    for part, cost in play(Members(size), size):
        holds = part != DEATH or cost.cpu_s <= DEATH_S
        met = met and holds
        target = "" if part != DEATH else f"<= {DEATH_S:g} s: {'ok' if holds else 'MISSED'}"
        print(
            f"{part:56}{cost.cpu_s:9.3f}{cost.up / size:7.1f}{cost.down / size:7.1f}"
            f"{cost.up_bytes / size / 1e3:9.2f}{cost.down_bytes / size / 1e3:9.2f}   {target}",
            flush=True,
        )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    holds = peak_bytes <= MEMORY_BYTES
    print(
        f"peak memory of this process: {peak_bytes / 1e9:.2f} GB   <= {MEMORY_BYTES / 1e9:g} GB: {'ok' if holds else 'MISSED'}"
    )
    return met and holds
