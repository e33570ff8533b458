"""The kit bites: transports, adapters, compressors and policies with one fault each fail the test that is meant for it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddl_conform.builtin import NumpySuite
from ddl_conform.threads import ThreadsTransport
from ddl_conform.transport_life import CALLS

from ddlcore.builtin.compressors import Bf16Compression
from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.contracts.fusion import FusionPolicy, Ready
from ddlcore.contracts.transport import (
    DONE,
    Context,
    Memory,
    Move,
    Plan,
    Prepared,
    PreparedMove,
    Transport,
    Work,
    view,
)
from ddlcore.errors import TransportError
from ddlcore.testing import CompressorSuite, DeadlinePassed, FusionSuite, TransportSuite
from ddlcore.types import Buffer, DType, Kind, ReduceOp
from plugins.ddl_conform.tests.plain import Meeting, PlainTransport
from tests.tiers import long

# --- transports


class TailDropped(ThreadsTransport):
    """Forgets the last element of large tensors."""

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        if source.count > 10_000:
            source = Buffer(source.address, source.count - 1, source.dtype, (source.count - 1,), owner=source)
            target = Buffer(target.address, target.count - 1, target.dtype, (target.count - 1,), owner=target)
        return super().allreduce(source, target, op)


class OrderReversed(ThreadsTransport):
    """Adds from the last rank to the first: for its own group every rank's number is turned round."""

    def open(self, context: Context) -> None:
        last = context.size - 1
        super().open(
            Context(
                last - context.rank,
                context.members[::-1],
                context.store,
                context.kernels,
                context.settings,
                context.timeout_s,
                context.name,
            )
        )


class NothingIgnored(ThreadsTransport):
    """A rank that has nothing to give does not take part."""

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        return DONE if source.count == 0 else super().allgatherv(source, target, counts)


class GuardBroken(ThreadsTransport):
    """Writes whole words: up to seven bytes too many."""

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        work = super().broadcast(buffer, root)
        view(buffer.address + buffer.nbytes, -buffer.nbytes % 8)[:] = bytes(-buffer.nbytes % 8)
        return work


class SourceSpent(ThreadsTransport):
    """Uses the source as its working memory."""

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        work = super().reducescatterv(source, target, counts, op)
        view(source.address, min(1, source.nbytes))[:] = bytes(min(1, source.nbytes))
        return work


class BarrierSkipped(ThreadsTransport):
    """Lets everybody through at once."""

    def barrier(self) -> Work:
        return DONE


class AbortForgotten(ThreadsTransport):
    """Goes on waiting, until the group's own end."""

    aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        if self.aborts > 1:
            super().abort()


class DeafWhileOpening(ThreadsTransport):
    """Notices an abort only when it is open."""

    opening = False

    def open(self, context: Context) -> None:
        self.opening = True
        super().open(replace(context, timeout_s=6.0))
        self.opening = False

    def abort(self) -> None:
        if not self.opening:
            super().abort()


class FileLeft(ThreadsTransport):
    """Opens a descriptor that nobody closes."""

    left: list[Any] = []  # noqa: RUF012  # emptied by the test

    def open(self, context: Context) -> None:
        super().open(context)
        self.left.append(open("/dev/null"))  # noqa: SIM115  # that is the fault


class DummyTaken(ThreadsTransport):
    """Adds up whatever memory there is, as if everybody had come with data."""

    capabilities = replace(ThreadsTransport.capabilities, atomic=True)

    def prepare(self, plan: Plan) -> Prepared:
        return _Careless(super().prepare(plan), plan)


class _Careless(Prepared):
    def __init__(self, inner: Prepared, plan: Plan) -> None:
        self._inner, self._plan = inner, plan

    def start(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        return self._inner.start(sources, targets)

    def run_atomic(self, sources: Sequence[int], targets: Sequence[int], real: bool) -> bool:
        memory = Memory(sum(self._plan.counts) * self._plan.dtype.itemsize)
        dummies = [memory.address] * len(self._plan.counts)
        self.start(sources if real else dummies, targets if real else dummies)
        return True


class BoundOnce(DummyTaken):
    """Remembers the first memory that was bound."""

    def prepare(self, plan: Plan) -> Prepared:
        return _Stubborn(ThreadsTransport.prepare(self, plan), plan)


class _Stubborn(_Careless):
    def bind(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not hasattr(self, "_addresses"):
            super().bind(sources, targets)


class CountsKept(ThreadsTransport):
    """Moves what the first run has moved, with the counts of the first run."""

    def prepare_move(self, move: Move) -> PreparedMove:
        return _FirstCounts(self, move)


class _FirstCounts(PreparedMove):
    _counts: Any = None

    def run(self, source: Buffer, target: Buffer, counts: Any, ticket: int) -> None:
        self._counts = self._counts or counts
        super().run(source, target, self._counts, ticket)


class TicketsUnread(ThreadsTransport):
    """Says that a move may be repeated, and moves it twice."""

    capabilities = replace(ThreadsTransport.capabilities, resumable_moves=True)


@contextmanager
def suite_of(transport: type[Transport]) -> Iterator[TransportSuite]:
    """The suite over it, as pytest would run it; with little patience where the fault is that the time passes."""
    hangs = transport in (NothingIgnored, AbortForgotten, DeafWhileOpening, TicketsUnread)

    class Mutant(TransportSuite):
        __test__ = False
        sizes = (2, 3)
        deadline_s = 3.0 if hangs else TransportSuite.deadline_s
        abort_s = 1.0 if hangs else TransportSuite.abort_s

        def make(self, size: int) -> Sequence[Transport]:
            return [transport() for _ in range(size)]

    suite = Mutant()
    suite.setup_method()
    try:
        yield suite
    finally:
        suite.teardown_method()


def _abort_of_barrier(suite: TransportSuite) -> None:
    (barrier,) = (call for call in CALLS.mark.args[1] if "barrier" in call.__name__)
    suite.test_abort_ends_a_pending_call(barrier)


@pytest.mark.parametrize(
    ("mutant", "bitten_by", "complaint"),
    [
        (TailDropped, lambda suite: suite.test_large_allreduce(DType.F32), "1 of .* elements differ"),
        (OrderReversed, lambda suite: suite.test_bits_do_not_depend_on_the_bucket(DType.F32), "elements differ"),
        (OrderReversed, lambda suite: suite.test_allgatherv(DType.I32), "elements differ"),
        (NothingIgnored, lambda suite: suite.test_allgatherv(DType.I32), "did not end within 3 s|elements"),
        (GuardBroken, lambda suite: suite.test_broadcast(DType.U8), "bytes behind the memory were written over"),
        (SourceSpent, lambda suite: suite.test_reducescatterv(DType.I32, ReduceOp.Sum), "the source was changed"),
        (BarrierSkipped, lambda suite: suite.test_barrier(), "passed barrier 1"),
        (AbortForgotten, _abort_of_barrier, "call went on 1 s after its abort"),
        (
            DeafWhileOpening,
            lambda suite: suite.test_abort_ends_a_pending_open("last"),
            "open went on 1 s after its abort",
        ),
        *long(
            (DeafWhileOpening, lambda suite: suite.test_abort_ends_a_pending_open("first"), "open went on 1 s after")
        ),
        (DummyTaken, lambda suite: suite.test_a_dummy_makes_a_bucket_void("few"), "written to|was told True with 1"),
        (
            CountsKept,
            lambda suite: suite.test_a_prepared_move_gives_what_its_collective_gives(Kind.ALLGATHER),
            "differ",
        ),
        (TicketsUnread, lambda suite: suite.test_a_repeated_move_has_no_effect(Kind.ALLTOALL), "repeated move"),
        (BoundOnce, lambda suite: suite.test_bound_memory_is_entered_again("few"), "a sum is wrong"),
        (FileLeft, lambda suite: suite.test_nothing_stays(), "left behind after close: {'descriptors'"),
    ],
)
def test_a_faulty_transport_is_found(
    mutant: type[Transport], bitten_by: Callable[[TransportSuite], None], complaint: str
) -> None:
    """Each fault fails the test that is named here, with words that tell what it is."""
    try:
        with suite_of(mutant) as suite, pytest.raises(AssertionError, match=complaint):
            bitten_by(suite)
    finally:
        for file in FileLeft.left:
            file.close()
        FileLeft.left.clear()


def test_the_same_tests_pass_without_the_faults() -> None:
    """What bites is the fault, not the way in which the mutants are run."""
    with suite_of(ThreadsTransport) as suite:
        suite.test_large_allreduce(DType.F32)
        suite.test_bits_do_not_depend_on_the_bucket(DType.F32)
        suite.test_allgatherv(DType.I32)
        suite.test_broadcast(DType.U8)
        suite.test_reducescatterv(DType.I32, ReduceOp.Sum)
        suite.test_barrier()
        with suite_of(DummyTaken) as careless:
            careless.test_bound_memory_is_entered_again("many")
        _abort_of_barrier(suite)
        suite.test_abort_ends_a_pending_open("first")
        suite.test_abort_ends_a_pending_open("last")
        suite.test_nothing_stays()


# --- the other kinds


class CopyingAdapter(NumpyAdapter):
    """Describes a copy instead of the array."""

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        return super().buffer(tensor.copy(order="K"), elementwise=elementwise)


class ForgetfulAdapter(NumpyAdapter):
    """Lets go of adopted memory."""

    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        raw = np.frombuffer(view(memory.address, int(np.prod(shape)) * dtype.itemsize), np.uint8)
        return raw.view(like.dtype).reshape(tuple(shape))


class PairsAdapter(NumpyAdapter):
    """Its buffers describe complex numbers as pairs of floats, and do not say that these are complex numbers."""

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        return replace(super().buffer(tensor, elementwise=elementwise), element="")


class RealAdapter(NumpyAdapter):
    """Makes results with the values of the carrier's elements, where the bits of these elements are needed."""

    def restore(self, tensor: Any, like: Any) -> Any:
        return super().restore(tensor, like) if like.dtype.kind == "c" else tensor.astype(like.dtype)


def test_an_adapter_that_forgets_the_type_is_found() -> None:
    """Three tests find it: two look at its buffers, and in the third, ranks disagree but no error is raised."""

    class Mutant(NumpySuite):
        adapter = PairsAdapter()

    with pytest.raises(AssertionError):
        Mutant().test_a_carried_tensor_is_described("complex64", (7,))
    with pytest.raises(AssertionError):
        Mutant().test_pairs_of_numbers_are_another_type("complex64")
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        Mutant().test_ranks_that_disagree_are_told("complex64")


def test_an_adapter_that_converts_values_is_found() -> None:
    """The test that compares the bits of gathered tensors finds it."""

    class Mutant(NumpySuite):
        adapter = RealAdapter()

    with pytest.raises(AssertionError, match="allgather"):
        Mutant().test_carried_tensors_are_moved("float8_e5m2")


def test_an_adapter_that_copies_is_found() -> None:
    """By writing through its buffer."""

    class Mutant(NumpySuite):
        adapter = CopyingAdapter()

    with pytest.raises(AssertionError, match="after writing through the buffer"):
        Mutant().test_no_copy_is_made(DType.F32)
    with pytest.raises(AssertionError, match="allreduce in place"):
        Mutant().test_allreduce_in_place()


def test_an_adapter_that_lets_go_of_memory_is_found() -> None:
    """Nothing refers to it any more."""

    class Mutant(NumpySuite):
        adapter = ForgetfulAdapter()

    with pytest.raises(AssertionError, match="nothing keeps adopted memory alive"):
        Mutant().test_adopted_memory_lives_with_its_tensor()


class SendsFirst(PlainTransport):
    """Each of two ranks sends its whole message over a socket before it receives the other's."""

    def __init__(self, meeting: Meeting, connection: socket.socket) -> None:
        super().__init__(meeting)
        self._connection = connection

    def exchange(self, source: Any) -> list[Any]:
        mine, theirs = source.tobytes(), bytearray()
        try:
            self._connection.sendall(len(mine).to_bytes(8, "big") + mine)
            head = self._connection.recv(8, socket.MSG_WAITALL)
            while len(theirs) < int.from_bytes(head, "big"):
                piece = self._connection.recv(int.from_bytes(head, "big") - len(theirs))
                if not piece:
                    raise ConnectionResetError("the other rank has closed its connection")
                theirs += piece
        except OSError as error:
            raise TransportError(f"{self.context.name}: aborted") from error
        other = np.frombuffer(theirs, source.dtype)
        return [source.copy(), other] if self.context.rank == 0 else [other, source.copy()]

    def abort(self) -> None:
        super().abort()
        with suppress(OSError):  # it is already closed
            self._connection.shutdown(socket.SHUT_RDWR)  # ends a pending sendall

    def close(self) -> None:
        self._connection.close()


class SendsFirstSuite(TransportSuite):
    """Not collected: the tests that concern it are called below."""

    sizes = (2,)
    deadline_s = 3.0

    def make(self, size: int) -> Sequence[Transport]:
        meeting = Meeting(size)
        return [SendsFirst(meeting, connection) for connection in socket.socketpair()]


def test_ranks_that_all_send_before_they_receive_are_found() -> None:
    """Small messages fit the sockets' buffers, and arrive; only large ones in both directions show the fault."""
    suite = SendsFirstSuite()
    suite.setup_method()
    try:
        suite.test_allreduce(DType.F32, ReduceOp.Sum)
        with pytest.raises(DeadlinePassed):
            suite.test_large_messages_cross()
    finally:
        suite.teardown_method()


class FeedbackTooEarly(Bf16Compression):
    """Keeps what rounding cost and adds it next time, but at once instead of in commit."""

    def __init__(self, kernels: Any) -> None:
        super().__init__(kernels)
        self.rest: Any = 0.0

    def encode(self, name: str, source: Buffer, target: Buffer, scale: float) -> None:
        values = np.frombuffer(view(source.address, source.nbytes), source.dtype.label) * scale + self.rest
        values = np.ascontiguousarray(values.astype(source.dtype.label))
        self.kernels.pack([values.ctypes.data], [values.size], source.dtype, target.address, target.dtype)
        back = np.empty_like(values)
        self.kernels.unpack(target.address, target.dtype, [back.ctypes.data], [back.size], source.dtype)
        self.rest = values - back


def test_a_compressor_that_commits_too_early_is_found() -> None:
    """Its state changed although the bucket was void; it also takes one tensor's rest for another's."""

    class Mutant(CompressorSuite):
        compressor = FeedbackTooEarly
        error = 2.0**-6

    with pytest.raises(AssertionError, match="after a void bucket the same values are encoded otherwise"):
        Mutant().test_a_void_bucket_leaves_no_trace(DType.F32)


class KeysMixed(ThresholdFusion):
    """Takes all tensors for alike."""

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        return super().arrange([Ready(tensor.name, "", tensor.nbytes) for tensor in ready], params)


class TensorLost(ThresholdFusion):
    """Forgets the last tensor of a long list."""

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        return super().arrange(ready[:5], params)


@pytest.mark.parametrize(
    ("mutant", "bitten_by", "complaint"),
    [
        (KeysMixed, FusionSuite.test_keys_never_share_a_bucket, "holds keys"),
        (TensorLost, FusionSuite.test_every_tensor_is_placed_once, "positions of"),
    ],
)
def test_a_faulty_policy_is_found(
    mutant: Callable[[], FusionPolicy], bitten_by: Callable[[FusionSuite], None], complaint: str
) -> None:
    """Each fault fails the test that is named here."""

    class Mutant(FusionSuite):
        def make(self) -> FusionPolicy:
            return mutant()

    with pytest.raises(AssertionError, match=complaint):
        bitten_by(Mutant())
