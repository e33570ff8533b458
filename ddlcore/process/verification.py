"""Compares a rank's copies of the parameters with those of the other ranks, by digests."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from ddlcore.errors import ReplicasDiffer
from ddlcore.messages.observing import Digests, Explain, Sample, Settle
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.outbox import Outbox

log = logging.getLogger("ddl")


class Verifying(Protocol):
    """An object that keeps the digests of one optimizer's parameters; see ``Verification.add``."""

    def sample(self, asked: Explain) -> Sample:
        """Return the values that the coordinator asks for. The control thread calls this, so the call must not wait."""


class Verification:
    """The part of a job that compares parameters. ``failure``: why the job has ended, if it has."""

    def __init__(self, failure: JobFailure) -> None:
        self._failure = failure
        self._verifiers: dict[tuple[int, str], Verifying] = {}  # by process set and label
        self._told = False  # whether digests were sent for which a difference ends the job

    def add(self, set_id: int, kind: str, verifier: Verifying) -> str:
        """Add ``verifier``, which compares one optimizer's parameters over the process set ``set_id``.

        ``kind``: the optimizer's name in messages. Return the label by which all ranks identify the optimizer: ``kind``
        and, from the second verifier of the same kind on, a number. So all members of the process set must add their
        verifiers in the same order.
        """
        ordinal = 1 + sum(
            known == set_id and label.partition(" number ")[0] == kind for known, label in self._verifiers
        )
        label = kind if ordinal == 1 else f"{kind} number {ordinal}"
        self._verifiers[set_id, label] = verifier
        return label

    def check(self, message: Digests) -> None:
        """Note that ``message`` is about to be sent.

        If ``message.fatal`` is set and the job has already ended, the call raises the error with which it has ended.
        """
        if message.fatal:
            if self._failure.given:
                raise self._failure.error(f"step {message.step} of {message.label}")
            self._told = True

    def explain(self, asked: Explain) -> Sample:
        """Return the values that the coordinator asks for; an empty Sample if this rank cannot show them."""
        verifier = self._verifiers.get((asked.set_id, asked.label))
        try:
            return Sample() if verifier is None else verifier.sample(asked)
        except Exception as error:  # an error of the framework must not replace the reason why the job ends
            log.debug("this rank cannot show a tensor that differs: %r", error)
            return Sample()

    def settle(self, outbox: Outbox, settled: threading.Event, timeout_s: float) -> ReplicasDiffer | None:
        """Wait until the coordinator has compared the parameters' digests of all ranks; return an error if they differ.

        ``settled`` is set when it has. Return None if there is no difference, if no result has come after
        ``timeout_s``, or if a user thread has already raised the error with which the job has ended. Only digests that
        were sent with ``fatal`` set are waited for; a difference between other digests does not end the job.
        """
        if not self._told or self._failure.shown:
            return None
        if not self._failure.given:
            outbox.say(Settle())
            deadline_s = time.monotonic() + timeout_s
            # This loop polls and takes no lock: a signal handler may interrupt the loop at any moment and may call
            # shutdown itself.
            while not settled.is_set() and time.monotonic() < deadline_s:
                time.sleep(0.002)
        error = self._failure.error("shutdown") if self._failure.given and not self._failure.shown else None
        return error if isinstance(error, ReplicasDiffer) else None
