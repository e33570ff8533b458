"""Decides at which call all ranks of a world act together. At the time of this decision no rank has made that call.

There are two kinds of such calls. At a call of ``should_stop()``, all ranks stop. At a call of ``commit()`` of an
elastic state, all ranks leave the world, so that another world can begin. The ranks of a world make the calls of a kind
equally often. So the number of a call names the same place in the program on all ranks. If somebody asks for an action,
every rank reports how many calls it has made, and makes no further call until it gets the decision. All ranks then act
at the call after the highest of these numbers. So no rank can already have passed that call. In a step in which nobody
asks, no message is sent.

``join()`` ends on all ranks at the same time. Before that, ranks with fewer batches make fewer calls. Therefore the
calls are counted from 0 again after each ``join()``. A place in the program is a pair: the number of times that all
ranks have joined, and the number of calls since then. If a rank is in ``join()``, all ranks act at the first call after
that ``join()``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.messages.observing import Notice
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.to_coordinator import COMMIT, STOP, CallCount
from ddlcore.messages.to_rank import AgreedCall, CountCalls, Outgoing

CALLS = {STOP: "should_stop()", COMMIT: "commit() of the elastic state"}


class AgreedPoint:
    """The agreement of one world on the call at which its ranks act. All ranks here are ranks of this world."""

    def __init__(self, kind: str, ranks: Iterable[WorldRank]) -> None:
        self.kind = kind
        self._present = dict.fromkeys(ranks)  # that have not left
        self._reason = ""  # of the first request; "": nobody has asked
        self._counts: dict[WorldRank, CallCount] = {}
        self._decided = False

    def asked(self, reason: str) -> Outgoing[WorldRank]:
        """Handle a request to act, and return the messages to send. Only the first request has an effect.

        ``reason`` says why, in words for the user.
        """
        if self._reason:
            return []
        self._reason = reason
        count = CountCalls(self.kind)  # one object, so that it is encoded once
        return [(rank, count) for rank in self._present]

    def counted(self, rank: WorldRank, count: CallCount, joined: Collection[WorldRank]) -> Outgoing[WorldRank]:
        """Handle the answer of ``rank`` to CountCalls, and return the messages to send.

        ``count`` contains the number of calls that ``rank`` has made. ``joined`` are the ranks in ``join()``.
        """
        if rank in self._present and self._reason and not self._decided:
            self._counts[rank] = count
        return self._decide(joined)

    def gone(self, rank: WorldRank, joined: Collection[WorldRank]) -> Outgoing[WorldRank]:
        """Record that ``rank`` has left or was lost, and return the messages to send.

        ``joined`` are the ranks in ``join()``.
        """
        self._present.pop(rank, None)
        self._counts.pop(rank, None)
        return self._decide(joined)

    def awaited(self) -> list[Awaited[WorldRank]]:
        """Return the wait for the ranks that have not answered CountCalls, in a list; [] if none is missing."""
        if not self._reason or self._decided:
            return []
        missing = tuple(rank for rank in self._present if rank not in self._counts)
        where, asked = f"while the ranks agree where to {self.kind}", f"how often it has called {CALLS[self.kind]}"
        wait = Awaited((self.kind,), where, f"{asked} (CountCalls)", lambda: Details(missing))
        return [wait] if missing else []

    def _decide(self, joined: Collection[WorldRank]) -> Outgoing[WorldRank]:
        if not self._counts or self._decided or len(self._counts) < len(self._present):
            return []
        self._decided = True
        last = max((one.joins, one.calls) for one in self._counts.values())
        joins, call = (last[0] + 1, 1) if any(rank in joined for rank in self._present) else (last[0], last[1] + 1)
        agreed = AgreedCall(self.kind, joins, call, self._reason)
        outgoing: Outgoing[WorldRank] = [(rank, agreed) for rank in self._present]
        if last > (0, 1):  # one call is a difference that a rank which is a step ahead may have
            never = [rank for rank, one in self._counts.items() if not one.joins and not one.calls]
            text = (
                f"asked to {self.kind} ({self._reason}), but this rank has never called {CALLS[self.kind]}, which other "
                "ranks have called: it will not act with them. Call it equally often on all ranks"
            )
            outgoing += [(rank, Notice(text)) for rank in never]
        return outgoing
