"""Sends bytes from rank to rank over ZeroMQ, in order; knows no collective."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import zmq

from ddlcore.errors import TransportError

__all__ = ["Mailbox"]

SLICE_MS = 100  # how soon a waiting rank notices an abort
LINGER_MS = 2000  # how long close waits for messages to a peer that reads slowly


class Mailbox:
    """A PULL socket for incoming messages and a PUSH socket for each peer. Only one thread may use it at a time."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        self._rank = rank
        self._context = zmq.Context()
        self._out: list[zmq.Socket[bytes] | None] = [None] * size
        self._came: list[deque[zmq.Frame]] = [deque() for _ in range(size)]
        self._in: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.setsockopt(zmq.IPV6, int(":" in address))
        host = f"[{address}]" if ":" in address else address
        self.endpoint = f"tcp://{host}:{self._in.bind_to_random_port(f'tcp://{host}')}"
        self._token = b""
        self.aborted = False

    def connect(self, endpoints: Sequence[str], token: bytes) -> None:
        """Connect to the peers' endpoints, given by rank. Messages without ``token`` are dropped."""
        self._token = token
        for peer, endpoint in enumerate(endpoints):
            if peer != self._rank:
                out: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
                out.setsockopt(zmq.SNDHWM, 0)  # never blocks: unsent messages stay in memory
                out.setsockopt(zmq.IPV6, int("[" in endpoint))
                out.connect(endpoint)
                self._out[peer] = out

    def send(self, peer: int, content: memoryview | bytes) -> None:
        """Send ``content`` to ``peer``. Returns immediately; ``content`` may then be changed."""
        out = self._out[peer]
        if self.aborted or out is None:
            raise TransportError("zmq: aborted" if self.aborted else f"zmq: no way to rank {peer}")
        try:
            out.send_multipart([self._token, self._rank.to_bytes(4, "little"), content], copy=True)
        except zmq.ZMQError as error:
            raise TransportError(f"zmq: cannot send to rank {peer}: {error}") from error

    def receive(self, peer: int, nbytes: int) -> memoryview:
        """Return the next message from ``peer``.

        Raises TransportError if it does not have ``nbytes`` bytes, or after an abort.
        """
        while not self._came[peer]:
            self._hear()
        content = memoryview(self._came[peer].popleft().buffer)
        if content.nbytes != nbytes:
            raise TransportError(f"zmq: rank {peer} sent {content.nbytes} bytes in place of {nbytes}")
        return content

    def _hear(self) -> None:
        if self.aborted:
            raise TransportError("zmq: aborted")
        try:
            if self._in.poll(SLICE_MS):
                frames = self._in.recv_multipart(copy=False)
                if len(frames) == 3 and frames[0].bytes == self._token:
                    self._came[int.from_bytes(frames[1].bytes, "little")].append(frames[2])
        except zmq.ZMQError as error:
            raise TransportError(f"zmq: cannot receive: {error}") from error

    def close(self) -> None:
        """Close the sockets and end ZeroMQ's threads, after waiting for messages that were sent."""
        begun_s = time.monotonic()
        for socket in (*self._out, self._in):
            if socket is not None:
                spent_ms = int(1000 * (time.monotonic() - begun_s))
                socket.close(linger=0 if self.aborted else max(0, LINGER_MS - spent_ms))
        self._context.term()
