"""Keeps the process sets of one rank's job, and opens a communicator for each of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.store import PrefixStore, Store
from ddlcore.contracts.transport import Context, Transport
from ddlcore.errors import DdlInternalError, DeadlineExceeded, TransportError
from ddlcore.runtime.buffers import FusionBuffers
from ddlcore.runtime.routes import Route
from ddlcore.threads import OwnThread
from ddlcore.types import Member

log = logging.getLogger("ddl")


@dataclass(frozen=True)
class Communicator:
    """The open transport by which one rank reduces the tensors of one process set that are in host memory."""

    set_id: int
    ranks: tuple[int, ...]  # the members' ranks in the world
    rank: int  # this process's index among them
    transport: Transport
    buffers: FusionBuffers
    route: Route


@dataclass(frozen=True)
class Opener:
    """The values and functions that are needed to open a communicator. process/parts.py provides them."""

    rank: int
    members: tuple[Member, ...]  # the members of the world
    store: Store
    kernels: Kernels
    settings: Mapping[str, str | int | float | bool]
    timeout_s: float
    route: Callable[[Sequence[Member]], Route]
    build: Callable[[Route], Transport]
    address: str = ""  # see Context.address
    generation: int = 0  # how often communicators were opened anew: each time needs fresh keys in the store

    def open(
        self,
        set_id: int,
        ranks: tuple[int, ...],
        begin: Callable[[Transport], None],
        check: Callable[[], None] = lambda: None,
    ) -> Communicator:
        """Open the communicator of process set ``set_id``, whose members are ``ranks``.

        ``begin`` is called with the transport before the transport connects, so that the caller can abort it. ``check``
        is called twice a second before that, and ends the call by an error. Raises TransportError if this rank chooses
        another route than the first of ``ranks``.
        """
        members = tuple(self.members[r] for r in ranks)
        route = self.route(members)
        self._compare(route, set_id, ranks, check)
        transport = self.build(route)
        begin(transport)
        context = self.context(ranks, self.part(f"set{set_id}"), f"process set {set_id}")
        try:
            transport.open(context)
        except BaseException:
            transport.close()
            raise
        if self.rank == ranks[0]:
            log.info("process set %d of %d ranks: transport %s (%s)", set_id, len(ranks), route.name, route.reason)
        return Communicator(set_id, ranks, context.rank, transport, FusionBuffers(transport), route)

    def _compare(self, route: Route, set_id: int, ranks: tuple[int, ...], check: Callable[[], None]) -> None:
        """Compare the route with that of the first rank: ranks of two routes would wait for each other in vain."""
        if len(ranks) == 1:
            return
        key = f"{self.part(f'set{set_id}')}.route"
        if self.rank == ranks[0]:
            self.store.set(key, route.name.encode())
            return
        try:
            theirs = self.store.get_checked(key, self.timeout_s, check).decode()
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"process set {set_id}: rank {ranks[0]} has chosen no transport within {self.timeout_s:g} s "
                "(DDL_OPEN_TIMEOUT_S)"
            ) from None
        if theirs != route.name:
            raise TransportError(
                f"process set {set_id}: rank {ranks[0]} takes the transport {theirs}, and rank {self.rank} takes "
                f"{route.name}; install the same plugins on both hosts (`ddl info`), or name one by --backend"
            )

    def part(self, name: str) -> str:
        """Return ``name`` with the number of this generation of communicators appended.

        The result names a part of the store. A generation begins each time all communicators are opened anew. Each
        generation needs keys that were not used before.
        """
        return f"{name}.{self.generation}" if self.generation else name

    def context(self, ranks: tuple[int, ...], part: str, name: str) -> Context:
        """Return the context with which a transport for the ranks ``ranks`` is opened.

        All keys in the context's store begin with ``part``. ``name`` describes the communicator in messages.
        """
        return Context(
            ranks.index(self.rank),
            tuple(self.members[r] for r in ranks),
            PrefixStore(f"{part}/", self.store),
            self.kernels,
            self.settings,
            self.timeout_s,
            name,
            self.address,
        )


class Beside(Protocol):
    """The object that keeps, for each process set, the transports which reduce tensors on devices.

    See runtime/device/routes.py.
    """

    def remove(self, set_id: int) -> None: ...

    def shut(self) -> Sequence[tuple[int, str]]: ...

    def reopen(self, routes: Sequence[tuple[int, str]]) -> None: ...

    def abort(self) -> None: ...

    def close(self, patience_s: float) -> None: ...

    def routes(self) -> dict[int, str]: ...

    def transports(self, set_id: int) -> frozenset[str]: ...


def abort_all(transports: Sequence[Transport]) -> None:
    """Abort all transports in parallel, so that a slow abort of one transport does not delay the other aborts."""
    beside = []
    for transport in transports[1:]:
        thread = OwnThread(target=transport.abort, name="ddl-abort")
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            transport.abort()
        else:
            beside.append(thread)
    for transport in transports[:1]:
        transport.abort()
    for thread in beside:
        thread.join()


class ProcessSets:
    """The process sets that exist, with their communicators.

    Only the engine's thread opens and closes communicators. Any thread may call the methods that return information,
    and ``abort``.
    """

    def __init__(self, opener: Opener) -> None:
        self.beside: Beside | None = None
        self.opener = opener  # only the engine's thread changes this, see ``reopen``
        self._lock = threading.Lock()
        self._members: dict[int, tuple[int, ...]] = {}
        self._open: dict[int, Communicator] = {}
        # The route of each set's communicator. While ``reopen`` replaces a communicator, the route stays, because other
        # threads may ask for it at any time.
        self._routes: dict[int, Route] = {}
        self._opening: Transport | None = None
        self._aborted = False
        self._closed = False

    def use_for_devices(self, beside: Beside) -> None:
        """Let ``beside`` reduce the tensors on devices from now on. Any thread may call this, before the first of them.

        If the process sets were aborted or closed already, ``beside`` is aborted or closed, too.
        """
        # No lock: a signal handler may interrupt this thread here and leave the job, and then the engine would wait for
        # the lock. ``abort`` and ``close`` set their flag before they read ``beside``. So either this thread sees the
        # flag, or the other thread sees ``beside``; if both do, the second call has no effect.
        self.beside = beside
        if self._aborted:
            beside.abort()
        if self._closed:
            beside.close(0.0)

    def add(self, set_id: int, ranks: tuple[int, ...]) -> None:
        """Register process set ``set_id``, and open its communicator if this rank is a member.

        Only the engine's thread may call this.
        """
        if self.opener.rank in ranks:
            communicator = self.opener.open(set_id, ranks, self._begin, self._check)
            with self._lock:
                self._opening = None
                self._open[set_id] = communicator
            self._routes[set_id] = communicator.route
        self._members[set_id] = ranks

    def _begin(self, transport: Transport) -> None:
        with self._lock:
            self._opening = transport
            aborted = self._aborted
        if aborted:
            transport.abort()

    def _check(self) -> None:
        if self._aborted:
            raise TransportError("the job was aborted while a communicator was opened")

    def remove(self, set_id: int) -> None:
        """Close the communicator of process set ``set_id``, and forget the set.

        Only the engine's thread may call this.
        """
        self._members.pop(set_id, None)
        if self.beside is not None:
            self.beside.remove(set_id)
        self._routes.pop(set_id, None)
        with self._lock:
            communicator = self._open.pop(set_id, None)
        if communicator is not None:
            communicator.transport.close()

    def reopen(self, opener: Opener) -> None:
        """Close every communicator and open it again with ``opener``, in the same order on every rank.

        Only the engine's thread may call this.
        """
        self.opener = opener
        shut = self.beside.shut() if self.beside is not None else ()
        for set_id in sorted(self._open):
            with self._lock:
                communicator = self._open.pop(set_id)
            communicator.transport.close()
            self.add(set_id, communicator.ranks)
        if self.beside is not None:
            self.beside.reopen(shut)

    def members(self, set_id: int) -> tuple[int, ...] | None:
        return self._members.get(set_id)

    def all(self) -> dict[int, tuple[int, ...]]:
        return dict(self._members)

    def ids_and_ranks(self) -> dict[int, list[int]]:
        return {set_id: list(ranks) for set_id, ranks in sorted(self._members.items())}

    def routes(self) -> dict[int, str]:
        """Return a text for each process set that this rank belongs to: its transport, and why this was chosen.

        Any thread may call this, because it takes no lock.
        """
        found = sorted(self._routes.copy().items())  # one call of C: the engine cannot change the dict during it
        own = {set_id: f"{route.name} ({route.reason})" for set_id, route in found}
        told = self.beside.routes() if self.beside is not None else {}
        return {set_id: "; ".join(filter(None, (text, told.get(set_id)))) for set_id, text in own.items()}

    def transports(self, set_id: int) -> frozenset[str]:
        """Return the names of all transports that process set ``set_id`` uses, for host memory and for devices.

        Any thread may call this.
        """
        own = frozenset(provider.name for provider in self.route(set_id).providers())
        return own | self.beside.transports(set_id) if self.beside is not None else own

    def route(self, set_id: int) -> Route:
        """Return the route for the tensors of process set ``set_id`` in host memory.

        While the set's communicator is being opened again, this is the route of the one before. Any thread may call
        this. Raises DdlInternalError if this rank is no member of such a set.
        """
        route = self._routes.get(set_id)
        if route is None:
            raise DdlInternalError(f"process set {set_id} has no open communicator on this rank")
        return route

    def communicator(self, set_id: int) -> Communicator:
        """Return the open communicator of process set ``set_id``. Only the engine's thread may call this.

        Raises DdlInternalError if there is none.
        """
        communicator = self._open.get(set_id)
        if communicator is None:
            raise DdlInternalError(f"process set {set_id} has no open communicator on this rank")
        return communicator

    def context(self, part: str) -> Context:
        """Return the context for a communicator of all ranks of the world. Any thread may call this.

        The ranks open such a communicator in addition to the job's own transports, for example to measure a transport.
        The communicator uses only keys of the store that begin with ``part``. ``part`` also describes the communicator
        in messages.
        """
        return self.opener.context(tuple(range(len(self.opener.members))), part, part)

    def abort(self) -> None:
        """Make every collective in flight raise an error. Any thread may call this."""
        with self._lock:
            self._aborted = True
            transports = [communicator.transport for communicator in self._open.values()]
            if self._opening is not None:
                transports.append(self._opening)
        abort_all(transports)
        if self.beside is not None:
            self.beside.abort()

    def close(self, patience_s: float = 0.0) -> None:
        """Wait for the work on devices, at most ``patience_s`` seconds, and then close every communicator.

        Only the engine's thread may call this.
        """
        self._closed = True
        if self.beside is not None:
            self.beside.close(patience_s)
        with self._lock:
            communicators = list(self._open.values())
            self._open.clear()
        self._routes.clear()
        for communicator in communicators:
            communicator.transport.close()
