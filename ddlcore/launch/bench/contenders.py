"""What is timed: a collective as the transport alone does it, as ddl's verb does it, and as each peer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlcore.api import arrays
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.transport import Plan, Transport, Work
from ddlcore.job import Job
from ddlcore.types import Buffer, Kind, ReduceOp, Sum

__all__ = ["OPERATIONS", "WHOLE", "Arrays", "Call", "arrays_for", "contenders", "expected"]

Call = Callable[[], object]
OPERATIONS: Mapping[str, Kind] = {
    kind.name.lower(): kind
    for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER, Kind.ALLTOALL)
}
WHOLE = "ddl"  # the name of the whole call, from the user's array to the user's array
_WAIT_S = 0.1


@dataclass(frozen=True)
class Arrays:
    """The memory of one collective on one rank. ``nbytes`` counts the whole tensor: the larger of the two."""

    source: Any  # numpy.ndarray
    target: Any  # the same one, where the collective is in place

    @property
    def nbytes(self) -> int:
        return int(max(self.source.nbytes, self.target.nbytes))


def arrays_for(kind: Kind, nbytes: int, dtype: str, size: int) -> Arrays:
    """Arrays of ``nbytes``, and as little more as gives each of ``size`` ranks an equal part of whole elements."""
    count = max(1, -(-nbytes // np.dtype(dtype).itemsize))
    if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        one = np.zeros(count, dtype)
        return Arrays(one, one)
    part = -(-count // size)
    shared = np.zeros(part * size, dtype)
    if kind is Kind.ALLGATHER:
        return Arrays(np.zeros(part, dtype), shared)
    return Arrays(shared, np.zeros(part if kind is Kind.REDUCESCATTER else part * size, dtype))


def expected(kind: Kind, count: int, rank: int, size: int) -> Any:
    """What ``target`` (of ``count`` elements) holds where every rank's source was filled with its rank + 1."""
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        return np.full(count, size * (size + 1) // 2)
    if kind is Kind.BROADCAST:
        return np.ones(count)
    return np.repeat(np.arange(1, size + 1), count // size)


def contenders(job: Job, peers: Mapping[str, BenchPeer], kind: Kind, memory: Arrays) -> dict[str, Call]:
    """What is timed, by name, on the same arrays: the transport, the whole call, the peers. Sums throughout.

    Left out are the transport where only its engine may call it, and peers that lack this collective or type.
    """
    transport = job.sets.communicator(0).transport
    calls: dict[str, Call] = {}
    if not transport.capabilities.thread_bound:
        calls[job.sets.communicator(0).route.provider.name] = _transport_call(transport, kind, memory)
    calls[WHOLE] = _whole_call(kind, memory)
    for name, peer in peers.items():
        try:
            calls[name] = peer.operation(kind, memory.source, memory.target)
        except NotImplementedError:
            continue
    return calls


def _transport_call(transport: Transport, kind: Kind, memory: Arrays) -> Call:
    """The open communicator of the world, called as the engine calls it; the engine has nothing to do meanwhile."""
    adapter = NumpyAdapter()
    source, target = (adapter.buffer(array, elementwise=True) for array in (memory.source, memory.target))
    size = transport.context.size
    part = memory.source.size // size
    if kind is Kind.ALLREDUCE:
        return _allreduce_call(transport, source)
    if kind is Kind.BROADCAST:
        return lambda: _finish(transport.broadcast(target, 0))
    if kind is Kind.ALLGATHER:
        return lambda: _finish(transport.allgatherv(source, target, [source.count] * size))
    if kind is Kind.REDUCESCATTER:
        return lambda: _finish(transport.reducescatterv(source, target, [part] * size, Sum))
    return lambda: _finish(transport.alltoallv(source, target, [[part] * size] * size))


def _allreduce_call(transport: Transport, buffer: Buffer) -> Call:
    if not transport.capabilities.vectored:
        return lambda: _finish(transport.allreduce(buffer, buffer, Sum))
    prepared = transport.prepare(Plan((buffer.count,), buffer.dtype, Sum))
    at: Sequence[int] = [buffer.address]
    return lambda: _finish(prepared.start(at, at))


def _whole_call(kind: Kind, memory: Arrays) -> Call:
    """A name of its own for each size, so that a tensor that comes again is recognised."""
    name = f"bench.{kind.name.lower()}.{memory.nbytes}"
    source = memory.source
    if kind is Kind.ALLREDUCE:
        return lambda: arrays.allreduce_(source, name=name, op=ReduceOp.Sum)
    if kind is Kind.BROADCAST:
        return lambda: arrays.broadcast_(source, 0, name=name)
    if kind is Kind.ALLGATHER:
        return lambda: arrays.allgather(source, name=name)
    if kind is Kind.REDUCESCATTER:
        return lambda: arrays.reducescatter(source, name=name, op=ReduceOp.Sum)
    return lambda: arrays.alltoall(source, name=name)


def _finish(work: Work) -> None:
    while not work.wait(_WAIT_S):
        pass
