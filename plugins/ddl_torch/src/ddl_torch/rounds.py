"""What is known of the reduction of all gradients that is under way, a *round*; does nothing by itself.

A round outlives an interrupt: an exception that a signal's handler raises leaves it open, and the next
``synchronize()`` or ``step()`` goes on where it was. No gradient is sent twice in a round, wherever it is interrupted:
``Slot.round`` says that one was about to be sent, and ``PersistentRequest.starts`` that it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ddl_torch.slots import Group, Slot
from ddlcore.api import Handle, Waitable

__all__ = ["MOST_ROUNDS", "Attempt", "Result", "Round"]

MOST_ROUNDS = 64  # of one step that have names of their own: a loop that never steps must not fill the memory


class Result(NamedTuple):
    """Where the result of a gradient that is not reduced in place goes."""

    grad: torch.Tensor
    value: torch.Tensor
    fresh: bool  # autograd made ``grad`` in this pass, so that nobody can expect the result in its memory


class Attempt:
    """What one gradient or group is sent by where that is no persistent allreduce. It can go on after an interrupt."""

    __slots__ = ("context", "done", "handle", "handles")

    def __init__(self) -> None:
        self.done = False  # its result was taken
        self.handles: list[Handle] = []  # whose operations were, or were about to be, submitted
        self.context: Any = None  # what is needed to read the result
        self.handle: Waitable | None = None  # set when everything was submitted

    def go_on(self) -> list[Handle]:
        """Return the handles of what was submitted before an interrupt, in order."""
        self.handles[:] = [handle for handle in self.handles if handle.submitted]
        return self.handles


class Round:
    """One optimizer's round: the open one, or the one that was open last."""

    def __init__(self) -> None:
        self.number = 0  # counts the rounds of this optimizer
        self.of_step = 0  # counts those since the last step
        self.turn = 0  # which round of a step the slots' allreduces are for
        self.open = False
        self.entered = False  # sending has begun at the end of a pass, or a pass that had begun to send has failed
        self.in_flight: list[Any] = []  # allreduces of host memory that were started and not waited for
        self.on_devices: list[Any] = []  # the same of device memory
        self.attempts: dict[Slot, Attempt] = {}
        self.ended = False  # other ranks were told that some gradients will not come
        self.results: dict[Slot, Result] = {}
        self.placed: set[Slot] = set()  # whose results are where they belong
        self.written: list[torch.Tensor] = []  # gradients that were reduced in place
        self.absent: set[Slot] = set()  # this rank takes part with zeros
        self.repeated: set[Slot] = set()  # sent once more since ranks disagreed on which gradient is sparse
        self.failure: Exception | None = None  # the first error of any gradient

    def begin(self, slots: list[Slot]) -> None:
        """Open the next round."""
        turn = self.of_step % MOST_ROUNDS
        if turn != self.turn:  # rounds of a step have names of their own: a rank with fewer of them must not meet this
            for slot in slots:
                slot.change_round(self.turn, turn)
            self.turn = turn
        self.number += 1
        self.open = True

    def name_of(self, name: str) -> str:
        """Return the name on the wire of a gradient or group in this round of the step."""
        return name if self.turn == 0 else f"{name}.backward{self.turn + 1}"

    def attempt(self, slot: Slot) -> Attempt:
        """Return the attempt to send this gradient that an interrupt left in this round, or else a new one."""
        slot.round = self.number
        return self.attempts.setdefault(slot, Attempt())

    def has_sent(self, slots: list[Slot]) -> bool:
        """Return whether any gradient was sent, or was about to be."""
        return any(slot.round == self.number for slot in slots)

    def clear(self, groups: list[Group]) -> None:
        """Drop what the round held, and leave it open: several calls may be interrupted in between."""
        for group in groups:
            group.begin()
        for kept in (self.results, self.attempts):
            kept.clear()
        for noted in (self.placed, self.absent, self.repeated):
            noted.clear()

    def forget(self, groups: list[Group]) -> None:
        """Drop the round: the job that it belonged to has ended."""
        self.in_flight.clear()
        self.on_devices.clear()
        self.written.clear()
        self.clear(groups)
        self.failure = None
        self.entered = self.open = self.ended = False
