"""Tests the real control network with many ranks: a server and all clients in one process, over encrypted sockets.

    python tools/crowd_control.py [--clients 256] [--tensors 400] [--address tcp://127.0.0.1:0]

Each client takes the place of a rank. It registers, asks the coordinator for a decision about each tensor, and leaves.
It asks for the tensors in REQUESTS requests, in an order that differs from client to client. A few threads serve all
clients. Seconds are wall-clock time; clients and server use the same cores.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.control.client import ClientChannel
from ddlcore.control.credentials import Access, read_job_file
from ddlcore.control.files import allow_files
from ddlcore.control.line import Connection
from ddlcore.control.server import Server
from ddlcore.coordinator.sessions import Sessions
from ddlcore.messages.coding import encode
from ddlcore.messages.observing import Alive, Probe
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL, Ask, Spec
from ddlcore.messages.to_coordinator import Bye, Done, Hello, Request
from ddlcore.messages.to_rank import Answer, Bucket, Farewell, FromCoordinator, Welcome
from ddlcore.types import DType, Kind

__all__ = ["Crowd"]

REQUESTS = 4  # in this many requests a client asks for its tensors
THREADS = 4
PATIENCE_S = 60.0
STEPS = ("init", "one discovered step", "shutdown")


@dataclass
class Client:
    """The part of one rank in the control protocol: which message it sends next, and what it has received."""

    rank: int
    size: int
    asks: list[Ask]
    serial: int = 0
    welcomed: bool = False
    ran: list[str] = field(default_factory=list)  # names, in the order in which they were decided
    parted: bool = False
    messages: int = 0  # received

    def begin(self, step: str) -> Hello | Request | Bye:
        """Return the first message that the client sends in ``step``, one of STEPS."""
        if step == STEPS[0]:
            return Hello(LaunchedRank(self.rank), tuple(map(LaunchedRank, range(self.size))), 1, PROTOCOL, "", 64 << 20)
        return self._request() if step == STEPS[1] else Bye("shutdown")

    def hear(self, message: FromCoordinator) -> Request | Done | Alive | None:
        """Return the client's reply to ``message``, or None."""
        if isinstance(message, Probe):  # the machine is so busy that the coordinator asks whether the client still runs
            return Alive("in the crowd")
        self.messages += 1
        if isinstance(message, Welcome):
            self.welcomed = True
        elif isinstance(message, Farewell):
            self.parted = True
            return Done()
        else:
            assert isinstance(message, Answer), message
            for item in message.items:
                assert isinstance(item, Bucket), item
                self.ran += item.names
            if message.serial == self.serial and self.serial < REQUESTS:
                return self._request()
        return None

    def finished(self, step: str) -> bool:
        return {STEPS[0]: self.welcomed, STEPS[1]: len(self.ran) == len(self.asks), STEPS[2]: self.parted}[step]

    def _request(self) -> Request:
        share = len(self.asks) // REQUESTS
        begin, self.serial = self.serial * share, self.serial + 1
        return Request(0, self.serial, tuple(self.asks[begin : begin + share if self.serial < REQUESTS else None]))


class Crowd:
    """``size`` clients and their server. ``play`` runs one of STEPS with all clients."""

    def __init__(self, size: int, tensors: int, address: str = "", report: Callable[[str], None] = print) -> None:
        allow_files(3 * size)  # the clients are in this process, too, and use twice as many files as the server
        self.server = Server(size, Sessions(size, ThresholdFusion()), address, report)
        self.server.start()
        asks = [Ask(0, f"layer{i}.weight", encode(Spec(Kind.ALLREDUCE, DType.F32, (64, i)))) for i in range(tensors)]
        self.clients = [Client(rank, size, random.Random(rank).sample(asks, tensors)) for rank in range(size)]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 4 * size + 16)  # three sockets for each client
        access = read_job_file(self.server.job_file)
        self._channels = [self._connect(access, rank) for rank in range(size)]

    def play(self, step: str) -> float:
        """Run ``step``, one of STEPS, and return its seconds.

        Raises TimeoutError if a client does not finish within PATIENCE_S seconds.
        """
        begin_s = time.monotonic()
        pairs = list(zip(self.clients, self._channels))
        threads = [threading.Thread(target=_speak, args=(pairs[i::THREADS], step)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        late = [client.rank for client in self.clients if not client.finished(step)]
        if late:
            raise TimeoutError(f"{step}: ranks {late} are not through after {PATIENCE_S:g} s")
        return time.monotonic() - begin_s

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._context.term()
        self.server.close()

    def _connect(self, access: Access, rank: int) -> ClientChannel:
        return ClientChannel(Connection(access, rank, self._context))


def _speak(pairs: Sequence[tuple[Client, ClientChannel]], step: str) -> None:
    """Run ``step`` with the clients in ``pairs``, until all have finished or PATIENCE_S seconds have passed.

    The messages of each client are received in turn. The function waits a little only if no message has arrived.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    for client, channel in pairs:
        channel.send(client.begin(step))
    left = list(pairs)
    silent = False
    while left and time.monotonic() < deadline_s:
        heard = False
        for i, (client, channel) in enumerate(left):
            for message in channel.receive(0.005 if silent and i == 0 else 0.0):
                heard = True
                reply = client.hear(message)
                if reply is not None:
                    channel.send(reply)
        silent = not heard
        left = [pair for pair in left if not pair[0].finished(step)]


def main() -> None:
    """Run all steps, and print the seconds of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--address", default="", help='"" is a socket of this host; else tcp://IP:PORT, port 0 for any')
    options = parser.parse_args()
    begin_s = time.monotonic()
    crowd = Crowd(options.clients, options.tensors, options.address)
    try:
        print(f"{options.clients} clients x {options.tensors} tensors at {crowd.server.endpoint}")
        print(f"{'sockets made':24}{time.monotonic() - begin_s:8.2f} s")
        for step in STEPS:
            before = sum(client.messages for client in crowd.clients)
            cpu_s = time.process_time()
            seconds = crowd.play(step)
            cpu_s = time.process_time() - cpu_s
            told = (sum(client.messages for client in crowd.clients) - before) / options.clients
            print(f"{step:24}{seconds:8.2f} s {cpu_s:8.2f} s of CPU, server and clients {told:8.1f} messages to each")
        begin_s = time.monotonic()
    finally:
        crowd.close()
    print(f"{'sockets closed':24}{time.monotonic() - begin_s:8.2f} s")


if __name__ == "__main__":
    main()
