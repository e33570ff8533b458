"""Decides where all ranks of a world act: at a call that no rank has made yet when this is decided.

There are two kinds of such calls: ``should_stop()``, and ``commit()`` of an elastic state. The ranks of a world make the
calls of a kind equally often, so the number of a call names the same place of the program on all ranks. If somebody asks
for an action, every rank says how many calls it has made and makes no further one until it is answered. The answer is
the call after the highest of these numbers. So no rank can already have passed it, and a step in which nobody asks costs
no message.

``join()`` ends on all ranks together, but before it, ranks with fewer batches make fewer calls. Calls are therefore
counted anew after each ``join()``: a place is a pair (how often all ranks have joined, calls since then). While a rank
stands in ``join()``, the world acts at the first call after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.messages import COMMIT, STOP, AgreedCall, CallCount, CountCalls, FromCoordinator, Notice

Outgoing = list[tuple[int, FromCoordinator]]

CALLS = {STOP: "should_stop()", COMMIT: "commit() of the elastic state"}


class AgreedPoint:
    """The agreement of one world on the place of its program where it acts. Ranks are ranks of the world."""

    def __init__(self, kind: str, ranks: Iterable[int]) -> None:
        self.kind = kind
        self._present = dict.fromkeys(ranks)  # that have not left
        self._reason = ""  # of the first request; "": nobody has asked
        self._counts: dict[int, CallCount] = {}
        self._decided = False

    def asked(self, reason: str) -> Outgoing:
        """Take a rank's request to act, with its ``reason`` in words for the user.

        Only the first request has an effect.

        Returns the messages to send.
        """
        if self._reason:
            return []
        self._reason = reason
        count = CountCalls(self.kind)  # one object, so that it is encoded once
        return [(rank, count) for rank in self._present]

    def counted(self, rank: int, count: CallCount, joined: Collection[int]) -> Outgoing:
        """Take the answer of ``rank``: ``count`` is the number of calls that it has made.

        ``joined`` are the ranks that are in ``join()``. Returns the messages to send.
        """
        if rank in self._present and self._reason and not self._decided:
            self._counts[rank] = count
        return self._decide(joined)

    def gone(self, rank: int, joined: Collection[int]) -> Outgoing:
        """Record that ``rank`` has left or was lost, and return the messages to send.

        ``joined`` are the ranks in ``join()``.
        """
        self._present.pop(rank, None)
        self._counts.pop(rank, None)
        return self._decide(joined)

    def awaited(self) -> list[Awaited]:
        """Return which ranks have not answered yet; empty if none has to answer."""
        if not self._reason or self._decided:
            return []
        missing = tuple(rank for rank in self._present if rank not in self._counts)
        where, asked = f"while the ranks agree where to {self.kind}", f"how often it has called {CALLS[self.kind]}"
        wait = Awaited((self.kind,), where, f"{asked} (CountCalls)", lambda: Details(missing))
        return [wait] if missing else []

    def _decide(self, joined: Collection[int]) -> Outgoing:
        if not self._counts or self._decided or len(self._counts) < len(self._present):
            return []
        self._decided = True
        last = max((one.joins, one.calls) for one in self._counts.values())
        joins, call = (last[0] + 1, 1) if any(rank in joined for rank in self._present) else (last[0], last[1] + 1)
        agreed = AgreedCall(self.kind, joins, call, self._reason)
        outgoing: Outgoing = [(rank, agreed) for rank in self._present]
        if last > (0, 1):  # one call is a difference that a rank which is a step ahead may have
            never = [rank for rank, one in self._counts.items() if not one.joins and not one.calls]
            text = (
                f"asked to {self.kind} ({self._reason}), but this rank has never called {CALLS[self.kind]}, which other "
                "ranks have called: it will not act with them. Call it equally often on all ranks"
            )
            outgoing += [(rank, Notice(text)) for rank in never]
        return outgoing
