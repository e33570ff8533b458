"""Stores the state of a *round*, which is one reduction of all gradients. Neither sends nor waits.

A round survives an interrupt: if a signal's handler raises an exception, the round stays open, and the next
``synchronize()`` or ``step()`` continues the round. Wherever the interrupt occurs, no gradient is sent twice in a
round: ``Slot.round`` says that a gradient was about to be sent, and ``PersistentRequest.starts`` says whether it was
sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ddl_torch.slots import GradientGroup, Slot
from ddlcore.api import Handle, Waitable
from ddlcore.contracts import PersistentRequest

MOST_ROUNDS = 64  # how many rounds of one step have separate names: a loop that never steps must not fill the memory


class ReducedGradient(NamedTuple):
    """A gradient ``grad`` that was sent, and ``value``, the reduced gradient.

    ``place`` (results.py) puts ``value`` into ``.grad``.
    """

    grad: torch.Tensor
    value: torch.Tensor
    fresh: bool  # autograd created ``grad`` in this pass, so that no other code can expect the result in its memory


class Attempt:
    """The record of the operations that send one gradient, or one group of gradients, without a persistent request.

    After an interrupt (an exception that a signal handler raises), the sending can be continued with this record.
    """

    __slots__ = ("context", "done", "handle", "handles")

    def __init__(self) -> None:
        self.done = False  # whether its result was read, or there is none to read
        self.handles: list[Handle] = []  # the handles whose operations were submitted, or were about to be
        self.context: Any = None  # what is needed to read the result
        self.handle: Waitable | None = None  # gives the result; set when everything was submitted

    def go_on(self) -> list[Handle]:
        """Return the handles of the operations that were submitted before an interrupt, in order.

        This method drops the handles of operations that were about to be submitted and were not.
        """
        self.handles[:] = [handle for handle in self.handles if handle.submitted]
        return self.handles


class Round:
    """The state of one optimizer's current round (reduction of all gradients), or of its last round if none is open.

    A round lasts from the first gradient that is sent until every reduced gradient is in ``.grad``.
    """

    def __init__(self) -> None:
        self.number = 0  # counts the rounds of this optimizer
        self.of_step = 0  # counts the rounds since the last step
        self.turn = 0  # for which round of a step the slots hold their persistent requests
        self.open = False
        self.entered = False  # sending has begun at the end of a pass, or a pass that had begun to send has failed
        self.settled = False  # every result is in its place, and nothing is left but to close the round
        self.in_flight: list[
            PersistentRequest
        ] = []  # persistent requests on host memory that were started and not waited for
        self.on_devices: list[
            PersistentRequest
        ] = []  # persistent requests on device memory that were started and not waited for
        self.attempts: dict[Slot, Attempt] = {}
        self.answers: dict[Slot, Attempt] = {}  # operations for which other ranks wait, and whose results nobody needs
        self.ends: dict[
            Slot, tuple[PersistentRequest, torch.Tensor]
        ] = {}  # the requests of ``UnusualSender.send_end``, and their tensors
        self.ended = False  # other ranks were told that this rank will not send some gradients
        self.results: dict[Slot, ReducedGradient] = {}
        self.placed: set[Slot] = set()  # the slots whose results are in ``.grad``
        self.divided: set[Slot] = set()  # the slots whose results were divided by the sum of the weights when placed
        self.written: list[torch.Tensor] = []  # gradients that were reduced in place
        self.absent: set[Slot] = set()  # the slots for which this rank sends zeros
        self.replaced: list[Any] = []  # requests and handles that failed and for which others were started
        self.repeated: set[Slot] = set()  # sent again because ranks disagreed on whether the gradient is sparse
        self.failure: Exception | None = None  # the first error of any gradient

    def begin(self, slots: list[Slot]) -> None:
        """Open the next round, and make ``slots`` use the persistent requests for that round.

        A round is one reduction of all gradients. A slot is the record of one gradient.
        """
        turn = self.of_step % MOST_ROUNDS
        if turn != self.turn:  # each round of a step has its own names: ranks may run different numbers of rounds
            self.turn = -1  # an interrupt in the loop leaves it so, and the next call goes through the loop again
            for slot in slots:
                slot.change_round(turn)
            self.turn = turn
        self.number += 1
        self.settled = False
        self.open = True

    def name_of(self, name: str) -> str:
        """Return the name under which the gradient or group called ``name`` is reduced in this round.

        A round is one reduction of all gradients. The first round of a step uses ``name`` itself. Each later round of
        the same step adds a suffix.
        """
        return name if self.turn == 0 else f"{name}.backward{self.turn + 1}"

    def attempt(self, slot: Slot) -> Attempt:
        """Return the record of sending the gradient of ``slot`` in this round, which is one reduction of all gradients.

        If an interrupt has left such a record in this round, the method returns that record, otherwise a new one.
        """
        slot.round = self.number
        return self.attempts.setdefault(slot, Attempt())

    def has_sent(self, slots: list[Slot]) -> bool:
        """Return whether the gradient of at least one of ``slots`` was sent, or was about to be sent, in this round.

        A round is one reduction of all gradients.
        """
        return any(slot.round == self.number for slot in slots)

    def clear(self, groups: list[GradientGroup]) -> None:
        """Drop the records of the gradients, but leave the round (the reduction of all gradients) open.

        An interrupt may occur within this method. Then the code that ends the round runs again, and calls this method
        again.
        """
        for group in groups:
            group.begin()
        for kept in (self.results, self.attempts, self.answers, self.ends, self.replaced):
            kept.clear()
        for noted in (self.placed, self.divided, self.absent, self.repeated):
            noted.clear()

    def forget(self, groups: list[GradientGroup]) -> None:
        """Drop all records and close the round, because the job of the round has ended.

        A round is one reduction of all gradients.
        """
        self.in_flight.clear()
        self.on_devices.clear()
        self.written.clear()
        self.clear(groups)
        self.failure = None
        self.entered = self.open = self.ended = self.settled = False
