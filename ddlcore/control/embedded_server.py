"""Run the coordinator in rank 0's own process, for ranks that another launcher has started.

One thread serves the control network, and another thread watches the ranks of this host. The rendezvous file, by which
the ranks find the coordinator, exists until all ranks have arrived.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ddlcore.contracts.interfaces import chosen_address, interface_addresses
from ddlcore.control.coordinator_protocol import CoordinatorProtocol
from ddlcore.control.liveness import open_pidfd
from ddlcore.control.probe import answers, at, open_endpoints, split_endpoint
from ddlcore.control.registration import Registration
from ddlcore.control.rendezvous import Invitation, Occupied, Published, has_ended, publish, start_of
from ddlcore.control.server import Server
from ddlcore.control.surroundings import kin
from ddlcore.control.wake import Wake
from ddlcore.errors import DeadlineExceeded
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import Arrive
from ddlcore.messages.to_rank import Outgoing
from ddlcore.threads import OwnThread

log = logging.getLogger("ddl")
_ANSWER_S = 5.0  # time for the holder of the keys in a file to prove that it is running
_AGAIN_S = 0.2
_SLICE_S = 0.1  # delay at most until a wait notices Ctrl-C
_TELL_S = 2.0  # time for the server's thread to tell the ranks that rank 0 ends
_SAY_S = 5.0  # after waiting so long at the end, log which ranks rank 0 waits for


def listening_address(interface: str, on_one_host: bool) -> str:
    """Return the address at which the coordinator will listen, in the form ``tcp://IP:0``.

    If ``interface`` is not empty, return the address of that network interface. If ``interface`` is empty and
    ``on_one_host`` is true (all ranks are on this host), return an empty string, which means a socket that only
    processes of this host can reach. Otherwise return the address that means all interfaces. Raises ValueError if this
    host does not have the interface.
    """
    if interface:
        address = chosen_address(interface)
        return f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0"
    if on_one_host:
        return ""
    return "tcp://[::]:0" if socket.has_dualstack_ipv6() else "tcp://0.0.0.0:0"


class EmbeddedServer:
    """The coordinator and its server in rank 0's process, from rank 0's first ``init`` to the end of the process.

    The thread that creates this object must also close it.
    """

    def __init__(self, size: int, coordinator: CoordinatorProtocol, address: str, deadline_s: float) -> None:
        """Listen at ``address`` and start the threads.

        ``size`` is the number of ranks. Ranks may arrive until the monotonic clock shows ``deadline_s``. Raises
        ValueError for an invalid address. Raises DdlInternalError if the address is in use or if this process may not
        open enough files for all ranks.
        """
        self._size = size
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._kin = kin()
        self._arrivals: deque[tuple[LaunchedRank, Arrive]] = deque()
        self._wake = Wake()
        self._idle = threading.Condition()
        self._told = threading.Event()
        self._stopping = False
        self._published: Published | None = None
        self._registration = Registration(size, coordinator, self._arrived, self._changed)
        self._server = Server(size, _Last(self._registration, self._told), address, by_line=True)
        endpoints = _endpoints(self._server.endpoint)
        self.invitation = Invitation(
            nonce=secrets.token_hex(8),
            host=socket.gethostname(),
            kin=self._kin,
            pid=self._pid,
            started=start_of(self._pid),
            endpoints=endpoints,
            access=self._server.agent_access(endpoints[0]),
        )
        self._thread = OwnThread(target=self._watch, name="ddl-watch")
        self._server.start()
        self._thread.start()

    def publish(self, directories: Sequence[Path], name: str, timeout_s: float) -> None:
        """Write the rendezvous file, by which the other ranks find this server, in one of the directories ``directories``.

        The file is called ``name``. If another running launch has a file of the same name, wait up to ``timeout_s``
        until that file has disappeared. Raises DeadlineExceeded if that file still exists then. Raises DdlInternalError
        if the file can be written in no directory of ``directories``.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._published = publish(directories, name, self.invitation, self._is_dead)
            except Occupied as occupied:
                if time.monotonic() > deadline_s:
                    there = occupied.invitation
                    raise DeadlineExceeded(
                        f"init: process {there.pid} on {there.host} gathers ranks for a launch of the same name "
                        f"({occupied.path}); end it, or set DDL_RENDEZVOUS_DIR to another directory for one of them"
                    ) from None
                time.sleep(_AGAIN_S)
            else:
                self._wake.set()  # all ranks may have arrived already
                return

    def close(self, reason: str, patient: bool) -> None:
        """Close the server, and send ``reason`` to the ranks that still use the server.

        If ``patient`` is true, first wait until all other ranks have left or until a rank is lost. Ranks that have not
        arrived yet may still train together without rank 0. So also wait for these ranks, but only until the
        ``deadline_s`` that was given to the constructor. Further calls do nothing. In a forked child, every call does
        nothing.
        """
        if os.getpid() != self._pid or self._stopping:
            return
        with contextlib.suppress(KeyboardInterrupt):
            if patient:
                self._wait_for_others()
        self._server.rank_ended(LaunchedRank(0), reason)
        self._told.wait(_TELL_S)
        self._stopping = True
        self._wake.set()
        self._thread.join(2.0)
        if self._published is not None:
            self._published.remove()
        self._server.close()
        self._wake.close()

    def _wait_for_others(self) -> None:
        say_s = time.monotonic() + _SAY_S
        with self._idle:
            while not self._registration.lost() and (others := self._needing()):
                self._idle.wait(_SLICE_S)
                if time.monotonic() > say_s:
                    say_s = float("inf")
                    who = ", ".join(map(str, sorted(others)))
                    log.info("rank 0 has ended its script and stays: rank %s may still use its coordinator", who)

    def _needing(self) -> frozenset[LaunchedRank]:
        """Return all ranks, except rank 0, that use the coordinator now or may still arrive."""
        coming = self._registration.missing() if time.monotonic() < self._deadline_s else set()
        return (self._registration.active | coming) - {0}

    def _is_dead(self, invitation: Invitation) -> bool:
        if has_ended(invitation, self._kin):
            return True
        there = open_endpoints(invitation.endpoints)
        return not any(answers(at(invitation.access, endpoint), 0, _ANSWER_S) for endpoint, _ in there)

    # --- called in the server's thread

    def _arrived(self, rank: LaunchedRank, arrive: Arrive) -> None:
        self._arrivals.append((rank, arrive))
        self._wake.set()

    def _changed(self) -> None:
        with self._idle:
            self._idle.notify_all()

    # --- the watching thread

    def _watch(self) -> None:
        """Watch the processes of the ranks on this host, and report to the server at once when one of them ends.

        The connection of a rank may end much later than its process, if another process has the rank's sockets open.
        """
        poll = select.poll()
        poll.register(self._wake.fileno(), select.POLLIN)
        watched: dict[int, LaunchedRank] = {}  # by pidfd: rank
        missing = set(range(self._size))
        while not self._stopping:
            for fd, _ in poll.poll():
                if fd in watched:
                    poll.unregister(fd)
                    os.close(fd)
                    self._server.rank_ended(watched.pop(fd), "its process ended")
            self._wake.clear()
            while self._arrivals:
                rank, arrive = self._arrivals.popleft()
                missing.discard(rank)
                fd = self._open(rank, arrive)
                if fd >= 0:
                    watched[fd] = rank
                    poll.register(fd, select.POLLIN)
            if not missing and self._published is not None:
                self._published.remove()  # no other rank will look for it
        for fd in watched:
            os.close(fd)

    def _open(self, rank: LaunchedRank, arrive: Arrive) -> int:
        if arrive.kin != self._kin or arrive.pid == self._pid:
            return -1
        try:
            return open_pidfd(arrive.pid)
        except ProcessLookupError:
            self._server.rank_ended(rank, "its process ended")
            return -1


class _Last:
    """A wrapper that passes all calls on to ``coordinator``. It sets the event ``told`` after the end of rank 0.

    The coordinator has then handled the end of rank 0, which is the last thing that it has to handle.
    """

    def __init__(self, coordinator: CoordinatorProtocol, told: threading.Event) -> None:
        self._coordinator = coordinator
        self._told = told
        self.handle = coordinator.handle
        self.rank_started = coordinator.rank_started
        self.dismiss = coordinator.dismiss
        self.lost = coordinator.lost
        self.overdue = coordinator.overdue
        self.due = coordinator.due

    def rank_ended(self, rank: LaunchedRank, reason: str, certain: bool = True) -> Outgoing[LaunchedRank]:
        outgoing = self._coordinator.rank_ended(rank, reason, certain)
        if rank == 0:
            self._told.set()  # the resulting messages are sent in the same turn
        return outgoing


def _endpoints(endpoint: str) -> tuple[str, ...]:
    """Return the endpoints at which clients can reach a server that listens at ``endpoint``.

    If ``endpoint`` means all interfaces, return one endpoint for each address of this host. Addresses that other hosts
    can reach come before the addresses of the loopback interface. In all other cases, return only ``endpoint`` itself.
    """
    if endpoint.startswith("ipc:"):
        return (endpoint,)
    host, port = split_endpoint(endpoint)
    if host not in ("0.0.0.0", "::", "*"):
        return (endpoint,)
    every = [address for addresses in interface_addresses().values() for address in addresses if "%" not in address]
    usable = [address for address in every if host != "0.0.0.0" or ":" not in address]
    ordered = sorted(usable, key=lambda address: (address.startswith("127.") or address == "::1", ":" in address))
    return tuple(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}" for address in ordered)
