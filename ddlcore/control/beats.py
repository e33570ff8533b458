"""Decide when the next heartbeat is due and which peers have been silent for too long. Does no I/O of its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

BEAT_S = 1.0  # each end of a connection between hosts sends a heartbeat this often
_OWN_GAP_S = 2.0 * BEAT_S
WhoT = TypeVar("WhoT", bound=Hashable)


class Beats(Generic[WhoT]):
    """The table of peers at one end of several connections, with the time at which each of them was last heard.

    A peer counts as lost after ``silence_s`` without a message. All times are seconds of the same monotonic clock.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._heard_s: dict[WhoT, float] = {}
        self._beat_s = 0.0
        self._asked_s: float | None = None

    def heard(self, who: WhoT, now_s: float) -> None:
        """Record that a message has arrived from ``who``; every kind of message counts as a sign of life.

        The first message adds ``who`` to the table.
        """
        self._heard_s[who] = now_s

    def forget(self, who: WhoT) -> None:
        """Stop expecting messages from ``who``, which has said goodbye."""
        self._heard_s.pop(who, None)

    def due(self, now_s: float) -> list[WhoT]:
        """Return the peers that are to be sent a heartbeat now: all of them once in ``BEAT_S``, otherwise none."""
        if now_s < self._beat_s:
            return []
        self._beat_s = now_s + BEAT_S
        return list(self._heard_s)

    def silent(self, now_s: float) -> list[WhoT]:
        """Return the peers that have been silent for too long; each is returned only once.

        Call it at least once in ``BEAT_S``, after calling ``heard`` for all messages that have arrived. If much more
        time has passed between two calls, this process itself was stopped (SIGSTOP, a suspended machine), possibly
        together with its peers: that time does not count as silence of the peers.
        """
        if self._asked_s is not None and now_s - self._asked_s > _OWN_GAP_S:
            pause_s = now_s - self._asked_s
            self._heard_s = {who: min(heard_s + pause_s, now_s) for who, heard_s in self._heard_s.items()}
        self._asked_s = now_s
        gone = [who for who, heard_s in self._heard_s.items() if now_s - heard_s >= self.silence_s]
        for who in gone:
            del self._heard_s[who]
        return gone

    def deadline_s(self) -> float | None:
        """Return the time at which ``due`` or ``silent`` may next return a peer; None while no peer is known."""
        if not self._heard_s:
            return None
        return min(self._beat_s, min(self._heard_s.values()) + self.silence_s)
