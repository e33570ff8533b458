"""Layouts, faults of either part, and whole worlds over the hierarchical transport; values are the suite's business."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest
from ddl_conform.group import Area, TransportGroup, finish
from ddl_conform.threads import ThreadsTransport
from ddl_shm.hierarchical.layout import HostGroups, part, split
from ddl_shm.hierarchical.transport import HierarchicalTransport
from hypothesis import given
from hypothesis import strategies as st

import ddlcore as ddl
from ddlcore.contracts.transport import Capabilities, Context, Transport, Work
from ddlcore.errors import TransportError
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.process.job import Job
from ddlcore.testing import World
from ddlcore.types import Buffer, Member, ReduceOp

HOSTS = st.lists(st.integers(0, 3), min_size=2, max_size=9)


# --- layouts


def members(hosts: Sequence[int]) -> list[Member]:
    return [Member(10 + rank, host) for rank, host in enumerate(hosts)]


def test_hosts_stand_in_the_order_of_their_first_ranks() -> None:
    """Not in that of their indexes."""
    layout = HostGroups.of(members((3, 1, 3, 1, 1)), 4, 0)
    assert layout.hosts == ((0, 2), (1, 3, 4))
    assert (layout.host, layout.local, layout.mates, layout.shares) == (1, 2, (1, 3, 4), 2)
    assert not layout.crosses


@given(HOSTS, st.integers(0, 4), st.integers(0, 100))
def test_layouts_fit_together(hosts: list[int], shares: int, count: int) -> None:
    """All ranks see the same hosts; who crosses meets those who expect it; shares cover everything once."""
    layouts = [HostGroups.of(members(hosts), rank, shares) for rank in range(len(hosts))]
    first = layouts[0]
    assert sorted(r for ranks in first.hosts for r in ranks) == list(range(len(hosts)))
    smallest = min(map(len, first.hosts))
    assert first.shares == (min(shares, smallest) if shares else smallest)
    for rank, layout in enumerate(layouts):
        assert (layout.hosts, layout.shares) == (first.hosts, first.shares)
        assert layout.mates[layout.local] == rank
        shared = layout.shared_out(count)
        assert sum(shared) == count
        assert (shared[layout.local] > 0) <= layout.crosses
        if layout.crosses:
            assert layout.crossing[layout.host] == rank
            assert all(layouts[peer].crossing == layout.crossing for peer in layout.crossing)


@given(st.integers(0, 1000), st.integers(1, 9))
def test_parts_cover_the_whole(count: int, parts: int) -> None:
    """One behind the other, no two more than one apart."""
    lengths = split(count, parts)
    assert [part(count, i, parts)[0] for i in range(parts)] == [sum(lengths[:i]) for i in range(parts)]
    assert sum(lengths) == count
    assert max(lengths) - min(lengths) <= 1


# --- faults


class Deaf(ThreadsTransport):
    """A transport whose calls never end, and which abort does not reach."""

    capabilities = Capabilities(abort=False)
    freed = threading.Event()

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        self.freed.wait(80.0)
        raise TransportError("freed")


class Broken(ThreadsTransport):
    """A transport that fails at its second exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        self.calls += 1
        if self.calls > 1:
            raise TransportError("the cable is cut")
        return super().alltoallv(source, target, counts)


class Closed(ThreadsTransport):
    """A transport that does not open."""

    def open(self, context: Context) -> None:
        raise TransportError("no interface has this name")


def group_of(cross: Callable[[], Transport], hosts: Sequence[int] = (0, 0, 1, 1)) -> TransportGroup:
    transports = [HierarchicalTransport(ThreadsTransport(), cross) for _ in hosts]
    settings = {"hierarchical_chunk_bytes": 4096}
    return TransportGroup(transports, CpuKernels(), members=members(hosts), settings=settings, deadline_s=10.0)


def summed(transport: Transport, count: int = 10_000) -> None:
    area = Area(np.ones(count, np.float32))
    finish(transport.allreduce(area.buffer, area.buffer, ReduceOp.Sum))


def test_abort_does_not_wait_for_a_deaf_transport() -> None:
    """The call raises soon, and close returns, although a thread is still in the other transport's call."""
    Deaf.freed.clear()
    group = group_of(Deaf)
    group.open()
    aborted = threading.Timer(0.1, group.abort)
    aborted.start()
    begun_s = time.monotonic()

    def play(rank: int, transport: Transport) -> None:
        with pytest.raises(TransportError, match="aborted"):
            summed(transport)
        transport.close()

    try:
        group.run(play)
        assert time.monotonic() - begun_s < 20.0
    finally:
        Deaf.freed.set()
        aborted.join()
        group.close()


def test_what_the_other_transport_raises_comes_out() -> None:
    """On the ranks that cross, at once; the others are ended by their own abort; later calls raise it again."""
    group = group_of(Broken)
    group.open()
    errors: dict[int, str] = {}

    def play(rank: int, transport: Transport) -> None:
        with pytest.raises(TransportError, match=r"the cable is cut|aborted") as caught:
            summed(transport)
        errors[rank] = str(caught.value)
        for other in group.transports:  # as the job does, when one rank says that its transport failed
            other.abort()
        with pytest.raises(TransportError):
            summed(transport)

    try:
        group.run(play)
    finally:
        group.close()
    assert "the cable is cut" in errors.values()


def test_an_opening_that_fails_says_why() -> None:
    """On the ranks that cross; nothing stays behind, neither thread nor half of a pair."""
    before = threading.active_count()
    group = group_of(Closed, hosts=(0, 1))
    with pytest.raises(TransportError, match="no interface has this name"):
        group.open()
    assert threading.active_count() <= before


# --- worlds


def test_a_world_says_its_route_and_each_set_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """In the log of each set's first rank and in the counts; sets are routed by their own members."""

    def program(rank: int, job: Job) -> dict[int, str]:
        for ranks in ([0, 1], [1, 2], [0, 1, 2]):
            ddl.add_process_set(ranks)
        ddl.barrier()
        return ddl.stats()["routes"]

    world = World(4, backend="threads+threads", hosts=(0, 0, 1, 1), settings={"log_level": "INFO"})
    with caplog.at_level(logging.INFO, "ddl"), world:
        routes = world.run(program)
    assert routes[1] == {
        0: "threads+threads (asked for)",
        1: "threads (asked for threads+threads; all ranks are on one host)",
        2: "threads (asked for threads+threads; each rank is alone on its host)",
        3: "threads+threads (asked for)",
    }
    lines = [record.getMessage() for record in caplog.records if "process set 0" in record.getMessage()]
    assert lines == ["process set 0 of 4 ranks: transport threads+threads (asked for)"]


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0), (2, 0, 1)])
def test_bits_are_those_of_addition_by_host(hosts: tuple[int, ...]) -> None:
    """Negotiated and replayed, in buckets of any size, compressed or not: always the same."""
    size = len(hosts)
    values = [np.random.default_rng(rank).normal(size=3000).astype(np.float32) for rank in range(size)]
    sums = [np.sum([v for v, h in zip(values, hosts) if h == host], axis=0, dtype=np.float32) for host in range(3)]
    on_each = [sums[host] for host in dict.fromkeys(hosts)]
    expected = on_each[0]
    for one in on_each[1:]:
        expected = expected + one

    def program(rank: int, job: Job) -> tuple[bool, int]:
        same = True
        for _ in range(12):
            handles = [ddl.allreduce_async(values[rank][i::3].copy(), name=f"t{i}", op=ReduceOp.Sum) for i in range(3)]
            got = [ddl.synchronize(handle) for handle in handles]
            same = same and all((one == expected[i::3]).all() for i, one in enumerate(got))
        return same, ddl.stats()["buckets_replayed"]

    for fusion_bytes in (0, 1 << 20):
        settings = {"fusion_bytes": fusion_bytes}
        with World(size, backend="threads+threads", hosts=hosts, settings=settings) as world:
            results = world.run(program)
        assert all(same for same, _ in results)
        assert all(replayed > 0 for _, replayed in results)


class Attended(ThreadsTransport):
    """A transport that wants to be known everywhere; notes who attends, and who was aborted there."""

    attending: ClassVar[list[tuple[int, int]]] = []
    aborted: ClassVar[list[int]] = []

    def attend(self, context: Context, check: Callable[[], None]) -> None:
        self.rank = context.rank
        self.attending.append((context.rank, context.size))

    def abort(self) -> None:
        if hasattr(self, "rank"):
            self.aborted.append(self.rank)
        super().abort()


@pytest.mark.parametrize("attended", [True, False])
def test_every_rank_attends_where_that_is_asked_for(attended: bool) -> None:
    Attended.attending.clear()
    Attended.aborted.clear()
    hosts = (0, 0, 0, 1)
    transports = [HierarchicalTransport(ThreadsTransport(), Attended, attended) for _ in hosts]
    group = TransportGroup(transports, CpuKernels(), members=members(hosts), settings={}, deadline_s=10.0)
    group.open()
    group.abort()
    group.close()
    assert sorted(Attended.attending) == ([(rank, 4) for rank in range(4)] if attended else [])
    assert sorted(Attended.aborted) == ([0, 1, 2, 3] if attended else [])
