"""Store the pulses that one rank has sent in the last half minute, and compute rates and shares of time from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddl_doctor.reports import Activity, Pulse, Traffic
from msgspec.structs import replace

from ddl_dashboard.records import STARTING

KEPT = 30  # the last so many pulses of a rank are stored: half a minute
_RATE_S = 5.0  # time over which a rate of bytes is computed
_STEPS_S = 10.0  # time over which the rate of steps is computed; a longer time if steps take long
_STANDS_S = 3.0  # the rate of steps is 0 if there was no step for at least this time,
_RATE_STEPS = 5  # and for at least the usual time of this number of steps
_LEAST_SAMPLED_S = 0.5


@dataclass(frozen=True)
class LinkRate:
    """The number of bytes that a link moves: in total, and per second during the last few seconds."""

    name: str
    sent_bytes: int
    sent_per_s: float
    received_bytes: int = 0
    received_per_s: float = 0.0
    bits_per_s: float = 0.0  # speed of the link; 0: unknown


@dataclass
class RankHistory:
    """The recent past of one rank: its state as the launcher knows it, its last pulses, and when the last one arrived.

    A pulse is a message about itself that a rank sends about once a second.
    """

    host: str
    state: str = STARTING
    text: str = ""
    heard_s: float | None = None
    pulses: deque[Pulse] = field(default_factory=lambda: deque(maxlen=KEPT))
    activity: Activity | None = None  # of the last pulse
    _first: Pulse | None = None
    _resumed: Pulse | None = None  # the first pulse that counts steps, or the first with new steps after a long wait
    _moved_s: float = 0.0  # time of the last pulse with new steps
    _activities: deque[Activity] = field(default_factory=lambda: deque(maxlen=KEPT))  # of ``pulses``, without names

    def take(self, pulse: Pulse, now_s: float) -> None:
        """Add a pulse that has arrived at ``now_s``, a Unix time in seconds.

        If the counts of the pulse are lower than before, the rank has called ``init`` again. In this case, all earlier
        pulses are forgotten.
        """
        if self.pulses and (pulse.steps < self.pulses[-1].steps or pulse.at_s < self.pulses[-1].at_s):
            self.forget()
        self.heard_s = now_s
        activity = pulse.activity or Activity("")
        bare = replace(pulse, activity=None)  # names are kept for the last pulse only
        self._first = self._first or bare
        before = self.pulses[-1].steps if self.pulses else 0
        if pulse.steps > before:
            if before == 0 or pulse.at_s - self._moved_s >= self._stands_s(pulse):
                self._resumed = bare  # the time of a long wait before this pulse does not count as the time of a step
            self._moved_s = pulse.at_s
        self.pulses.append(bare)
        self.activity = activity
        self._activities.append(replace(activity, doing="", in_flight=()))

    def forget(self) -> None:
        """Forget all pulses, because the counts in the next pulses begin at 0."""
        self.pulses.clear()
        self._activities.clear()
        self._first = self._resumed = self.activity = None

    def steps_per_s(self) -> float | None:
        """Return the recent number of steps per second, or None if it is not known or no step was counted yet.

        The result is 0.0 if the rank has made no step for a long time.
        """
        if self._resumed is None:
            return None
        last = self.pulses[-1]
        stands_s = self._stands_s(last)
        if last.at_s - self._moved_s >= stands_s:
            return 0.0
        window_s = max(_STEPS_S, 2 * stands_s)
        since = next((one for one in reversed(self.pulses) if last.at_s - one.at_s >= window_s), self.pulses[0])
        if since.at_s < self._resumed.at_s:
            since = self._resumed
        return (last.steps - since.steps) / (last.at_s - since.at_s) if last.at_s > since.at_s else None

    def _stands_s(self, last: Pulse) -> float:
        """Return a duration in seconds. After this time without a step, the rank's rate of steps counts as 0.

        The duration is a few times the mean duration of a step so far, but at least ``_STANDS_S``. ``last`` is the last
        pulse.
        """
        first = self._first
        usual_s = (last.at_s - first.at_s) / (last.steps - first.steps) if first and last.steps > first.steps else 0.0
        return max(_STANDS_S, _RATE_STEPS * usual_s)

    def step_s(self) -> float | None:
        """Return the recent duration of a step in seconds, or None if it is not known or the rank makes no steps."""
        rate = self.steps_per_s()
        return 1 / rate if rate else None

    def input_share(self) -> float | None:
        """Return the share of time, 0 to 1, in which the main thread waited for input, or None if it is not known."""
        if len(self._activities) < 2:
            return None
        first, last = self._activities[0], self._activities[-1]
        sampled_s = last.sampled_s - first.sampled_s
        return (last.input_s - first.input_s) / sampled_s if sampled_s >= _LEAST_SAMPLED_S else None

    def transport_share(self) -> float | None:
        """Return the share of time, 0 to 1, in which the transport was in use, or None if it is not known."""
        at = self._window()
        return None if at is None else min(1.0, self._rate(at, lambda one: one.transport_s))

    def tensor_rate(self) -> tuple[int, float]:
        """Return the bytes of this rank's tensors in completed buckets: the total, and the number per second."""
        if self.activity is None:
            return 0, 0.0
        at = self._window()
        return self.activity.nbytes, 0.0 if at is None else self._rate(at, lambda one: one.nbytes)

    def links(self) -> list[LinkRate]:
        """Return the rates of the network interfaces that this rank reports, or [] if rates are not known."""
        at = self._window()
        if self.activity is None or at is None:
            return []
        before = {one.name: one for one in self._activities[at].traffic}
        elapsed_s = self.pulses[-1].at_s - self.pulses[at].at_s
        return [_link(one, before.get(one.name, one), elapsed_s) for one in self.activity.traffic]

    def _window(self) -> int | None:
        """Return the index of the first pulse of the interval for a rate, or None if there are too few pulses.

        The interval ends at the last pulse.
        """
        last_s = self.pulses[-1].at_s if self.pulses else 0.0
        found: Sequence[int] = [i for i, one in enumerate(self.pulses) if last_s - one.at_s >= _RATE_S] or [0]
        return found[-1] if len(self.pulses) > 1 and last_s > self.pulses[found[-1]].at_s else None

    def _rate(self, at: int, value: Callable[[Activity], float]) -> float:
        elapsed_s = self.pulses[-1].at_s - self.pulses[at].at_s
        return max(0.0, value(self._activities[-1]) - value(self._activities[at])) / elapsed_s


def _link(now: Traffic, before: Traffic, elapsed_s: float) -> LinkRate:
    return LinkRate(
        now.name,
        now.sent_bytes,
        max(0, now.sent_bytes - before.sent_bytes) / elapsed_s,
        now.received_bytes,
        max(0, now.received_bytes - before.received_bytes) / elapsed_s,
        now.bits_per_s,
    )
