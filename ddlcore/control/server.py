"""Serve the launcher's end of the control network: one thread moves messages between ranks, coordinator and store.

A rank is connected to the server either directly or through the agent of its host. The agent forwards the frames of the
rank.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from ddlcore.control.beats import Beats
from ddlcore.control.coordinator_protocol import CoordinatorProtocol
from ddlcore.control.credentials import Access, JobFile, KeyPair
from ddlcore.control.files import allow_files
from ddlcore.control.line import FLUSHED
from ddlcore.control.listener import Listener
from ddlcore.control.post import packed
from ddlcore.control.store import Shelf
from ddlcore.control.wake import Wake
from ddlcore.errors import DdlInternalError
from ddlcore.messages.coding import decode_store_request, decode_to_coordinator, encode
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.store import StoreReply
from ddlcore.messages.to_coordinator import Arrive, Hello
from ddlcore.messages.to_rank import Outgoing, Refused
from ddlcore.threads import OwnThread

OWN = b""  # first frame of a message from or to an agent itself, where other messages have a rank's connection name
_MANY_STRANGERS = 100  # number of refused connections that is reported: fewer are probably just a port scan
_LINES_A_RANK = 3  # how many lines of one rank may be connecting at the same time
_TICK_S = 0.5  # how often the coordinator is asked what is overdue
_NAME = re.compile(rb"([cs])(0|[1-9][0-9]{0,8})\.[0-9a-f]{8}")  # see Line: c to the coordinator, s to the store
_AGENT = re.compile(rb"a(0|[1-9][0-9]{0,8})\.([0-9a-f]{8})\.(0|[1-9][0-9]{0,8})")
_Route = tuple[bytes, ...]  # the name of the agent's connection, if there is an agent; then that of the rank's


def agent_name(index: int, token: str, attempt: int) -> bytes:
    """Return the name of connection number ``attempt`` of agent number ``index``.

    ``token`` is 8 random hexadecimal digits, the same for all connections of one agent.
    """
    return f"a{index}.{token}.{attempt}".encode()


class Agents(Protocol):
    """The interface of the object that handles the messages of agents for the server.

    The server calls the methods in the server's thread, so the methods must return at once.
    """

    def heard(self, agent: int, data: bytes) -> None:
        """Handle the message ``data``, which agent number ``agent`` has sent."""

    def silent(self, agent: int, silence_s: float) -> None:
        """Handle the loss of agent number ``agent``, from which no message has arrived for ``silence_s`` seconds."""


@dataclass(frozen=True)
class PreparedListener:
    """Where a successor of a lost launcher listens, as its agents know since before that: a socket, and keys."""

    listener: socket.socket
    keys: KeyPair
    client_public: str  # the key of the agents


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Server:
    """The launcher's server for the ranks 0 … ``size`` - 1 of one launch. It admits only clients with the job's key.

    If ``address`` is "", the server listens at an ipc socket that leaves no file; if it is "tcp://IP:PORT", the server
    listens there (port 0: any free port). If ``agents`` is given, the agents connect at ``address``, and the ranks of
    this host always connect by ipc; server and agents then exchange heartbeats once a second, and an agent counts as
    lost after ``silence_s`` without a message. Set ``by_line`` if nobody watches the processes of the ranks: a
    connection that ends without a goodbye then counts as the end of its rank. ``report`` is called with lines for the
    user, in the server's thread. With ``prepared``, agents connect there instead of at ``address``.

    Raises ValueError for an invalid address, and DdlInternalError if the address is in use or if this process may not
    open enough files for all ranks.
    """

    def __init__(
        self,
        size: int,
        coordinator: CoordinatorProtocol,
        address: str = "",
        report: Callable[[str], None] = _to_stderr,
        *,
        agents: Agents | None = None,
        silence_s: float = 3.0,
        by_line: bool = False,
        prepared: PreparedListener | None = None,
    ) -> None:
        allow_files(size, tcp=address.startswith("tcp:") and agents is None)
        self.size = size
        self._strangers = _MANY_STRANGERS  # number of refused connections at which the next line is reported
        self.dropped = 0  # invalid messages, and messages from clients that are no rank
        self._coordinator = coordinator
        self._report = report
        self._agents = agents
        self._beats: Beats[int] = Beats(silence_s)
        self._agent_names: dict[int, bytes] = {}
        self._given_up: set[int] = set()  # lost agents: other processes may run at the places of their ranks now
        self._shelf: Shelf[_Route] = Shelf()
        self._lines: dict[int, _Route] = {}  # by rank: the connection from which it sent last
        self._said: Outgoing[LaunchedRank] = []  # messages of the coordinator in this turn
        self._changes: deque[Callable[[], Outgoing[LaunchedRank]]] = deque()  # what other threads tell the coordinator
        self._for_agents: deque[tuple[int, bytes]] = deque()
        self._stopping = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._listener = Listener(parts=by_line, keys=None if prepared is None else prepared.keys)
        self._wake = Wake()
        try:
            within = agents is not None or not address
            if within:
                self.endpoint = self._listener.bind_within(by_name=by_line)
            else:
                self.endpoint = self._listener.bind(address, connections=_LINES_A_RANK * size)
            if prepared is not None:
                self.agents_endpoint = self._listener.bind_to(prepared.listener, beats=False, connections=size)
                self._listener.admit(prepared.client_public)
            else:
                self.agents_endpoint = self._bind_for_agents(address) if agents is not None else ""
        except Exception:
            self._listener.release()
            self._wake.close()
            raise
        self._job_file = JobFile(self._listener.access(self.endpoint))
        self.job_file = self._job_file.path

    def _bind_for_agents(self, address: str) -> str:
        if not address:
            return self.endpoint
        return self._listener.bind(address, beats=False, connections=self.size)

    def agent_access(self, endpoint: str) -> Access:
        """Return an Access with which an agent connects to this server at ``endpoint``. It contains secret keys."""
        return self._listener.access(endpoint)

    def admit(self, public: str) -> None:
        """From now on, also admit clients whose public key is ``public`` (Z85). Any thread may call this."""
        self._listener.admit(public)

    def start(self) -> None:
        """Start the server's thread. Call this only once."""
        self._thread = OwnThread(target=self._run, name="ddl-coordinator")
        self._thread.start()

    def rank_ended(self, rank: LaunchedRank, reason: str, certain: bool = True) -> None:
        """Report that the process of ``rank`` has ended, cleanly or not. Any thread may call this; it returns at once.

        ``certain`` is false if its host is only silent, so that the process may live.
        """
        self.do(lambda: self._coordinator.rank_ended(rank, reason, certain))

    def do(self, change: Callable[[], Outgoing[LaunchedRank]]) -> None:
        """Call ``change`` in the server's thread, and send what it returns. Any thread may call this."""
        self._changes.append(change)
        self._wake.set()

    def rank_started(self, rank: LaunchedRank, host: int = -1) -> None:
        """Tell the coordinator that a new process was started for ``rank``, whose earlier process has ended.

        ``host`` is the index of the new process's host. -1 means the host of the earlier process. Returns at once. Any
        thread may call this.
        """
        self.do(lambda: self._coordinator.rank_started(rank, host))

    def dismiss_ranks(self, ranks: Collection[LaunchedRank], reason: str) -> None:
        """Tell the coordinator that ``ranks`` of an elastic job must leave the training.

        ``reason`` says why, in words for the user. The ranks leave at the next call in which all ranks agree on
        changes. Returns at once. Any thread may call this.
        """
        self.do(lambda: self._coordinator.dismiss(ranks, reason))

    def tell(self, agent: int, data: bytes) -> None:
        """Send ``data`` to agent number ``agent``. Returns at once. Any thread may call this.

        If the server has not yet received any message from that agent, ``data`` is dropped.
        """
        self._for_agents.append((agent, data))
        self._wake.set()

    def dismiss(self, agent: int) -> None:
        """Stop expecting heartbeats of agent number ``agent``, because it has finished or is known to be lost.

        Call this in the server's thread.
        """
        self._beats.forget(agent)

    def give_up(self, agent: int) -> None:
        """Ignore from now on what the ranks behind agent number ``agent`` say. Any thread may call this.

        They count as lost, but they may live and not know it.
        """
        self._given_up.add(agent)

    def close(self) -> None:
        """Stop the server and remove the job file. Ranks that are still connected notice that the launcher is gone.

        Any thread except the server's thread may call this. Further calls do nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._job_file.close()
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._thread is None or not self._thread.is_alive():
            self._listener.release()
            self._wake.close()

    # --- the server's thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # no further answer can be trusted: ranks must see a closed connection, and not wait
            self._report(f"the coordinator failed, the job ends\n{traceback.format_exc()}")
        finally:
            self._listener.close_sockets()

    def _serve(self) -> None:
        poller = zmq.Poller()
        self._listener.register(poller)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        tick_s = time.monotonic() + _TICK_S
        while not self._stopping:
            until_s = min(tick_s, self._shelf.deadline_s() or tick_s, self._beats.deadline_s() or tick_s)
            poller.poll(max(math.ceil((until_s - time.monotonic()) * 1000), 0))
            self._wake.clear()
            # The order of these steps matters. ``let_in`` is first, because it also records which descriptors were
            # closed: a new connection may get the descriptor number of a closed connection, but a new connection sends
            # no message before ``let_in`` has admitted it. ``parted`` is after reading, because the last messages of a
            # connection may have arrived together with its end, and a rank that said goodbye must not count as lost.
            # For the same reason, ``_changes`` is handled after reading.
            self._listener.let_in()
            self._read()
            for name in self._listener.parted():
                self._part(name)
            while self._changes:
                self._said += self._changes.popleft()()
                self._lose()
            self._tell()
            self._keep_beat(time.monotonic())
            now_s = time.monotonic()
            self._reply(self._shelf.expire(now_s))
            if now_s >= tick_s:
                tick_s = now_s + _TICK_S
                self._tell_of_strangers()
                for text in self._coordinator.overdue(now_s):
                    self._report(text)
                self._said += self._coordinator.due()
                self._tell()
        self._tell_agents()

    def _read(self) -> None:
        """Handle messages that have arrived, but only a limited number, because the loop has other work, too."""
        with contextlib.suppress(zmq.Again):
            for _ in range(4 * self.size + 16):
                self._take(self._listener.receive())

    def _take(self, frames: list[bytes]) -> None:
        *route, data = frames
        agent = self._agent_of(route[0]) if self._agents is not None and len(route) == 2 else -1
        if agent >= 0:
            self._beats.heard(agent, time.monotonic())
            if route[1] == OWN:
                self._hear_agent(agent, data)
                return
            if agent in self._given_up:
                return
        match = _NAME.fullmatch(route[-1])
        rank = LaunchedRank(int(match[2]) if match else -1)
        if match is None or rank >= self.size or len(route) != (1 if agent < 0 else 2):
            self._drop("from a connection that is no rank's")
        elif data == FLUSHED:
            self._send(tuple(route), FLUSHED)
        else:
            self._take_from_rank(match[1], rank, tuple(route), data)

    def _take_from_rank(self, kind: bytes, rank: LaunchedRank, route: _Route, data: bytes) -> None:
        try:
            if kind == b"c":
                self._to_coordinator(rank, route, data)
            else:
                request = decode_store_request(data)
                self._reply(self._shelf.handle(route, rank, request, time.monotonic()))
        except msgspec.DecodeError as error:
            self._drop(f"from rank {rank} that cannot be read ({error})")
        except DdlInternalError as error:
            self._drop(f"from rank {rank} that is out of place ({error})")

    def _to_coordinator(self, rank: LaunchedRank, route: _Route, data: bytes) -> None:
        message = decode_to_coordinator(data)
        before = self._lines.get(rank)
        self._lines[rank] = route
        if isinstance(message, Hello):
            self._shelf.hello(rank)
        said = self._coordinator.handle(rank, message)
        if isinstance(message, Arrive) and before is not None and any(isinstance(told, Refused) for _, told in said):
            self._lines[rank] = before  # another process already has this rank, and gets later messages to the rank
            for _, told in said:
                self._send(route, encode(told))
        else:
            self._said += said
        self._lose()

    def _part(self, name: bytes) -> None:
        """Handle the end of the connection called ``name``, which has ended without a goodbye (see ``Listener``).

        If this was a rank's connection to the coordinator, tell the coordinator that the rank has ended, because no
        other code would notice this. The end of any other connection is ignored.
        """
        match = _NAME.fullmatch(name)
        if match is not None and match[1] == b"c" and self._lines.get(int(match[2])) == (name,):
            self._said += self._coordinator.rank_ended(
                LaunchedRank(int(match[2])), "its connection to the coordinator ended"
            )
            self._lose()

    # --- agents

    def _agent_of(self, name: bytes) -> int:
        """Return the number of the agent whose connection is called ``name``.

        Returns -1 if the connection does not belong to an agent, or if another agent already has this number. If the
        connection of an agent breaks before a message from this server has arrived, the agent opens a new connection.
        From then on only the new connection counts, and the result for the old connection is -1.
        """
        match = _AGENT.fullmatch(name)
        if match is None:
            return -1
        number = int(match[1])
        known = _AGENT.fullmatch(self._agent_names.setdefault(number, name))
        assert known is not None
        if known[2] != match[2] or int(match[3]) < int(known[3]):
            return -1
        self._agent_names[number] = name
        return number

    def _hear_agent(self, agent: int, data: bytes) -> None:
        if data and self._agents is not None:  # without data it is a heartbeat
            self._agents.heard(agent, data)

    def _keep_beat(self, now_s: float) -> None:
        if self._agents is None:
            return
        self._tell_agents()
        for agent in self._beats.due(now_s):
            self._send((self._agent_names[agent], OWN), b"")
        for agent in self._beats.silent(now_s):
            self.give_up(agent)
            self._agents.silent(agent, self._beats.silence_s)

    def _tell_agents(self) -> None:
        while self._for_agents:
            agent, data = self._for_agents.popleft()
            if agent in self._agent_names:
                self._send((self._agent_names[agent], OWN), data)

    # --- sending

    def _tell(self) -> None:
        self._tell_agents()  # first: an agent must know of a world before a rank that it serves receives it
        said, self._said = self._said, []
        for rank, data in packed(said):
            if rank in self._lines:
                self._send(self._lines[rank], data)

    def _lose(self) -> None:
        self._reply(self._shelf.lose(self._coordinator.lost()))

    def _reply(self, replies: list[tuple[_Route, StoreReply]]) -> None:
        for route, reply in replies:
            self._send(route, encode(reply))

    def _send(self, route: _Route, data: bytes) -> None:
        self._listener.send([*route, data])

    def _tell_of_strangers(self) -> None:
        refused = self._listener.refused
        if refused >= self._strangers:
            while self._strangers <= refused:
                self._strangers *= 10  # so that a flood causes only a few lines
            self._report(
                f"control network: turned away {refused} TCP connections that showed no key of this job; the job goes "
                "on. Keep such clients out by a firewall, or by another address in DDL_CONTROL_ADDRESS"
            )

    def _drop(self, what: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            self._report(f"control network: dropped a message {what}; further ones are only counted")
