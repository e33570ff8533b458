"""Provide the functions that are timed, called contenders. Each runs the same collective in its own way.

The contenders are the transport alone, ddl's whole call (the verb that a user calls, from the user's array to the
user's array), and each peer (another library).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from ddl_doctor.bench.results import TRANSPORT, WHOLE
from ddlcore.api import arrays
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.transport import Plan, Transport, Work
from ddlcore.errors import DdlInternalError
from ddlcore.process.job import Job
from ddlcore.types import BF16_NAME, Buffer, Kind, Sum

Call = Callable[[], object]  # the whole call returns its result; the others leave it in the target
_WAIT_S = 0.1


def numpy_dtype(label: str) -> Any:
    """Return the NumPy type called ``label``, such as "float32".

    Raises ValueError if ``label`` is bfloat16 and the package ml_dtypes is missing. The message contains the command
    that installs ml_dtypes.
    """
    if label == BF16_NAME:
        try:
            import_module("ml_dtypes")
        except ImportError:
            raise ValueError(f"numpy has no {label} without ml_dtypes; pip install ml_dtypes") from None
    return np.dtype(label)


@dataclass(frozen=True)
class BenchArrays:
    """The source and target arrays of one collective on one rank.

    ``nbytes`` is the size of the larger of the two arrays in bytes. The larger array is the whole tensor.
    """

    source: Any  # numpy.ndarray, one-dimensional
    target: Any  # the same array, if the collective works in place

    @property
    def nbytes(self) -> int:
        return int(max(self.source.nbytes, self.target.nbytes))


def arrays_for(kind: Kind, nbytes: int, dtype: str, size: int) -> BenchArrays:
    """Return the arrays of one rank for a collective of kind ``kind`` on a tensor of ``nbytes`` bytes.

    ``nbytes`` is rounded up to whole elements. If each rank has only a part of the tensor, ``nbytes`` is rounded up
    further, so that the parts of all ``size`` ranks are equally large.
    """
    native = numpy_dtype(dtype)
    count = -(-nbytes // native.itemsize)
    if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        one = np.zeros(count, native)
        return BenchArrays(one, one)
    part = -(-count // size)
    whole = np.zeros(part * size, native)
    if kind is Kind.ALLGATHER:
        return BenchArrays(np.zeros(part, native), whole)
    return BenchArrays(whole, np.zeros(part if kind is Kind.REDUCESCATTER else part * size, native))


def contenders(
    job: Job, peers: Mapping[str, BenchPeer], kind: Kind, memory: BenchArrays, whole: bool = True
) -> dict[str, Call]:
    """Return the calls to time, by name: the transport alone, ddl's whole call if ``whole`` is true, and the peers.

    All calls use the arrays of ``memory``, and a reduction is a sum. The transport is left out if only one thread may
    call it. A peer is left out if it does not have the collective ``kind`` or the type of the elements.
    """
    transport = job.sets.communicator(0).transport
    calls: dict[str, Call] = {}
    if not transport.capabilities.thread_bound:
        calls[TRANSPORT] = _transport_call(transport, kind, memory)
    if whole:
        calls[WHOLE] = _whole_call(kind, memory)
    for name, peer in peers.items():
        try:
            calls[name] = peer.operation(kind, memory.source, memory.target)
        except NotImplementedError:
            continue
    return calls


def check(kind: Kind, memory: BenchArrays, calls: Mapping[str, Call], rank: int, size: int) -> None:
    """Run each of ``calls`` once, with values that differ between ranks, and check the results.

    Raises DdlInternalError if a result is wrong. Every rank must call this function. At the end it fills the arrays of
    ``memory`` with zeros. Other values would grow when sums in place are repeated, and very large values are slow.
    """
    values = [1 + r % 2 for r in range(size)]
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        values = [sum(values)] * size
    elif kind is Kind.BROADCAST:
        values = values[:1] * size
    right = np.repeat(values, memory.target.size // size) if kind in (Kind.ALLGATHER, Kind.ALLTOALL) else values[0]
    for name, call in calls.items():
        memory.target.fill(0)
        memory.source.fill(1 + rank % 2)
        result = call()
        got = result if name == WHOLE else memory.target
        if not np.array_equal(np.asarray(got), np.broadcast_to(right, memory.target.shape)):
            raise DdlInternalError(f"{kind.name.lower()} of {memory.nbytes} bytes: the result of {name} is wrong")
    memory.source.fill(0)
    memory.target.fill(0)


def finish(work: Work) -> None:
    """Wait until ``work`` is complete, without a time limit. The engine waits in the same way."""
    while not work.wait(_WAIT_S):
        pass


def _transport_call(transport: Transport, kind: Kind, memory: BenchArrays) -> Call:
    """Return a function that runs the collective directly on the open transport, in the way in which the engine does.

    While the function runs, the engine must be idle.
    """
    adapter = NumpyAdapter()
    source, target = (adapter.buffer(array, elementwise=True) for array in (memory.source, memory.target))
    size = transport.context.size
    part = source.count // size
    if kind is Kind.ALLREDUCE:
        return _allreduce_call(transport, source)
    if kind is Kind.BROADCAST:
        return lambda: finish(transport.broadcast(target, 0))
    if kind is Kind.ALLGATHER:
        return lambda: finish(transport.allgatherv(source, target, [source.count] * size))
    if kind is Kind.REDUCESCATTER:
        return lambda: finish(transport.reducescatterv(source, target, [part] * size, Sum))
    return lambda: finish(transport.alltoallv(source, target, [[part] * size] * size))


def _allreduce_call(transport: Transport, buffer: Buffer) -> Call:
    if not transport.capabilities.vectored:
        return lambda: finish(transport.allreduce(buffer, buffer, Sum))
    prepared = transport.prepare(Plan((buffer.count,), buffer.dtype, Sum))
    at: Sequence[int] = [buffer.address]
    return lambda: finish(prepared.start(at, at))


def _whole_call(kind: Kind, memory: BenchArrays) -> Call:
    """Return a function that makes ddl's whole call, in place if ddl has an in-place verb for this collective.

    All calls use the same tensor name, so that ddl recognises them as a step that repeats.
    """
    name = f"bench.{kind.name.lower()}.{memory.nbytes}"
    source = memory.source
    if kind is Kind.ALLREDUCE:
        return lambda: arrays.allreduce_(source, name=name, op=Sum)
    if kind is Kind.BROADCAST:
        return lambda: arrays.broadcast_(source, 0, name=name)
    if kind is Kind.ALLGATHER:
        return lambda: arrays.allgather(source, name=name)
    if kind is Kind.REDUCESCATTER:
        return lambda: arrays.reducescatter(source, name=name, op=Sum)
    return lambda: arrays.alltoall(source, name=name)
