"""One world whose kinds of operation go over different transports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from ddl_conform.group import TransportGroup
from ddl_conform.threads import ThreadsTransport

import ddlcore as ddl
from ddlcore.builtin.by_kind import ByKindTransport
from ddlcore.contracts.solo import SoloTransport
from ddlcore.contracts.transport import Capabilities, Context, Transport
from ddlcore.errors import TransportError
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.process.job import Job
from ddlcore.testing import TransportSuite, World
from ddlcore.types import DType, Kind, Member, ReduceOp


class Narrow(ThreadsTransport):
    """Does less than the other one, and only in one thread."""

    capabilities = Capabilities(dtypes=frozenset({DType.F32}), thread_bound=True, abort=False)


class TestByKind(TransportSuite):
    """Three transports for six kinds, each with a communicator of its own."""

    def make(self, size: int) -> Sequence[Transport]:
        def one() -> Transport:
            moving, meeting = ThreadsTransport(), ThreadsTransport()
            return ByKindTransport(
                ThreadsTransport(), {Kind.ALLGATHER: moving, Kind.ALLTOALL: moving, Kind.BARRIER: meeting}
            )

        return [one() for _ in range(size)]


def test_capabilities_are_those_of_the_kind() -> None:
    """What holds of the whole is the narrowest; what an operation asks, the part that serves it answers."""
    narrow, wide = Narrow(), ThreadsTransport()
    transport = ByKindTransport(wide, {Kind.REDUCESCATTER: narrow})
    assert transport.capabilities == replace(wide.capabilities, thread_bound=True, abort=False)
    assert transport.capabilities_for(Kind.REDUCESCATTER) == narrow.capabilities
    assert transport.capabilities_for(Kind.ALLREDUCE) == transport.capabilities_for(Kind.ALLGATHER) == wide.capabilities
    other = ByKindTransport(narrow, {Kind.ALLREDUCE: wide})
    assert other.capabilities_for(Kind.ALLREDUCE).vectored
    assert not other.capabilities_for(Kind.BROADCAST).vectored


def test_what_was_never_opened_is_not_closed() -> None:
    """The first part that fails to open is the last that is closed."""
    closed: list[str] = []

    class Part(SoloTransport):
        def __init__(self, name: str) -> None:
            self.name = name

        def open(self, context: Context) -> None:
            if self.name == "second":
                raise TransportError("no way")

        def close(self) -> None:
            closed.append(self.name)

    first, second, third = Part("first"), Part("second"), Part("third")
    transport = ByKindTransport(first, {Kind.ALLGATHER: second, Kind.BARRIER: third})
    with pytest.raises(TransportError, match="no way"):
        transport.open(lone_context())
    transport.close()
    assert closed == ["first", "second"]


def lone_context() -> Context:
    """Of one rank."""
    group = TransportGroup([SoloTransport()], CpuKernels(), members=[Member(0, 0)], settings={}, deadline_s=1.0)
    group.ranks.close()
    return group.context(0)


def test_a_world_says_and_uses_what_serves_each_kind() -> None:
    """In the steps that are negotiated and in those that are replayed; a set of one has nothing to route."""

    def program(rank: int, job: Job) -> tuple[dict[int, str], list[float], list[int]]:
        sums = []
        for step in range(6):
            sums.append(float(ddl.allreduce(np.full(4, rank + step, np.float32), name="a", op=ReduceOp.Sum)[0]))
            gathered = ddl.allgather(np.full((rank + 1, 1), rank, np.int64), name="g")
            ddl.barrier()
        return ddl.stats()["routes"], sums, gathered[:, 0].tolist()

    with World(3, backend="threads,allgather=shm,barrier=shm") as world:
        results = world.run(program)
    for routes, sums, gathered in results:
        assert routes == {0: "threads,allgather=shm,barrier=shm (asked for)"}
        assert sums == [3.0 + 3 * step for step in range(6)]
        assert gathered == [0, 1, 1, 2, 2, 2]
