"""A coordinator that decides nothing much, networks around it, and messages to send through them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ddlcore.control.channel import Channel
from ddlcore.control.client import connect
from ddlcore.control.local import LocalNetwork
from ddlcore.control.server import Server
from ddlcore.control.store import JobStore
from ddlcore.errors import DdlInternalError
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_coordinator import Bye, Hello, Request, ToCoordinator
from ddlcore.messages.to_rank import Answer, Farewell, FromCoordinator, Lost, Outgoing, Welcome

__all__ = ["PATIENCE_S", "WIRES", "EchoCoordinator", "Net", "greet", "hello", "request"]

WIRES = {"ipc": "", "tcp": "tcp://127.0.0.1:0", "local": None}  # name: address, None for one process
PATIENCE_S = 40.0


def hello(rank: int, size: int = 2) -> Hello:
    return Hello(rank, tuple(range(size)), 1, PROTOCOL, "0", 0)


def request(serial: int) -> Request:
    return Request(0, serial, ())


class EchoCoordinator:
    """Answers each message at once; serial 13 is out of place, serial 666 is more than it can bear."""

    def __init__(self, flood: int = 0) -> None:
        self.heard: list[tuple[int, ToCoordinator]] = []
        self.present: set[LaunchedRank] = set()
        self.late: list[str] = []  # what `overdue` has to say next
        self._flood = flood  # answers to rank 1 for each request of rank 0
        self._lost: dict[int, str] = {}

    def handle(self, rank: int, message: ToCoordinator) -> Outgoing[LaunchedRank]:
        self.heard.append((rank, message))
        if isinstance(message, Hello):
            self.present.add(rank)
            return [(rank, Welcome(f"for {rank}"))]
        if isinstance(message, Bye):
            return [(rank, Farewell())]
        if not isinstance(message, Request):
            return []
        if message.serial == 13:
            raise DdlInternalError("thirteen")
        if message.serial == 666:
            raise ZeroDivisionError("a bug of the coordinator")
        answer = Answer(message.epoch, message.serial, ())
        return [*((1, answer) for _ in range(self._flood if rank == 0 else 0)), (rank, answer)]

    def rank_ended(self, rank: int, reason: str, certain: bool = True) -> Outgoing[LaunchedRank]:
        self.present.discard(rank)
        if reason == "exited with code 0":
            return []
        self._lost[rank] = reason
        return [(other, Lost((rank,), reason)) for other in self.present]

    def rank_started(self, rank: int, host: int = -1) -> Outgoing[LaunchedRank]:
        self._lost.pop(rank, None)
        return []

    def dismiss(self, ranks: Collection[int], reason: str) -> Outgoing[LaunchedRank]:
        return []

    def lost(self) -> dict[LaunchedRank, str]:
        return dict(self._lost)

    def due(self) -> Outgoing[LaunchedRank]:
        return []

    def overdue(self, now_s: float) -> list[str]:
        late, self.late = self.late, []
        return late


@dataclass
class Net:
    """One network of any wire around an EchoCoordinator, and all that joined it."""

    wire: str
    size: int = 2
    coordinator: EchoCoordinator = field(default_factory=EchoCoordinator)
    reports: list[str] = field(default_factory=list)
    reported: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._joined: list[Callable[[], None]] = []
        address = WIRES[self.wire]
        self.network: LocalNetwork | Server
        if address is None:
            self.network = LocalNetwork(self.size, self.coordinator, self._report)
        else:
            self.network = Server(self.size, self.coordinator, address, self._report)
            self.network.start()

    @property
    def server(self) -> Server:
        assert isinstance(self.network, Server)
        return self.network

    def join(self, rank: int, greeting: bool = True) -> tuple[Channel, JobStore]:
        """The line and the store of ``rank``, which has been welcomed."""
        channel: Channel
        store: JobStore
        if isinstance(self.network, Server):
            channel, store = connect(self.network.job_file, rank)
        else:
            channel, store = self.network.channel(rank), self.network.store(rank)
        self._joined += [channel.close, store.close]
        if greeting:
            assert greet(channel, rank) == [Welcome(f"for {rank}")]
        return channel, store

    def close(self) -> None:
        for close in self._joined:
            close()
        if isinstance(self.network, Server):
            self.network.close()

    def _report(self, text: str) -> None:
        self.reports.append(text)
        self.reported.set()


def greet(channel: Channel, rank: int) -> list[FromCoordinator]:
    channel.send(hello(rank))
    return channel.receive(PATIENCE_S)
