"""Tests that persistent requests on the adapter's tensors obey ``ddlcore.contracts.framework``.

The ranks of a test are threads of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddl_conform import oracle
from ddl_conform.adapter_base import AdapterBase
from ddlcore.api import Companion, Operations, current_job
from ddlcore.contracts.framework import JobService, PersistentRequest
from ddlcore.errors import DdlInternalError, MismatchError, NotInitialized
from ddlcore.types import DType, Sum

__all__ = ["AdapterRequests"]

STEPS = 12  # enough for a schedule to be arranged and replayed


class _Beside(Companion):
    """An object that belongs to one job (see ``Companion``), and counts how often the job has closed it."""

    def __init__(self, job: JobService) -> None:
        super().__init__(job)
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class AdapterRequests(AdapterBase):
    """The tests of ``ddlcore.contracts.framework``, which a framework's package uses to start operations itself."""

    def start(self, job: JobService, request: PersistentRequest, tensor: Any) -> None:
        """Start ``request`` on ``tensor``, in the same way as a framework's package does.

        The request gets the address of the tensor, and the tensor itself as the owner of the memory.
        """
        job.start_request(request, self.where(tensor, request), tensor)

    def where(self, tensor: Any, request: PersistentRequest) -> int:
        """Return the address of ``tensor``, on which ``request`` will be started."""
        address = self.adapter.address(tensor, request.source)
        return self.adapter.buffer(tensor, elementwise=True).address if address is None else address

    def expected(self, size: int, shape: tuple[int, ...], step: int) -> oracle.Array:
        return oracle.reduce([self.values(DType.F32, shape, r, step) for r in range(size)], Sum)

    def test_a_persistent_request_is_started_in_each_step(self) -> None:
        """A persistent request reduces the tensor on which it is started, and writes the result into this tensor.

        The request counts its starts. After ``wait`` has returned, the request is no longer in flight.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            job: JobService = current_job()
            request: PersistentRequest | None = None
            for step in range(STEPS):
                tensor = self.make(self.values(DType.F32, (4, 5), rank, step))
                if request is None:
                    request = operations.persistent_allreduce(tensor, name="again", op=Sum)
                    assert (request.starts, request.pending) == (0, False), "a request that was never started"
                    request.wait()
                self.start(job, request, tensor)
                assert request.starts == step + 1, "starts does not count the starts"
                request.wait()
                assert request.poll(), "poll() is false after the end"
                assert not request.pending, "the request is in flight after wait()"
                self.same(tensor, self.expected(size, (4, 5), step), f"persistent allreduce, step {step}", terms=size)

        self.on_ranks(play)

    def test_a_request_writes_to_its_target(self) -> None:
        """After ``set_target(address, owner)``, a request writes its result to this address.

        The tensor on which the request is started keeps its values. After ``release_target``, the request no longer
        keeps the memory of the result alive.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            job: JobService = current_job()
            tensor = self.make(self.values(DType.F32, (6,), rank))
            outputs = [self.adapter.allocate(tensor) for _ in range(2)]
            request = operations.persistent_allreduce(tensor, name="apart", op=Sum, output=outputs[0])
            for step in range(STEPS):
                output = outputs[step % 2]
                self.adapter.copy(tensor, output)
                request.set_target(self.adapter.buffer(output, elementwise=True).address, output)
                self.start(job, request, tensor)
                request.wait()
                assert request.target.owner is output, "the request does not keep the memory of its result"
                request.release_target()
                assert request.target.owner is None, "release_target() keeps the memory"
                self.same(output, self.expected(size, (6,), 0), f"the target in step {step}", terms=size)
                self.same(tensor, self.values(DType.F32, (6,), rank), f"the source in step {step}")

        self.on_ranks(play)

    def test_requests_are_started_together(self) -> None:
        """``start_all`` starts several requests by one call, both with ``waits=True`` and with ``waits=False``."""
        shapes = ((3,), (2, 2), (), (0,), (40,))

        def play(rank: int, size: int, operations: Operations) -> None:
            job: JobService = current_job()
            requests: list[PersistentRequest] = []
            for step in range(STEPS):
                tensors = [self.make(self.values(DType.F32, shape, rank, step)) for shape in shapes]
                for i, tensor in enumerate(tensors[len(requests) :], len(requests)):
                    requests.append(operations.persistent_allreduce(tensor, name=f"all.{i}", op=Sum))
                started = [(request, self.where(t, request), t) for request, t in zip(requests, tensors)]
                job.start_all(started, waits=step % 2 == 0)
                for request in reversed(requests):
                    if not request.succeeded():
                        request.wait()
                for shape, tensor in zip(shapes, tensors):
                    self.same(tensor, self.expected(size, shape, step), f"{list(shape)} in step {step}", terms=size)

        self.on_ranks(play)

    def test_a_failed_request_can_be_started_again(self) -> None:
        """A request that has failed can be started again, and the job and its other requests still work.

        The request fails because each rank passes a different text as ``part_of``: every ``wait`` raises MismatchError.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            job: JobService = current_job()
            tensor = self.make(self.values(DType.F32, (5,), rank))
            differs = operations.persistent_allreduce(tensor, name="differs", op=Sum, part_of=f"{rank} gradients")
            other = self.make(self.values(DType.F32, (5,), rank))
            good = operations.persistent_allreduce(other, name="good", op=Sum)
            for _ in range(2):
                self.start(job, differs, tensor)
                for _ in range(2):
                    with pytest.raises(MismatchError, match="gradients"):
                        differs.wait()
                assert not differs.succeeded(), "succeeded() is true after an error"
            self.same(tensor, self.values(DType.F32, (5,), rank), "the tensor after an error")
            self.start(job, good, other)
            good.wait()
            self.same(other, self.expected(size, (5,), 0), "the allreduce after an error", terms=size)

        self.on_ranks(play)

    def test_a_request_in_flight_is_not_started_again(self) -> None:
        """If a request is in flight, another start of this request raises ValueError.

        If a request in flight is passed to ``start_all``, the requests before it in the list are started, and the
        requests after it are not started.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            job: JobService = current_job()
            tensors = [self.make(self.values(DType.F32, (5,), rank, seed)) for seed in range(3)]
            requests: list[PersistentRequest] = [
                operations.persistent_allreduce(tensor, name=f"once.{i}", op=Sum) for i, tensor in enumerate(tensors)
            ]
            started = [(request, self.where(t, request), t) for request, t in zip(requests, tensors)]
            with pytest.raises(ValueError, match="in flight"):
                job.start_all([started[0], started[1], started[0], started[2]])
            assert [request.starts for request in requests] == [1, 1, 0], "what was started beside a refused request"
            job.start_request(*started[2])
            for seed, (request, tensor) in enumerate(zip(requests, tensors)):
                request.wait()
                self.same(tensor, self.expected(size, (5,), seed), f"request {seed}", terms=size)

        self.on_ranks(play)

    def test_names_pair_the_calls(self) -> None:
        """Calls without a name are paired across the ranks by their order.

        A persistent request on one rank is paired with a call of a verb on another rank if both have the same name.
        ``next_ordinal`` returns 0, 1, 2 and so on for each text that is passed to it.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            job: JobService = current_job()
            assert [job.next_ordinal("mine"), job.next_ordinal("mine"), job.next_ordinal("other")] == [0, 1, 0]
            tensors = [self.make(self.values(DType.F32, (3,), rank, seed)) for seed in range(4)]
            handles = [operations.allreduce_async(tensor, op=Sum) for tensor in tensors]
            request: PersistentRequest = operations.persistent_allreduce(tensors[0], name="named", op=Sum)
            for seed, handle in enumerate(handles):
                self.same(handle.wait(), self.expected(size, (3,), seed), f"unnamed call {seed}", terms=size)
            named = [operations.allreduce_async(tensors[1], op=Sum, name="named")] if rank else []
            if rank == 0:  # the messages of the two are the same
                self.start(job, request, tensors[1])
                request.wait()
                self.same(tensors[1], self.expected(size, (3,), 1), "a request among calls of its name", terms=size)
            for handle in named:
                self.same(handle.wait(), self.expected(size, (3,), 1), "a call beside a request", terms=size)
            assert job.members(0) == tuple(range(size)), "members() of the global process set"
            assert job.members(99) is None, "members() of a process set that does not exist"

        self.on_ranks(play)

    def test_a_closed_job_starts_nothing(self) -> None:
        """After ``JobService.shutdown``, a start of a request raises NotInitialized.

        The job has then also closed its companions. If another rank starts an operation, its ``wait`` raises an error
        whose message contains the reason that was passed to ``shutdown``.
        """

        def play(rank: int, size: int, operations: Operations) -> None:
            job: JobService = current_job()
            beside = job.companion(_Beside)
            assert job.companion(_Beside) is beside, "companion() has made a second one"
            tensor = self.make(self.values(DType.F32, (5,), rank))
            request: PersistentRequest = operations.persistent_allreduce(tensor, name="late", op=Sum)
            self.start(job, request, tensor)
            request.wait()
            if rank == 0:
                job.shutdown("it has begun a step that it cannot finish")
                assert job.closed, "closed is false after shutdown()"
                assert beside.closed, "the companion was not closed"
                self._refused(lambda: self.start(job, request, tensor), request, NotInitialized, "init")
                self._refused(
                    lambda: job.start_all([(request, self.where(tensor, request), tensor)]),
                    request,
                    NotInitialized,
                    "init",
                )
                return

            def need_rank_0() -> None:
                self.start(job, request, tensor)
                request.wait()

            with pytest.raises(DdlInternalError, match="a step that it cannot finish"):
                need_rank_0()

        self.on_ranks(play)

    def _refused(
        self, start: Callable[[], None], request: PersistentRequest, error: type[Exception], match: str
    ) -> None:
        before = request.starts
        with pytest.raises(error, match=match):
            start()
        assert (request.starts, request.pending) == (before, False), "a refused start has changed the request"
