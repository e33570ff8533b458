"""Decide when to send the next heartbeat, and which peers have been silent for too long.

A peer is a process at the other end of a connection. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

BEAT_S = 1.0  # each end of a connection between hosts sends a heartbeat this often
_OWN_GAP_S = 2.0 * BEAT_S
WhoT = TypeVar("WhoT", bound=Hashable)


class Beats(Generic[WhoT]):
    """A table of peers (the processes at the other ends of connections), with the time of each peer's last message.

    A peer counts as lost after ``silence_s`` seconds without a message. All times are seconds of the same monotonic
    clock.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._heard_s: dict[WhoT, float] = {}
        self._beat_s = 0.0
        self._asked_s: float | None = None

    def heard(self, who: WhoT, now_s: float) -> None:
        """Record that a message of any kind from the peer ``who`` has arrived at the time ``now_s``.

        The first message adds ``who`` to the table.
        """
        self._heard_s[who] = now_s

    def forget(self, who: WhoT) -> None:
        """Remove the peer ``who`` from the table, so that ``silent`` does not report it any more."""
        self._heard_s.pop(who, None)

    def due(self, now_s: float) -> list[WhoT]:
        """Return the peers to which the caller must send a heartbeat now.

        Return all peers if at least ``BEAT_S`` seconds have passed since the last call that returned all peers.
        Otherwise return [].
        """
        if now_s < self._beat_s:
            return []
        self._beat_s = now_s + BEAT_S
        return list(self._heard_s)

    def silent(self, now_s: float) -> list[WhoT]:
        """Return the peers that have been silent for too long, and remove them from the table.

        Call this method at least once in ``BEAT_S`` seconds, after calling ``heard`` for all messages that have
        arrived. If more than twice ``BEAT_S`` has passed between two calls, this process itself was stopped (SIGSTOP, a
        suspended machine), possibly together with its peers. The time between these calls then does not count as
        silence of the peers.
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
        """Return the earliest time at which ``due`` or ``silent`` may return a peer.

        Return None if the table has no peer.
        """
        if not self._heard_s:
            return None
        return min(self._beat_s, min(self._heard_s.values()) + self.silence_s)
