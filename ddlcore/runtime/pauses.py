"""Times the periods of a search for better settings, and builds the message by which a rank reports them."""

from __future__ import annotations

from itertools import pairwise

from ddlcore.messages.to_coordinator import Paused
from ddlcore.runtime.meter import now_ns
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import Replay


class Pauses:
    """The times at which periods ended on this rank, while a search for better settings measures the periods.

    A period is one pass through the schedule. The caller holds the lock of the tensor queue.
    """

    def __init__(self) -> None:
        self._turns_ns: list[int] = []  # times at which periods ended
        self.due = False  # a Paused message must still be built
        self.message: Paused | None = None  # built, but not sent yet; it may be compared with None without the lock

    def begin_replay(self) -> None:
        """Forget all times, because another schedule is replayed from now on."""
        self._turns_ns = []

    def begin_epoch(self) -> None:
        """Forget a message that was not sent, because it is about an epoch that has ended."""
        self.message = None
        self.due = False

    def turn(self, replay: Replay[Entry]) -> None:
        """Record the present time as the end of a period on this rank."""
        turns_ns = [*self._turns_ns, now_ns()]
        self._turns_ns = turns_ns  # nothing is called from here on, see TensorQueue
        self.due = replay.paused
        replay.turned = False

    def build(self, epoch: int) -> None:
        """Build the message that says that this rank has reached the place in ``epoch`` where it must stop."""
        turns = self._turns_ns
        message = Paused(epoch, tuple(after - before for before, after in pairwise(turns)))
        self.message = message
        self.due = False

    def last_period_s(self) -> float:
        """Return how long the last period took, in seconds; 0.0 if it is not known."""
        return (self._turns_ns[-1] - self._turns_ns[-2]) * 1e-9 if len(self._turns_ns) > 1 else 0.0
