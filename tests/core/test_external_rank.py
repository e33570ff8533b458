"""Ranks of another launcher, while they wait for each other: what each says of the others."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from ddlcore.contracts.cluster import RankInfo
from ddlcore.control.channel import Channel
from ddlcore.errors import DeadlineExceeded
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import Arrive, ToCoordinator
from ddlcore.messages.to_rank import Arrivals, FromCoordinator
from ddlcore.plug.settings import settings_of
from ddlcore.process.external_rank import ExternalRank


class Script(Channel):
    """A channel on which the coordinator answers a rank that gives up with ``answer``, and nothing else."""

    def __init__(self, answer: Sequence[FromCoordinator]) -> None:
        self.sent: list[ToCoordinator] = []
        self._answer = list(answer)

    def send(self, message: ToCoordinator) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> list[FromCoordinator]:
        last = self.sent[-1]
        if isinstance(last, Arrive) and not last.patient and self._answer:
            return self._answer
        time.sleep(timeout_s)
        return []

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


RANKS = tuple(map(LaunchedRank, range(3)))


def give_up(answer: Sequence[FromCoordinator]) -> str:
    """What rank 1 of three raises when its deadline passes."""
    settings, registry = settings_of({"DDL_START_TIMEOUT_S": "7", "DDL_RENDEZVOUS_DIR": "/nowhere"})
    rank = ExternalRank("plain", RankInfo(1, 3, launch="x"), settings, registry, {})
    channel = Script(answer)
    with pytest.raises(DeadlineExceeded) as caught:
        rank._meet(channel, RANKS, time.monotonic() + 0.1)
    last = channel.sent[-1]
    assert isinstance(last, Arrive) and (last.patient, last.timeout_s) == (False, 7.0)
    return str(caught.value)


def test_who_gives_up_names_who_has_not_come() -> None:
    """And who has, with their hosts, by the coordinator's answer."""
    here = tuple((rank, Arrive("t", RANKS, "here:1", "kin", 1)) for rank in RANKS[:2])
    assert give_up([Arrivals(here, 7.0)]) == (
        "init: rank 2 has not called init within 7 s (DDL_START_TIMEOUT_S); these have: rank 0 on here, 1 on here"
    )


def test_who_gives_up_without_an_answer_names_the_coordinator() -> None:
    """And not all ranks, itself among them, as if none had come."""
    text = give_up([])
    assert text.startswith("init: the coordinator in the process of rank 0 does not answer; waited 7 s (DDL_START_")
