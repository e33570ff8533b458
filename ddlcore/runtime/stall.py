"""Watches one world for what waits too long: says so, asks the missing ranks what they are doing, ends the job at last.

Sans-I/O, like the coordinator beside which it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlcore.messages import Show, Stack, Stalled, Standing
from ddlcore.runtime.checks import describe
from ddlcore.runtime.coordinator import Coordinator, Outgoing
from ddlcore.runtime.pending import Pending
from ddlcore.runtime.stall_table import Late, on_ranks, stall_table

__all__ = ["Patience", "StallWatch"]

ANSWER_S = 2.0  # a control thread answers at once; a process that was stopped does not


@dataclass(frozen=True)
class Patience:
    """After how long a stall is reported, and ends the job (0: never); whether the report has the missing ranks' stacks."""

    warning_s: float = 60.0
    shutdown_s: float = 0.0
    stacks: bool = False


class StallWatch:
    """Of one world. Ranks are the world's own."""

    def __init__(self, coordinator: Coordinator, patience: Patience) -> None:
        self._coordinator = coordinator
        self._patience = patience
        self._asked_s: dict[int, float] = {}  # by rank: when it was asked for its stack
        self._stacks: dict[int, str] = {}
        self._over = False
        self._what = ""  # of the last report

    def hear(self, rank: int, message: Stack) -> None:
        """``rank`` says what it is doing."""
        if rank in self._asked_s:
            self._stacks[rank] = message.text

    def over(self, standing: Standing) -> Outgoing:
        """A rank has stood at one batch of its schedule for as long as the job may."""
        if standing.epoch != self._coordinator.epoch:
            return []  # it has moved since
        what = self._what or f"{describe(standing.names, standing.set_id)} waits (place {standing.place})"
        return self._end(f"in replay: {what}")

    def look(self, now_s: float) -> tuple[list[str], Outgoing]:
        """What is to be reported, each thing once, and what ranks are to be told. ``now_s`` is of any steady clock."""
        late = self._in_discovery(now_s)
        missing = {rank for one in late for rank in one.missing}
        texts = [self._wording(late)] if late else []
        standings = self._coordinator.standings
        for text in standings.report(self._coordinator.epoch, now_s, self._patience.warning_s):
            texts.append(f"{text}\n{self._advice}")
            missing |= set(standings.absent)
            self._what = standings.what
        texts += self._told(now_s)
        outgoing: Outgoing = []
        if self._patience.stacks:
            for rank in sorted(missing - self._asked_s.keys()):
                self._asked_s[rank] = now_s
                outgoing.append((rank, Show()))
        return texts, outgoing + self._expired(now_s)

    def _in_discovery(self, now_s: float) -> list[Late]:
        """What has just passed the warning time."""
        warning_s, table = self._patience.warning_s, self._coordinator.table
        late = []
        for pending in table.all():
            if pending.first_seen_s is None:
                pending.first_seen_s = now_s
            elif 0 < warning_s <= now_s - pending.first_seen_s and not pending.reported:
                late.append(self._late(pending, now_s - pending.first_seen_s))
                pending.reported = True
        return late

    def _late(self, pending: Pending, waits_s: float) -> Late:
        missing = tuple(self._coordinator.table.missing(pending))
        return Late(pending.name, pending.set_id, tuple(pending.ranks()), missing, waits_s)

    def _expired(self, now_s: float) -> Outgoing:
        shutdown_s, table = self._patience.shutdown_s, self._coordinator.table
        if shutdown_s <= 0:
            return []
        over = [
            pending
            for pending in table.all()
            if pending.first_seen_s is not None and now_s - pending.first_seen_s >= shutdown_s
        ]
        if not over:
            return []
        missing = table.missing(over[0])
        alike = [one.name for one in over if table.missing(one) == missing and one.set_id == over[0].set_id]
        there = on_ranks(over[0].ranks())
        return self._end(f"{describe(alike, over[0].set_id)} is ready on {there}, but not on {on_ranks(missing)}")

    def _end(self, what: str) -> Outgoing:
        if self._over:
            return []
        self._over = True
        text = f"stalled for more than {self._patience.shutdown_s:g} s (DDL_STALL_SHUTDOWN_S), the job ends: {what}"
        return [(rank, Stalled(text)) for rank in range(self._coordinator.size)]

    def _told(self, now_s: float) -> list[str]:
        """The stacks that have come, ranks that stand at the same place together, and who will not say."""
        found: dict[str, list[int]] = {}
        silent = []
        for rank, asked_s in sorted(self._asked_s.items()):
            if rank in self._stacks:
                found.setdefault(self._stacks.pop(rank).rstrip(), []).append(rank)
            elif now_s >= asked_s + ANSWER_S:
                silent.append(rank)
            else:
                continue
            del self._asked_s[rank]
        texts = [f"{on_ranks(at)} {'is' if len(at) == 1 else 'are'} here:\n{text}" for text, at in found.items()]
        if silent:
            texts.append(
                f"no word from {on_ranks(silent)} of where in the code: stopped, or in a call that holds the interpreter"
            )
        return texts

    def _wording(self, late: list[Late]) -> str:
        return (
            f"stalled for more than {self._patience.warning_s:g} s in discovery:\n{stall_table(late)}\n{self._advice}"
        )

    @property
    def _advice(self) -> str:
        stacks = "" if self._patience.stacks else "; --stall-stacks shows where those that are missing stand"
        return f"  the ranks may run different code, or one of them is slow{stacks}"
