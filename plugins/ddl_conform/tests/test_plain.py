"""What the contract derives (reducescatterv, alltoallv, barrier) passes the kit over the least that must be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from ddlcore.contracts.transport import Transport
from ddlcore.testing import TransportSuite
from ddlcore.types import DType, ReduceOp
from plugins.ddl_conform.tests.plain import Meeting, PlainTransport


class PlainSuite(TransportSuite):
    """Not collected: the tests that concern it are called below."""

    sizes = (1, 2, 3, 4)

    def make(self, size: int) -> Sequence[Transport]:
        meeting = Meeting(size)
        return [PlainTransport(meeting) for _ in range(size)]


@pytest.fixture
def suite() -> Iterator[PlainSuite]:
    """As pytest would run it."""
    suite = PlainSuite()
    suite.setup_method()
    yield suite
    suite.teardown_method()


@pytest.mark.parametrize(
    "standard_test",
    [
        lambda suite: suite.test_allreduce(DType.F32, ReduceOp.Sum),
        lambda suite: suite.test_allgatherv(DType.I16),
        lambda suite: suite.test_broadcast(DType.F64),
        lambda suite: suite.test_reducescatterv(DType.BF16, ReduceOp.Sum),
        lambda suite: suite.test_reducescatterv(DType.I32, ReduceOp.Max),
        lambda suite: suite.test_alltoallv(DType.U8),
        lambda suite: suite.test_alltoallv(DType.F64),
        lambda suite: suite.test_barrier(),
        lambda suite: suite.test_programs(),
        lambda suite: suite.test_a_new_group_works_after_abort(),
    ],
)
def test_three_methods_are_enough(suite: PlainSuite, standard_test: Callable[[TransportSuite], None]) -> None:
    """open, allreduce, allgatherv and broadcast give all collectives, also in random programs."""
    standard_test(suite)
