"""Who was heard when, when the next sign of life is due, and who has been silent for too long. Sans-I/O."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["BEAT_S", "Beats"]

BEAT_S = 1.0  # each end of a connection between hosts says so often that it is there
_OWN_GAP_S = 2.0 * BEAT_S
WhoT = TypeVar("WhoT", bound=Hashable)


class Beats(Generic[WhoT]):
    """One end's book about those at the other ends. Times are of any steady clock, in seconds."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._heard_s: dict[WhoT, float] = {}
        self._beat_s = 0.0
        self._asked_s: float | None = None

    def heard(self, who: WhoT, now_s: float) -> None:
        """Anything at all arrived from ``who``, which counts as a sign of life; the first makes it known."""
        self._heard_s[who] = now_s

    def forget(self, who: WhoT) -> None:
        """``who`` has taken its leave, and is no longer expected to be heard."""
        self._heard_s.pop(who, None)

    def due(self, now_s: float) -> list[WhoT]:
        """Those to whom a beat is to be sent now: all, once in ``BEAT_S``."""
        if now_s < self._beat_s:
            return []
        self._beat_s = now_s + BEAT_S
        return list(self._heard_s)

    def silent(self, now_s: float) -> list[WhoT]:
        """Those who were silent for too long, each told once. Ask when all that has arrived was noted, in each ``BEAT_S``.

        Where nobody has asked for longer, this process itself stood still (SIGSTOP, a suspended machine), maybe together
        with the others: that time is no silence of theirs.
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
        """When ``due`` or ``silent`` may next have something to say; None while nobody is known."""
        if not self._heard_s:
            return None
        return min(self._beat_s, min(self._heard_s.values()) + self.silence_s)
