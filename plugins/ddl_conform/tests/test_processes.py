"""A suite whose ranks are processes refuses mistakes in one line, before any process starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ddl_conform.threads import ThreadsTransport

from ddlcore.contracts.transport import Transport
from ddlcore.testing import ProcessSuite

TARGET = 'target = "module:Class" of the transport, which each process imports'


class Nameless(ProcessSuite):
    """Not collected: the tests below set it up."""


class OwnMake(ProcessSuite):
    """Likewise; its ranks would be threads of one process."""

    target = "ddl_conform.threads:ThreadsTransport"

    def make(self, size: int) -> Sequence[Transport]:
        return [ThreadsTransport() for _ in range(size)]


@pytest.mark.parametrize(
    ("suite", "reason"),
    [
        (Nameless, f"Nameless has no target; set it: {TARGET}"),
        (OwnMake, f"OwnMake overrides make(); remove it and set target: {TARGET}"),
    ],
)
def test_mistakes_are_refused_in_one_line(suite: type[ProcessSuite], reason: str) -> None:
    """Both are easily made by those who change the base class of a TransportSuite."""
    with pytest.raises(pytest.fail.Exception) as failure:
        suite.setup_class()
    assert (failure.value.msg, failure.value.pytrace) == (reason, False)
