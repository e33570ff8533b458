"""Decides how a process set's tensors on one kind of device are reduced: on the device's queue, or staged on the host.

Every rank reports the facts that only this rank knows: its device, and the transports that it can use. One rank decides
for all ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import Memory, Plan, Prepared, Transport, view
from ddlcore.errors import DdlInternalError
from ddlcore.hooks import TransportProvider
from ddlcore.runtime.backend import AUTO, SOLO, STAGED_ON_HOST
from ddlcore.runtime.device.devices import Devices, DeviceStream, Pool
from ddlcore.runtime.device_labels import ON_HOST, describe_device, label_of_stream
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.process_sets import Communicator, Opener, ProcessSets, abort_all
from ddlcore.runtime.transport_calls import Unserved, finish
from ddlcore.runtime.vote import Vote, vote_of
from ddlcore.types import Buffer, DType, Kind, Member, ReduceOp

log = logging.getLogger("ddl")
LEAVE_SLICE_S = 0.1
TELL_S = 5.0  # after so long a wait for a device at the end of the job, a warning is logged
ABORTED_S = 5.0  # for a queue to end whose collectives were aborted

T = TypeVar("T")


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """The facts that one rank reports, so that one transport can be chosen for all ranks.

    ``identity`` names the rank's physical device. ``missing`` says for each transport why this rank cannot use it; ""
    if the rank can use it.
    """

    identity: str
    missing: dict[str, str]


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """The decision for all ranks: the name of a transport, or "" if the tensors are staged on the host.

    ``error`` is True if the user asked for a transport that cannot be used.
    """

    name: str
    reason: str
    error: bool = False


@dataclass(frozen=True, eq=False)
class OnDevice:
    """The route of one process set on one of a rank's devices: the objects that are needed to run its buckets.

    If ``transport`` is None, the buckets are staged on the host.
    """

    stream: DeviceStream
    host: Communicator  # of the same process set, for staging on the host and for ``confirm``
    name: str  # of the transport that is used, on the device or on the host
    reason: str
    transport: Transport | None = None
    pool: Pool | None = None  # memory that the transport prefers to send from
    confirm: Vote | None = None  # None: buckets are queued before it is known whether all ranks have real data
    commit: Commit | None = None  # used without ``confirm``. None: only the device can tell that all ranks took part
    prepared: dict[Plan, Prepared] = field(default_factory=dict)


class Commit:
    """A collective by which the members of a process set tell each other that they launched a bucket with real data.

    The collective is an allreduce of one byte in host memory, with the operation Min. All members call it after the
    same bucket. No rank can get the result before all ranks have called the collective.
    """

    def __init__(self, communicator: Communicator, meter: Meter) -> None:
        self._transport = communicator.transport
        self._memory = Memory(1)
        self._byte = Buffer(self._memory.address, 1, DType.U8, (1,), owner=self._memory)
        self._view = view(self._memory.address, 1)
        self._meter = meter

    @staticmethod
    def is_possible(communicator: Communicator) -> bool:
        """Return whether the process set's transport for host memory can compute the minimum of bytes."""
        capabilities = communicator.transport.capabilities_for(Kind.ALLREDUCE)
        return DType.U8 in capabilities.dtypes and ReduceOp.Min in capabilities.ops

    def __call__(self, real: bool) -> bool:
        """Return whether every rank called this with ``real`` True.

        ``real`` says whether the calling rank launched its bucket with real data. The call waits until all ranks have
        made the same call or the job is aborted.
        """
        begun_ns = now_ns()
        self._view[0] = real
        finish(self._transport.allreduce(self._byte, self._byte, ReduceOp.Min))
        self._meter.commits += 1
        self._meter.commit_ns += now_ns() - begun_ns
        return bool(self._view[0])


def choose(
    kind: str,
    wanted: str,
    providers: Iterable[TransportProvider],
    members: Sequence[Member],
    facts: Sequence[Fact],
    launcher: str = "",
) -> Choice:
    """Choose the best transport of ``providers`` that all members can use.

    If there is no such transport, the returned choice is to stage on the host, and its ``reason`` says why each
    transport cannot be used. ``kind`` is the kind of device. ``wanted`` is ``auto``, ``cpu``, or a transport's name.
    ``facts`` contains the facts of each member, in the order of ``members``. ``launcher`` is the name of the launcher
    that started the ranks; ``auto`` skips transports that need another launcher.
    """
    if wanted == STAGED_ON_HOST:
        return Choice("", "asked for")
    if wanted == AUTO and len(members) == 1:
        return Choice(SOLO, "auto: a world of one")
    able = [one for one in providers if kind in one.devices and not one.composes and wanted in (AUTO, one.name)]
    if wanted == AUTO:
        able = [one for one in able if not one.in_process and one.launcher in ("", launcher)]
    objections: list[str] = []
    for one in sorted(able, key=lambda one: (-one.priority, one.name)):
        objection = _objection(one, members, facts)
        if not objection:
            return Choice(one.name, "asked for" if wanted != AUTO else f"auto: {len(members)} ranks")
        objections.append(f"{one.name}: {objection}")
    if wanted != AUTO:
        text = "; ".join(objections) or f"no installed transport of that name serves {kind}"
        return Choice("", f"transport {wanted} was asked for {kind}, and cannot be used: {text}", True)
    return Choice("", "; ".join(objections) or f"no installed transport serves {kind}")


def _objection(provider: TransportProvider, members: Sequence[Member], facts: Sequence[Fact]) -> str:
    least, greatest = provider.sizes
    if len(members) < least or (greatest is not None and len(members) > greatest):
        return f"it serves {least} to {greatest or 'any number of'} ranks, not {len(members)}"
    if provider.one_host and len({member.host for member in members}) > 1:
        return "it serves the ranks of one host only, and these are on several"
    for member, fact in zip(members, facts):
        missing = fact.missing.get(provider.name, "not installed")
        if missing:
            return f"rank {member.rank}: {missing}"
    if provider.own_device:
        seen: dict[tuple[int, str], int] = {}
        for member, fact in zip(members, facts):
            other = seen.setdefault((member.host, fact.identity), member.rank)
            if other != member.rank:
                return f"ranks {other} and {member.rank} share device {fact.identity}, and it needs one for each rank"
    return ""


@dataclass(frozen=True)
class DeviceOpener:
    """The functions that are needed to open a transport for devices, in addition to process_sets.Opener."""

    providers: Callable[[], Iterable[TransportProvider]]  # all installed transports
    missing: Callable[[TransportProvider], str]
    build: Callable[[str], Transport]  # by name, which may be SOLO
    wanted: Callable[[str], str]  # by kind of device: auto, cpu, or a transport's name
    launcher: str = ""

    def choose(self, opener: Opener, host: Communicator, label: str, stream: DeviceStream) -> Choice:
        """Return the choice for the process set of ``host``. All members get the same choice.

        All members call this at the same point in the order of all buckets. Raises DeadlineExceeded or PeerLost if a
        member does not answer. Raises Unserved, after which the job continues, if the transport that the user asked for
        cannot be used.
        """
        kind = stream.device.kind
        if label.endswith(ON_HOST):
            return Choice("", "asked for")
        providers = [one for one in self.providers() if kind in one.devices]
        fact = Fact(stream.runtime.identity, {one.name: self.missing(one) for one in providers})
        members = [opener.members[rank] for rank in host.ranks]
        wanted = self.wanted(kind)

        def decide(facts: Sequence[Fact]) -> Choice:
            return choose(kind, wanted, providers, members, facts, self.launcher)

        store = opener.context(host.ranks, opener.part(f"set{host.set_id}.{label}"), "").store
        choice = _agree(store, host.rank, len(members), fact, decide, opener.timeout_s)
        if choice.error:
            raise Unserved(choice.reason)
        return choice


def _agree(
    store: Store, rank: int, size: int, fact: Fact, decide: Callable[[Sequence[Fact]], Choice], timeout_s: float
) -> Choice:
    """Return the choice for all ranks. All ranks call this; rank 0 calls ``decide`` with the facts of all ranks.

    ``fact`` contains this rank's own facts. The ranks exchange the facts and the choice through ``store``. ``rank`` is
    this rank's number in the process set, ``size`` the number of ranks in it. ``timeout_s`` limits each wait.
    """
    if rank != 0:
        store.set(f"fact{rank}", msgspec.msgpack.encode(fact))
        return _decoded(Choice, store.get("choice", timeout_s))
    others = [_decoded(Fact, store.get(f"fact{other}", timeout_s)) for other in range(1, size)]
    choice = decide([fact, *others])
    if size > 1:
        store.set("choice", msgspec.msgpack.encode(choice))
    return choice


def _decoded(kind: type[T], data: bytes) -> T:
    return msgspec.msgpack.decode(data, type=kind)


class DeviceRoutes:
    """The routes of one rank's process sets on its devices.

    Only the engine opens and closes routes. Any thread may call ``abort``.
    """

    def __init__(self, device_opener: DeviceOpener, sets: ProcessSets, devices: Devices, meter: Meter) -> None:
        self._meter = meter
        self._device_opener = device_opener
        self._sets = sets
        self._devices = devices
        self._lock = threading.Lock()
        self._open: dict[tuple[int, str], OnDevice] = {}
        # What other threads are told of each route, whether the tensors are staged, the transport's name and the reason.
        # While ``reopen`` replaces a route, this stays.
        self._told: dict[tuple[int, str], tuple[bool, str, str]] = {}
        self._transports: list[Transport] = []  # those that abort() must reach, also while they are being opened
        self._aborted = False

    def route(self, set_id: int, label: str) -> OnDevice:
        """Return the route of process set ``set_id`` on the device with the label ``label``.

        The first call opens the route; all members must make this call. Only the engine's thread may call this.
        """
        found = self._open.get((set_id, label))
        if found is None:
            found = self._make(set_id, label)
            with self._lock:
                self._open[set_id, label] = found
            self._told[set_id, label] = found.transport is None, found.name, found.reason
        return found

    def _make(self, set_id: int, label: str) -> OnDevice:
        host = self._sets.communicator(set_id)
        stream = self._devices.stream(label)
        choice = self._device_opener.choose(self._sets.opener, host, label, stream)
        if host.rank == 0:
            way = f"transport {choice.name}" if choice.name else f"staged on the host, transport {host.route.name}"
            what = describe_device(label_of_stream(label))
            log.info("process set %d of %d ranks, %s: %s (%s)", set_id, len(host.ranks), what, way, choice.reason)
        if not choice.name:
            return OnDevice(stream, host, host.route.name, choice.reason)
        # The transport is registered for ``abort`` before it is opened: opening is itself collective, and if a peer
        # dies meanwhile, only ``abort`` can end the wait.
        transport = self._begin(self._device_opener.build(choice.name))
        name = f"process set {set_id} on {describe_device(label)}"
        opener = self._sets.opener
        context = opener.context(host.ranks, opener.part(f"set{set_id}.{label}"), name)
        try:
            transport.open(replace(context, kernels=stream.kernels, queue=stream.queue))
        except BaseException:
            self._end(transport)
            raise
        vote = vote_of(host, 0)  # the hosts meet there before the devices exchange any data
        confirm = vote if vote.atomic else None
        commit = Commit(host, self._meter) if confirm is None and Commit.is_possible(host) else None
        pool = Pool(stream, transport.allocate)
        return OnDevice(stream, host, choice.name, choice.reason, transport, pool, confirm, commit)

    def _begin(self, transport: Transport) -> Transport:
        with self._lock:
            self._transports.append(transport)
            aborted = self._aborted
        if aborted:
            transport.abort()
        return transport

    def _end(self, transport: Transport) -> None:
        with self._lock:
            self._transports.remove(transport)
        transport.close()

    def remove(self, set_id: int) -> None:
        """Close the routes of process set ``set_id``, because the process set will be removed.

        Only the engine's thread may call this.
        """
        for key in [key for key in self._open if key[0] == set_id]:
            self._told.pop(key, None)
            self._shut(key)

    def shut(self) -> list[tuple[int, str]]:
        """Close all routes, because every communicator will be opened anew.

        Return the process set and the device label of each closed route. ``reopen`` needs these pairs.
        """
        keys = list(self._open)
        for key in keys:
            self._shut(key)
        return keys

    def _shut(self, key: tuple[int, str]) -> None:
        with self._lock:
            route = self._open.pop(key)
        if route.transport is not None:
            try:
                route.stream.wait(route.stream.mark(()))  # the transport may still be working
            finally:
                self._end(route.transport)

    def reopen(self, routes: Sequence[tuple[int, str]]) -> None:
        """Choose and open new routes instead of those that ``shut`` has closed. Only the engine's thread may call this.

        ``routes`` is the list that ``shut`` returned. The routes are opened now and not at the first bucket, because
        all ranks call this method at the same time.
        """
        for set_id, label in routes:
            self.route(set_id, label)

    def abort(self) -> None:
        """Make every collective in flight on a device raise an error. Any thread may call this."""
        with self._lock:
            self._aborted = True
            transports = list(self._transports)
        abort_all(transports)

    def check(self) -> None:
        """Raise an error if work that was queued on a device was aborted, because its results would be garbage.

        Only the engine's thread may call this. After ``abort``, this method does nothing.
        """
        if not self._aborted:
            for route in self._open.values():
                if route.transport is not None:
                    route.transport.check_queued()

    def close(self, patience_s: float) -> None:
        """Wait for the queued work, at most ``patience_s`` seconds in total. Then close all routes and devices.

        Only the engine's thread may call this.
        """
        with self._lock:
            routes = list(self._open.values())
            self._open.clear()
        self._told.clear()
        deadline_s = time.monotonic() + patience_s
        for stream in self._devices.streams:
            try:
                ended = self._has_ended(stream, deadline_s)
                if not ended and not self._aborted:
                    log.warning(
                        "%s has not ended what was queued within %g s: something that the script has put there never "
                        "ends; the device is left as it is",
                        stream.device,
                        patience_s,
                    )
            except DdlInternalError as error:  # the device has failed, which was already reported
                log.debug("%s", error)
        for route in routes:
            if route.transport is not None:
                self._end(route.transport)
        left_s = max(deadline_s - time.monotonic(), 0.0)
        self._devices.close(min(left_s, ABORTED_S) if self._aborted else left_s)

    def _has_ended(self, stream: DeviceStream, deadline_s: float) -> bool:
        """Wait for the work on ``stream``, and return whether it has ended before the deadline.

        ``deadline_s`` is a time of time.monotonic(). If the job is aborted, return at once whether the work has ended.
        """
        event, begun_s, told = stream.mark(()), time.monotonic(), False
        while not event.wait(0.0 if self._aborted else max(min(deadline_s - time.monotonic(), LEAVE_SLICE_S), 0.0)):
            now_s = time.monotonic()
            if self._aborted or now_s >= deadline_s:
                return False
            if not told and now_s - begun_s > TELL_S:
                told = True
                log.warning("%s is still at work: leaving waits, at most %.0f s", stream.device, deadline_s - now_s)
        return True

    def transports(self, set_id: int) -> frozenset[str]:
        """Return the names of the open transports of process set ``set_id`` for devices.

        Any thread may call this, because it takes no lock.
        """
        told = list(self._told.copy().items())  # one call of C: the engine cannot change the dict during it
        return frozenset(name for (of, _), (staged, name, _) in told if of == set_id and not staged)

    def routes(self) -> dict[int, str]:
        """Return, for each process set, a text that says how the set's tensors on devices are reduced, and why.

        Any thread may call this, because it takes no lock.
        """
        told: dict[int, str] = {}
        for (set_id, label), (staged, name, reason) in sorted(self._told.copy().items()):
            way = f"staged on the host, {name}" if staged else name
            text = f"{describe_device(label_of_stream(label))}: {way} ({reason})"
            told[set_id] = f"{told[set_id]}; {text}" if set_id in told else text
        return told
