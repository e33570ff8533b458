"""Watches the waits of a world: reports long waits, asks missing ranks whether they are alive, and may end the job.

The waits are described by ``awaited.Awaited``. This module does no I/O, and the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Generic

from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.stall_table import on_ranks, stall_table
from ddlcore.messages.observing import Alive, Probe, Show, Stack
from ddlcore.messages.ranks import AnyRank
from ddlcore.messages.to_rank import Outgoing, Stalled
from ddlcore.runtime.checks import describe
from ddlcore.runtime.patience import ANSWER_S, Patience

_WARNING, _SHUTDOWN = 0, 1


class StallWatch(Generic[AnyRank]):
    """Watches the waits that ``waits()`` returns.

    If a stall ends the job, all of ``ranks`` get a message. In all methods, ``now_s`` is the time of a steady clock.
    """

    def __init__(
        self,
        waits: Callable[[], Iterable[Awaited[AnyRank]]],
        ranks: Sequence[AnyRank],
        patience: Patience,
        present: Iterable[AnyRank] = (),
    ) -> None:
        """Create the watch. ``present`` are the ranks that have just sent a message.

        ``patience`` contains the time limits.
        """
        # Ranks that did not answer when the job ended, each with what is known of it.
        self.dead: dict[AnyRank, str] = {}
        self._waits = waits
        self._ranks = ranks
        self._patience = patience
        self._since_s: dict[Hashable, float] = {}
        self._reported: set[Hashable] = set()
        self._asked_for: set[tuple[Hashable, int]] = set()  # waits for which ranks were probed, with the limit
        self._spoke = set(present)  # the ranks from which a message has come since the last look
        self._heard_s: dict[AnyRank, float] = {}
        self._probed_s: dict[AnyRank, float] = {}  # when the rank got a Probe to which no answer has come
        self._states: dict[AnyRank, str] = {}  # what the rank has said about itself
        self._told_silent: dict[AnyRank, float] = {}  # ranks that a report called silent, and since when they are
        self._shown_s: dict[AnyRank, float] = {}  # when the rank was asked for its stack
        self._stacks: dict[AnyRank, str] = {}
        self._gone: set[AnyRank] = set()  # ranks that have left the world or have ended
        self._sought_s = float("-inf")  # when the ranks of waits with ``only_silent`` were last asked
        self.over = False  # whether the job must end

    # --- what ranks say

    def spoke(self, rank: AnyRank) -> None:
        """Record that ``rank`` has sent a message, so its process is running."""
        self._spoke.add(rank)

    def hear(self, rank: AnyRank, message: Stack | Alive) -> None:
        """Record the answer of ``rank`` to the message Probe or Show."""
        if isinstance(message, Alive):
            self._states[rank] = message.text
        elif rank in self._shown_s:
            self._stacks[rank] = message.text

    def gone(self, rank: AnyRank) -> None:
        """Record that ``rank`` has left the world, or has ended. It cannot answer here any more, so it is not silent."""
        self._gone.add(rank)
        self._probed_s.pop(rank, None)
        self._told_silent.pop(rank, None)
        self.dead.pop(rank, None)

    # --- what follows

    def look(self, now_s: float) -> tuple[list[str], Outgoing[AnyRank]]:
        """Check all waits. Return the new reports for the user, and the messages to send."""
        texts = self._heard(now_s)
        if self.over or max(self._patience.warning_s, self._patience.shutdown_s) <= 0:
            return texts, []
        outgoing: Outgoing[AnyRank] = []
        waits = list(self._waits())
        self._remember(waits, now_s)
        late: dict[str, list[tuple[Awaited[AnyRank], Details[AnyRank], float]]] = {}
        for wait in waits:
            waits_s = now_s - self._since_s[wait.key]
            if wait.only_silent:
                outgoing += self._seek(wait, now_s, late)
                continue
            due = self._due(wait.key, waits_s)
            if not due:
                continue
            details = self._details(wait)
            self._probe(wait.key, due, details.ranks, now_s, outgoing)
            if not self._is_known(details.ranks, now_s):
                continue
            if 0 < self._patience.warning_s <= waits_s and wait.key not in self._reported:
                self._reported.add(wait.key)
                late.setdefault(wait.where, []).append((wait, details, waits_s))
            if 0 < self._patience.shutdown_s <= waits_s and wait.ends and not self.over:
                outgoing += self._end(wait, details, now_s)
        for where, found in late.items():
            texts.append(self._report(where, found, now_s, outgoing))
        return texts + self._told(now_s), outgoing

    def _seek(
        self,
        wait: Awaited[AnyRank],
        now_s: float,
        late: dict[str, list[tuple[Awaited[AnyRank], Details[AnyRank], float]]],
    ) -> Outgoing[AnyRank]:
        """Check a wait that is a stall only if the ranks that must act do not answer. Return the messages to send.

        The ranks are asked again and again, by the message Probe. The age of the wait is the time since the last
        message of a rank that does not answer. If the wait must be reported, it is added to ``late``.
        """
        warning_s, shutdown_s = self._patience.warning_s, self._patience.shutdown_s
        details = self._details(wait)
        outgoing: Outgoing[AnyRank] = []
        if now_s - self._sought_s >= self._patience.answer_s:
            self._sought_s = now_s
            for rank in details.ranks:
                if rank not in self._probed_s:
                    self._probed_s[rank] = now_s
                    outgoing.append((rank, Probe()))
        silent = tuple(self._silent(details.ranks, now_s))
        since_s = self._since_s[wait.key]
        silence_s = max((now_s - max(self._heard_s.get(rank, since_s), since_s) for rank in silent), default=0.0)
        found = replace(details, ranks=silent)
        if 0 < warning_s <= silence_s and wait.key not in self._reported:
            self._reported.add(wait.key)
            late.setdefault(wait.where, []).append((wait, found, silence_s))
        if 0 < shutdown_s <= silence_s and wait.ends and not self.over:
            outgoing += self._end(wait, found, now_s)
        return outgoing

    def _details(self, wait: Awaited[AnyRank]) -> Details[AnyRank]:
        details = wait.details()
        return replace(details, ranks=tuple(rank for rank in details.ranks if rank not in self._gone))

    def _remember(self, waits: Sequence[Awaited[AnyRank]], now_s: float) -> None:
        """Record when each of ``waits`` has begun, and forget all other waits.

        If a forgotten wait appears again later, its age is counted from 0.
        """
        known = self._since_s
        self._since_s = {wait.key: min(known.get(wait.key, now_s), now_s - wait.waited_s) for wait in waits}
        self._reported &= self._since_s.keys()
        self._asked_for = {one for one in self._asked_for if one[0] in self._since_s}

    def _due(self, key: Hashable, waits_s: float) -> list[int]:
        """Return the limits (_WARNING, _SHUTDOWN) that the wait ``key`` has reached or will reach soon.

        ``waits_s`` is the age of the wait. "Soon" is the time that the ranks have to answer the message Probe. So if
        the ranks are asked now, their answers can arrive before the limit.
        """
        limits_s = (self._patience.warning_s, self._patience.shutdown_s)
        near_s = waits_s + self._patience.answer_s
        return [
            limit
            for limit, limit_s in enumerate(limits_s)
            if 0 < limit_s <= near_s and not (limit == _WARNING and key in self._reported)
        ]

    def _probe(
        self, key: Hashable, due: Sequence[int], ranks: Sequence[AnyRank], now_s: float, outgoing: Outgoing[AnyRank]
    ) -> None:
        fresh = [limit for limit in due if (key, limit) not in self._asked_for]
        self._asked_for.update((key, limit) for limit in fresh)
        for rank in ranks:
            if rank in self._probed_s or (not fresh and rank in self._states):
                continue
            self._probed_s[rank] = now_s
            outgoing.append((rank, Probe()))

    def _is_known(self, ranks: Sequence[AnyRank], now_s: float) -> bool:
        """Return whether it is known of all ``ranks`` if they answer the message Probe.

        This is known of a rank if it has answered, or if the time for its answer has passed.
        """
        answer_s = self._patience.answer_s
        return all(now_s - self._probed_s[rank] >= answer_s for rank in ranks if rank in self._probed_s)

    def _silent(self, ranks: Iterable[AnyRank], now_s: float) -> list[AnyRank]:
        answer_s = self._patience.answer_s
        return [rank for rank in ranks if rank in self._probed_s and now_s - self._probed_s[rank] >= answer_s]

    def _heard(self, now_s: float) -> list[str]:
        """Record which ranks have sent a message since the last call of ``look``.

        If some of these ranks were reported as silent before, return a report that they answer again; otherwise return
        [].
        """
        spoke, self._spoke = self._spoke, set()
        again: list[AnyRank] = []
        longest_s = 0.0
        for rank in spoke:
            self._heard_s[rank] = now_s
            self._probed_s.pop(rank, None)
            since_s = self._told_silent.pop(rank, None)
            if since_s is not None:
                again.append(rank)
                longest_s = max(longest_s, now_s - since_s)
        if not again:
            return []
        verb = "answers" if len(again) == 1 else "answer"
        return [f"{on_ranks(sorted(again))} {verb} again, after {longest_s:.1f} s of silence"]

    def _report(
        self,
        where: str,
        found: Sequence[tuple[Awaited[AnyRank], Details[AnyRank], float]],
        now_s: float,
        outgoing: Outgoing[AnyRank],
    ) -> str:
        tensors = [replace(one, waits_s=waits_s) for _, details, waits_s in found for one in details.tensors]
        lines = [f"stalled for more than {self._patience.warning_s:g} s {where}:"]
        if tensors:
            lines.append(stall_table(tensors))
        lines += [f"  {note}" for note in dict.fromkeys(note for _, details, _ in found for note in details.notes)]
        wait = found[0][0]
        missing = sorted({rank for _, details, _ in found for rank in details.ranks})
        silent = self._silent(missing, now_s)
        for rank in silent:
            self._told_silent[rank] = self._heard_s.get(rank, self._probed_s[rank])
        lines += [f"  {line}" for line in self._lines(missing, wait, now_s)]
        if self._patience.stacks:
            for rank in missing:
                if rank not in self._shown_s and rank not in silent:
                    self._shown_s[rank] = now_s
                    outgoing.append((rank, Show()))
        if set(missing) != set(silent):
            lines.append(self._advice)
        return "\n".join(lines)

    def _lines(self, missing: Sequence[AnyRank], wait: Awaited[AnyRank], now_s: float) -> list[str]:
        """Return lines that say for each missing rank whether it answers, and the text of its answer."""
        silent = self._silent(missing, now_s)
        lines = [self._silence(silent, wait, now_s)] if silent else []
        said: dict[str, list[AnyRank]] = {}
        for rank in missing:
            if rank not in silent and rank in self._states:
                said.setdefault(self._states[rank], []).append(rank)
        return lines + [
            f"{on_ranks(ranks)} answer{'s' if len(ranks) == 1 else ''}: {text}" for text, ranks in said.items()
        ]

    def _silence(self, silent: Sequence[AnyRank], wait: Awaited[AnyRank], now_s: float) -> str:
        """Return a text about the ranks ``silent``, which do not answer: since when, and what they were asked last."""
        one = len(silent) == 1
        whom, they, was = ("it", "it", "was") if one else ("them", "they", "were")
        heard_s = [self._heard_s[rank] for rank in silent if rank in self._heard_s]
        since = f"for {now_s - max(heard_s):.1f} s" if heard_s else "so far"
        return (
            f"{on_ranks(silent)} {'does' if one else 'do'} not answer at all: no message from {whom} {since}, and "
            f"{they} {was} last asked {wait.asked}; {wait.why}"
        )

    def _end(self, wait: Awaited[AnyRank], details: Details[AnyRank], now_s: float) -> Outgoing[AnyRank]:
        self.over = True
        what = [_summary(details)] if details.tensors else [wait.where.strip()]
        what += [*details.notes, *self._lines(details.ranks, wait, now_s)]
        for rank in self._silent(sorted(self._probed_s), now_s):
            self.dead[rank] = self._silence([rank], wait, now_s)
        limit = "--evict-after-s), this world ends" if self._patience.evicts else "DDL_STALL_SHUTDOWN_S), the job ends"
        text = (
            f"stalled for more than {self._patience.shutdown_s:g} s ({limit}: "
            f"{wait.where}: {'; '.join(dict.fromkeys(what))}"
        )
        return [(rank, Stalled(text)) for rank in self._ranks]

    def _told(self, now_s: float) -> list[str]:
        """Return reports with the stacks that ranks have sent, and a report about ranks that sent no stack.

        Ranks with the same stack share a report. A rank has ANSWER_S seconds to send its stack.
        """
        found: dict[str, list[AnyRank]] = {}
        silent = []
        for rank, asked_s in sorted(self._shown_s.items()):
            if rank in self._stacks:
                found.setdefault(self._stacks.pop(rank).rstrip(), []).append(rank)
            elif now_s >= asked_s + ANSWER_S:
                silent.append(rank)
            else:
                continue
            del self._shown_s[rank]
        texts = [f"{on_ranks(at)} {'is' if len(at) == 1 else 'are'} here:\n{text}" for text, at in found.items()]
        if silent:
            texts.append(
                f"no stack came from {on_ranks(silent)}: stopped, or a call in native code holds the interpreter lock"
            )
        return texts

    @property
    def _advice(self) -> str:
        stacks = "" if self._patience.stacks else "; --stall-stacks shows where those that are missing stand"
        return f"  the ranks may run different code, or one of them is slow{stacks}"


def _summary(details: Details[AnyRank]) -> str:
    """Return a part of a sentence about the tensors of a wait, for an error message.

    It describes the first tensor, and the other tensors that wait for the same ranks as the first.
    """
    first = details.tensors[0]
    alike = [one.name or "(a call without a name)" for one in details.tensors if one.missing == first.missing]
    lacking = f"but not on {on_ranks(first.missing)}" if first.missing else "and under way"
    return f"{describe(alike, first.set_id)} is ready on {on_ranks(first.ready)}, {lacking}"
