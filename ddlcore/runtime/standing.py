"""Keeps what the coordinator has said about a rank's membership in its world: begun, refused, parted, or ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from ddlcore.errors import DdlInternalError, DeadlineExceeded, PeerLost, ReplicasDiffer
from ddlcore.messages.elastic import CoordinatorLost, WorldReport
from ddlcore.messages.observing import Differ, Settled
from ddlcore.messages.to_rank import Farewell, Lost, Refused, Stalled, Welcome

Broken = Callable[[Callable[[str], BaseException]], None]


class Standing:
    """A rank's membership in one world. The control thread calls the methods; any thread may read and wait.

    ``broken(make)`` is called when the job cannot continue, for example because ranks are lost; ``make(during)`` returns
    the error for the operation ``during``.
    """

    def __init__(self, broken: Broken) -> None:
        self._broken = broken
        self.session = ""  # name of the world; "" before it has begun
        self.report: WorldReport | None = None  # on this world of an elastic job
        self.refusal = ""  # why this world cannot begin
        self.late = False  # whether that is because ranks have not called init in time
        self.welcomed = threading.Event()  # set by Welcome, Refused or the end of the job
        self.settled = threading.Event()  # set by Settled or the end of the job
        self.parted = threading.Event()  # set by Farewell or the end of the job

    def over(self) -> None:
        """Let all who wait go on, because the coordinator will say nothing more."""
        self.settled.set()
        self.welcomed.set()
        self.parted.set()

    def welcome(self, message: Welcome) -> None:
        self.session, self.report = message.session, message.report
        self.welcomed.set()

    def refused(self, message: Refused) -> None:
        self.refusal, self.late = message.text, message.late
        self.welcomed.set()
        self.parted.set()

    def farewell(self, _message: Farewell) -> None:
        self.parted.set()

    def settle(self, _message: Settled) -> None:
        self.settled.set()

    def differ(self, message: Differ) -> None:
        self._broken(partial(_differ, message))
        self.settled.set()
        self.parted.set()

    def lost(self, message: Lost) -> None:
        self._broken(lambda during: PeerLost(message.ranks, message.reason, during))
        self.welcomed.set()
        self.parted.set()

    def stalled(self, message: Stalled) -> None:
        self._broken(lambda during: DeadlineExceeded(_during(message.text, during)))
        self.welcomed.set()
        self.parted.set()

    def coordinator_lost(self, message: CoordinatorLost) -> None:
        self._broken(lambda during: DdlInternalError(_during(message.reason, during)))
        self.over()

    def unreachable(self, error: Exception) -> None:
        """End the job: the coordinator cannot be reached, or the control thread has a bug. Nothing can continue."""
        known = isinstance(error, DdlInternalError)
        text = str(error) if known else f"the control thread failed: {type(error).__name__}: {error}"

        def make(during: str) -> BaseException:
            failure = DdlInternalError(_during(text, during))
            failure.__cause__ = error
            return failure

        self._broken(make)


def _during(text: str, during: str) -> str:
    return f"{text} (during {during})" if during else text


def _differ(message: Differ, during: str) -> BaseException:
    text = f"{message.text}\n  seen during {during}" if during else message.text
    distances = dict(message.distances)
    return ReplicasDiffer(text, message.tensor, message.groups, message.step, message.agreed_step, distances)
