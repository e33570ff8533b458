"""Tests of the calls of NCCL that each operation makes: which types NCCL reduces, and that all work is queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ddl_conform.group import TransportGroup, finish
from ddl_conform.pretend import PretendRuntime
from ddl_nccl import reductions
from ddl_nccl.codes import native
from ddl_nccl.conformance import HostedTransport
from ddl_nccl.standin import StandIn
from ddl_nccl.transport import NcclTransport

from ddlcore.contracts.transport import ALL_OPS, DONE, Transport, Work
from ddlcore.errors import TransportError
from ddlcore.testing import oracle
from ddlcore.types import Buffer, DType, ReduceOp
from plugins.ddl_nccl.tests.worlds import open_group

SIZE = 3
OWN = {"send", "recv", "all_gather"}
REDUCED = [(dtype, op) for dtype in DType for op in sorted(ALL_OPS)]


def buffer(array: Any) -> Buffer:
    return Buffer(array.ctypes.data, array.size, DType.of(array.dtype.name), array.shape, owner=array)


def reduce(group: TransportGroup, dtype: DType, op: ReduceOp, count: int) -> list[oracle.Array]:
    """Run an allreduce, and return what each rank gets."""
    sources = [oracle.values(dtype, count, rank) for rank in range(group.size)]
    targets = [np.zeros_like(source) for source in sources]

    def play(rank: int, transport: Transport) -> None:
        finish(transport.allreduce(buffer(sources[rank]), buffer(targets[rank]), op))

    group.run(play)
    return targets


def asked(standin: StandIn, call: Callable[[], object]) -> set[str]:
    """Return the names of NCCL's functions that ``call`` has called."""
    standin.called.clear()
    call()
    return set(standin.called)


@pytest.fixture(scope="module")
def standin() -> StandIn:
    return StandIn()


@pytest.fixture(scope="module")
def group(standin: StandIn) -> Iterator[TransportGroup]:
    with open_group(SIZE, standin) as group:
        yield group
    assert standin.faults == [] and standin.alive() == []


@pytest.mark.parametrize(("dtype", "op"), REDUCED, ids=lambda value: getattr(value, "label", None) or value.name)
def test_who_reduces(standin: StandIn, group: TransportGroup, dtype: DType, op: ReduceOp) -> None:
    """NCCL reduces where it keeps ddl's promises; other values are moved as bytes and reduced by the kernels.

    A bool is reduced by NCCL as a byte.
    """
    count = 200_000
    calls = asked(standin, lambda: reduce(group, dtype, op, count))
    itself = dtype is DType.BOOL or not (
        dtype in (DType.F16, DType.BF16, DType.I16, DType.U16)
        or (dtype.is_float and op in (ReduceOp.Min, ReduceOp.Max))
    )
    assert calls == ({"all_reduce"} if itself else OWN if count * dtype.itemsize * SIZE > 1 << 20 else {"all_gather"})


def test_all_ranks_get_the_same_bits(group: TransportGroup) -> None:
    """All ranks get the same bits, also if they reduce different parts, or the rest on every rank."""
    for dtype in (DType.BF16, DType.I16):
        for count in (1, 1001, 300_007):
            first, *others = reduce(group, dtype, ReduceOp.Sum, count)
            assert all(first.tobytes() == other.tobytes() for other in others)


def test_large_ones_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are reduced in pieces, which limits scratch memory, with the same values."""
    monkeypatch.setattr(reductions, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(reductions, "WHOLE_BYTES", 1 << 16)
    standin = StandIn()
    with open_group(SIZE, standin) as group:
        count = (5 << 19) + 77
        sources = [oracle.values(DType.F16, count, rank) for rank in range(SIZE)]
        expected = oracle.reduce(sources, ReduceOp.Sum)
        targets = reduce(group, DType.F16, ReduceOp.Sum, count)
        assert all(target.tobytes() == expected.tobytes() for target in targets)
        for transport in group.transports:
            own = transport._own  # type: ignore[attr-defined]  # this transport's own
            assert own._scratch._memory.nbytes <= (1 << 20) + SIZE * 16
    assert standin.faults == []


def test_nccls_own_16_bits_are_a_setting() -> None:
    """With the setting, NCCL itself adds 16-bit floats and rounds at each hop: 2048 and ones stay 2048."""
    standin = StandIn()
    with open_group(SIZE, standin, {"nccl_native_16bit": True}) as group:
        arrays = [np.full(8, 2048 if rank == 1 else 1, np.float16) for rank in range(SIZE)]

        def play(rank: int, transport: Transport) -> None:
            finish(transport.allreduce(buffer(arrays[rank]), buffer(arrays[rank]), ReduceOp.Sum))

        assert asked(standin, lambda: group.run(play)) == {"all_reduce"}
        assert {float(array[0]) for array in arrays} == {2048.0}
        assert asked(standin, lambda: reduce(group, DType.BF16, ReduceOp.Max, 8)) == {"all_gather"}  # a NaN is kept
    assert {dtype for dtype, _ in native(True) - native(False)} == {DType.F16, DType.BF16}


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
def test_average(group: TransportGroup, kind: str) -> None:
    """Floats are averaged by NCCL, or by the kernels in the same pass as the sum."""
    dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    arrays = [np.array([3.0 * rank, 1.0, -6.0], dtype) for rank in range(SIZE)]

    def play(rank: int, transport: Transport) -> None:
        finish(transport.allreduce(buffer(arrays[rank]), buffer(arrays[rank]), ReduceOp.Average))

    group.run(play)
    for array in arrays:
        assert np.allclose(array.astype(np.float64), [3.0, 1.0, -6.0], rtol=1e-6)
    assert ReduceOp.Average in NcclTransport.capabilities.ops


MOVES: Mapping[str, Callable[[Transport, Buffer, Buffer], Work]] = {
    "equal allgather": lambda t, a, b: t.allgatherv(a, b, [a.count] * SIZE),
    "broadcast": lambda t, a, b: t.broadcast(a, 1),
    "alltoall": lambda t, a, b: t.alltoallv(b, _like(b), [[a.count] * SIZE] * SIZE),
    "equal reducescatter": lambda t, a, b: t.reducescatterv(b, a, [a.count] * SIZE, ReduceOp.Sum),
}
_kept: list[Any] = []


def _like(like: Buffer) -> Buffer:
    array = np.zeros(like.count, like.dtype.label)
    _kept.append(array)
    return buffer(array)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("equal allgather", ["all_gather"]),
        ("broadcast", ["broadcast"]),
        ("alltoall", ["recv", "recv", "send", "send"]),
        ("equal reducescatter", ["reduce_scatter"]),
    ],
)
def test_the_shortest_way(name: str, calls: list[str]) -> None:
    """An operation uses one call of NCCL if NCCL has one, and otherwise one message for each pair of ranks."""
    standin = StandIn()
    with open_group(SIZE, standin) as group:

        def play(rank: int, transport: Transport) -> None:
            a, b = np.ones(10, np.float32), np.ones(10 * SIZE, np.float32)
            finish(MOVES[name](transport, buffer(a), buffer(b)))

        standin.called.clear()
        group.run(play)
        assert sorted(standin.called) == sorted(calls * SIZE)
    _kept.clear()


class Ordered(HostedTransport):
    """A transport used as the engine uses it: calls are queued, and nobody waits."""

    capabilities = NcclTransport.capabilities


def test_calls_are_queued_and_nothing_waits() -> None:
    """While the device is held, every call returns immediately; what is queued later runs after it."""
    standin = StandIn()
    transports = [Ordered(standin) for _ in range(2)]
    with open_group(2, standin) as plain:
        group = TransportGroup(
            transports,
            plain.context(0).kernels,
            members=plain.context(0).members,
            settings={},
            deadline_s=20.0,
            name="queued",
        )
        group.open()
        small = [np.full(100, rank + 1, np.float16) for rank in range(2)]
        large = [np.zeros(200, np.float16) for _ in range(2)]
        copied = [np.zeros(200, np.float16) for _ in range(2)]

        def play(rank: int, transport: Transport) -> Any:
            assert isinstance(transport, Ordered)
            one, all_of_it = buffer(small[rank]), buffer(large[rank])
            with transport.queue.held():
                assert transport.allreduce(one, one, ReduceOp.Sum) is DONE
                assert transport.allgatherv(one, all_of_it, [100, 100]) is DONE
                assert transport.broadcast(one, 0) is DONE
                assert transport.reducescatterv(all_of_it, one, [100, 100], ReduceOp.Max) is DONE
                assert transport.alltoallv(one, one, [[0, 0], [0, 0]]) is DONE
                transport.queue.copy(large[rank].ctypes.data, copied[rank].ctypes.data, 400)
                event = transport.queue.record()
                assert (small[rank] == rank + 1).all() and not event.done()
            assert event.wait(40.0)
            return None

        try:
            group.run(play)
            assert all((array == 3).all() for array in (*small, *large, *copied))
        finally:
            group.close()
    assert standin.faults == [] and standin.alive() == []


class Placed(StandIn):
    """A stand-in that records calls of NCCL from a thread with another current device.

    NCCL would create a context on that device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = threading.local()
        self.asked: set[str] = set()

    @contextmanager
    def current(self) -> Iterator[None]:
        self.place.inside = True
        yield
        self.place.inside = False

    def _note(self, name: str) -> None:
        self.asked.add(name)
        if not getattr(self.place, "inside", False):
            self.faults.append(f"{name} was called on another device")

    def init(self, *arguments: Any) -> Any:
        self._note("init")
        return super().init(*arguments)

    def unique_id(self) -> bytes:
        self._note("unique_id")
        return super().unique_id()

    def _ask(self, call: Any, comm: Any, stream: int) -> None:
        self._note(call.kind)
        super()._ask(call, comm, stream)

    def _end(self, comm: Any, how: str) -> None:
        self._note(how)
        super()._end(comm, how)


def test_nccl_finds_its_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every call of NCCL, on any thread, the rank's device is current.

    Otherwise each rank would use memory of the host's first GPU.
    """
    standin = Placed()
    monkeypatch.setattr(PretendRuntime, "current", lambda runtime: standin.current())
    with open_group(2, standin) as group:
        for dtype in (DType.F32, DType.BF16):
            reduce(group, dtype, ReduceOp.Sum, 400_000)
        group.transports[0].close()
    assert {"unique_id", "init", "all_reduce", "send", "end", "abort"} <= standin.asked
    assert standin.faults == []


def test_it_serves_devices_only() -> None:
    """Opening without a device's queue raises an error that says what to do."""
    with open_group(1, StandIn()) as group, pytest.raises(TransportError, match="use another --backend"):
        NcclTransport(StandIn()).open(group.context(0))
