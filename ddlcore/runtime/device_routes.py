"""Decides how a process set's tensors on one kind of device are reduced: on their device's queue, or by the host.

Every rank brings the facts that it alone knows (which device, which transports can be used); one decides for all.
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
from ddlcore.runtime.backend import AUTO
from ddlcore.runtime.devices import ON_HOST, Devices, DeviceStream, Pool, describe_device, label_of_stream
from ddlcore.runtime.executor import Unserved
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.process_sets import Communicator, Opener, ProcessSets, abort_all
from ddlcore.types import Buffer, DType, Kind, Member, ReduceOp

__all__ = ["SOLO", "Choice", "Commit", "Confirm", "DeviceOpener", "DeviceRoutes", "Fact", "OnDevice", "choose"]

log = logging.getLogger("ddl")
SOLO = "solo"  # the queue of a set of one rank is its transport
STAGED_ON_HOST = "cpu"  # as the user asks for it
WAIT_SLICE_S = 1.0
LEAVE_SLICE_S = 0.1
TELL_S = 5.0  # of a wait for what a device still does when the job ends
ABORTED_S = 5.0  # for a queue to end, of which collectives have been broken off

T = TypeVar("T")


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says: the identity of its device, and what keeps each transport from being used there."""

    identity: str
    missing: dict[str, str]


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """What holds for all. ``name`` empty: staged on the host; ``error``: nothing will do."""

    name: str
    reason: str
    error: bool = False


@dataclass(frozen=True, eq=False)
class OnDevice:
    """How one process set's buckets on one of a rank's devices are run. ``transport`` None: staged on the host."""

    stream: DeviceStream
    host: Communicator  # of the same set, for what goes by the host, and for ``confirm``
    name: str  # of the transport, or by way of which one of the host's
    reason: str
    transport: Transport | None = None
    pool: Pool | None = None  # of memory that the transport likes to send from
    confirm: Confirm | None = None  # None: buckets are queued before it is known that all bring real data
    commit: Commit | None = None  # where there is no confirm. None: only the device tells that all have taken part
    prepared: dict[Plan, Prepared] = field(default_factory=dict)


class Confirm:
    """All ranks of a set learn, on their hosts, whether each of them came with real data; nothing else happens."""

    def __init__(self, communicator: Communicator) -> None:
        self._alone = len(communicator.ranks) == 1
        if not self._alone:
            self._byte = Memory(1)
            self._prepared = communicator.transport.prepare(Plan((1,), DType.U8, ReduceOp.Max))

    @staticmethod
    def is_possible(communicator: Communicator) -> bool:
        """Whether the set's transport between hosts' memories can be entered all or nothing."""
        return len(communicator.ranks) == 1 or communicator.transport.capabilities_for(Kind.ALLREDUCE).atomic

    def __call__(self, real: bool) -> bool:
        """True on every rank, or on none. Blocks until all have come, or the job is aborted."""
        if self._alone:
            return real
        place = [self._byte.address] if real else []
        return self._prepared.run_atomic(place, place, real)


class Commit:
    """All ranks of a set tell each other's hosts what they have launched: an allreduce of one byte between hosts' memories.

    It is called behind the same buckets on all members. Nobody has the least of all ranks' bytes before all have come.
    """

    def __init__(self, communicator: Communicator, meter: Meter) -> None:
        self._transport = communicator.transport
        self._memory = Memory(1)
        self._byte = Buffer(self._memory.address, 1, DType.U8, (1,), owner=self._memory)
        self._view = view(self._memory.address, 1)
        self._meter = meter

    @staticmethod
    def is_possible(communicator: Communicator) -> bool:
        """Whether the set's transport between hosts' memories finds the least of some bytes."""
        capabilities = communicator.transport.capabilities_for(Kind.ALLREDUCE)
        return DType.U8 in capabilities.dtypes and ReduceOp.Min in capabilities.ops

    def __call__(self, real: bool) -> bool:
        """Whether every rank came with ``real``. Blocks until all have come, or the job is aborted."""
        begun_ns = now_ns()
        self._view[0] = real
        work = self._transport.allreduce(self._byte, self._byte, ReduceOp.Min)
        while not work.wait(WAIT_SLICE_S):
            pass  # a slow peer is not a dead one; abort() ends this wait
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
    """The best of ``providers`` that all members can use, or why none is. ``wanted``: auto, cpu, or a name.

    ``facts``: of each member, in order.
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
    """All that opening a transport for devices takes beside the opener of the host's; job.py fills it in."""

    providers: Callable[[], Iterable[TransportProvider]]  # all transports that are installed
    missing: Callable[[TransportProvider], str]
    build: Callable[[str], Transport]  # by name; SOLO too
    wanted: Callable[[str], str]  # by kind of device: auto, cpu, or a transport's name
    launcher: str = ""

    def choose(self, opener: Opener, host: Communicator, label: str, stream: DeviceStream) -> Choice:
        """One choice for all members, who call this at the same place of the one order of buckets.

        Raises DeadlineExceeded, PeerLost; Unserved where what was asked for will not do: the job goes on.
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
    """What rank 0 decides from all facts."""
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
    """The routes of one rank's process sets on its devices. The engine opens and closes; any thread may abort."""

    def __init__(
        self, opener: Opener, device_opener: DeviceOpener, sets: ProcessSets, devices: Devices, meter: Meter
    ) -> None:
        self._meter = meter
        self._opener = opener
        self._device_opener = device_opener
        self._sets = sets
        self._devices = devices
        self._lock = threading.Lock()
        self._open: dict[tuple[int, str], OnDevice] = {}
        self._transports: list[Transport] = []  # that abort() is to reach, the one that is being opened among them
        self._aborted = False

    def route(self, set_id: int, label: str) -> OnDevice:
        """How the set's buckets on that device are run; the first time, all members open it. Engine only."""
        found = self._open.get((set_id, label))
        if found is None:
            found = self._make(set_id, label)
            with self._lock:
                self._open[set_id, label] = found
        return found

    def _make(self, set_id: int, label: str) -> OnDevice:
        host = self._sets.communicator(set_id)
        stream = self._devices.stream(label)
        choice = self._device_opener.choose(self._opener, host, label, stream)
        if host.rank == 0:
            way = f"transport {choice.name}" if choice.name else f"staged on the host, transport {host.route.name}"
            what = describe_device(label_of_stream(label))
            log.info("process set %d of %d ranks, %s: %s (%s)", set_id, len(host.ranks), what, way, choice.reason)
        if not choice.name:
            return OnDevice(stream, host, host.route.name, choice.reason)
        transport = self._begin(self._device_opener.build(choice.name))
        name = f"process set {set_id} on {describe_device(label)}"
        context = self._opener.context(host.ranks, self._opener.part(f"set{set_id}.{label}"), name)
        try:
            transport.open(replace(context, kernels=stream.kernels, queue=stream.queue))
        except BaseException:
            self._end(transport)
            raise
        confirm = Confirm(host) if Confirm.is_possible(host) else None
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
        """The set is about to be closed. Engine only."""
        for key in [key for key in self._open if key[0] == set_id]:
            self._shut(key)

    def shut(self) -> list[tuple[int, str]]:
        """Every communicator is about to be opened anew: lets go of what is bound to them. What is to be opened again."""
        keys = list(self._open)
        for key in keys:
            self._shut(key)
        return keys

    def _shut(self, key: tuple[int, str]) -> None:
        with self._lock:
            route = self._open.pop(key)
        if route.transport is not None:
            try:
                route.stream.wait(route.stream.mark(()))  # it may still be at work
            finally:
                self._end(route.transport)

    def reopen(self, opener: Opener, routes: Sequence[tuple[int, str]]) -> None:
        """Decides and opens anew what ``shut`` has closed: at once, for all ranks are here now. Engine only."""
        self._opener = opener
        for set_id, label in routes:
            self.route(set_id, label)

    def abort(self) -> None:
        """Makes whatever collective is under way raise, on the host or on a queue; from any thread."""
        with self._lock:
            self._aborted = True
            transports = list(self._transports)
        abort_all(transports)

    def check(self) -> None:
        """Raises where what was queued has been broken off: who waits for it would go on with garbage. Engine only."""
        if not self._aborted:
            for route in self._open.values():
                if route.transport is not None:
                    route.transport.check_queued()

    def close(self, patience_s: float) -> None:
        """Lets what is queued end, for so long in all if need be, and closes everything. Engine only."""
        with self._lock:
            routes = list(self._open.values())
            self._open.clear()
        deadline_s = time.monotonic() + patience_s
        for stream in self._devices.streams:
            try:
                ended = self._has_ended(stream, deadline_s)
                if not ended and not self._aborted:
                    log.warning(
                        "%s has not ended what was queued within %g s: something that the script has put there waits for "
                        "ever; it is left behind",
                        stream.device,
                        patience_s,
                    )
            except DdlInternalError as error:  # the device has failed; what there was to say has been said
                log.debug("%s", error)
        for route in routes:
            if route.transport is not None:
                self._end(route.transport)
        left_s = max(deadline_s - time.monotonic(), 0.0)
        self._devices.close(min(left_s, ABORTED_S) if self._aborted else left_s)

    def _has_ended(self, stream: DeviceStream, deadline_s: float) -> bool:
        """Whether what is queued there ends in time; not waited for once the job is over."""
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
        """The names of those that the set has open for devices. Any thread."""
        with self._lock:
            found = list(self._open.items())
        return frozenset(one.name for (of, _), one in found if of == set_id and one.transport is not None)

    def routes(self) -> dict[int, str]:
        """By set: how its tensors on devices are reduced, and why so. Any thread; it takes no lock."""
        found = sorted(self._open.copy().items())
        told: dict[int, str] = {}
        for (set_id, label), one in found:
            way = one.name if one.transport is not None else f"staged on the host, {one.name}"
            text = f"{describe_device(label_of_stream(label))}: {way} ({one.reason})"
            told[set_id] = f"{told[set_id]}; {text}" if set_id in told else text
        return told
