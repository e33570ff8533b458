"""Begins and ends the epochs of a rank: the replay of a schedule, and negotiation of all tensors in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.messages.to_coordinator import Frozen
from ddlcore.messages.to_rank import Arranged, Planned, Resume
from ddlcore.runtime.schedule import MOST_KNOWN, Replay, Schedule
from ddlcore.runtime.tensor_queue import TensorQueue


class Epochs:
    """Changes the epoch of a tensor queue, by what the coordinator decides.

    The control thread calls ``learn`` and ``freeze``. The engine's thread calls the other methods, after the buckets
    that were decided before the change.
    """

    def __init__(self, tensor_queue: TensorQueue) -> None:
        self._tensor_queue = tensor_queue
        self._freeze_at = -1  # an epoch that must be frozen as soon as it is entered
        self._schedules: dict[int, Arranged] = {}
        self._usual_s: dict[int, list[float | None]] = {}  # by schedule and position: the usual time to fill

    def learn(self, arranged: Arranged) -> None:
        """Store the schedule ``arranged``, so that a message Resume may name it from now on.

        ``arranged`` replaces an older schedule with the same number.
        """
        self._usual_s.pop(arranged.schedule, None)
        self._schedules[arranged.schedule] = arranged

    def planned(self, schedule: int) -> Sequence[Planned]:
        """Return the buckets of the schedule with the number ``schedule``, which ``learn`` has stored."""
        return self._schedules[schedule].buckets

    def resume(self, message: Resume, sets: Mapping[int, Sequence[int]], rank: int) -> Frozen | None:
        """Begin to replay the schedule that ``message`` names.

        Each pending entry is put into its slot, or else into the next request. ``sets`` contains the ranks of each
        process set, and ``rank`` is this rank. If the message Freeze for this epoch arrived on this rank before the
        epoch began, return the answer to Freeze; otherwise return None.
        """
        queue = self._tensor_queue
        with queue.lock:
            if queue.behind:
                queue.catch_up()
            schedule = Schedule(self._use(message.schedule), sets, rank)
            queue.end_replay()
            queue.usual_s = self._usual_s.setdefault(message.schedule, [None] * len(schedule.buckets))
            replay = queue.replay = Replay(schedule, message.start, dict(message.after), message.until, queue.usual_s)
            queue.open = replay if queue.refusal is None else None
            queue.pauses.begin_replay()
            queue.enter(message.epoch)
            if replay.paused:  # all buckets of this rank had run before
                queue.say_paused()
            return self._freeze() if self._freeze_at == message.epoch else None

    def _use(self, number: int) -> Arranged:
        """Return the schedule with this number, and forget those that have not been used for the longest time."""
        arranged = self._schedules.pop(number)
        self._schedules[number] = arranged
        while len(self._schedules) > MOST_KNOWN:
            unused = next(iter(self._schedules))
            del self._schedules[unused]
            self._usual_s.pop(unused, None)
        return arranged

    def discover(self, epoch: int) -> None:
        """Return from replay to negotiation, in the new ``epoch``. All pending entries go into the next request."""
        queue = self._tensor_queue
        with queue.lock:
            if queue.behind:
                queue.catch_up()
            queue.end_replay()
            queue.enter(epoch)

    def freeze(self, epoch: int) -> Frozen | None:
        """Stop all launches of ``epoch``, and return the message Frozen, which says how far this rank has launched.

        Return None if this rank has not entered ``epoch`` yet. In that case ``resume`` later returns the message.
        """
        queue = self._tensor_queue
        with queue.lock:
            if queue.behind:
                queue.catch_up()
            # The control thread receives Freeze, but the engine enters an epoch only after the buckets that were
            # decided before it. So Freeze may come too early. It is kept, and ``resume`` answers it: an answer for the
            # old epoch would be dropped by the coordinator, which would then wait for this rank without end.
            if epoch != queue.epoch:
                self._freeze_at = epoch
                return None
            return self._freeze()

    def _freeze(self) -> Frozen:
        # Launches and this run under the same lock. So each launch either comes before the freeze, and Frozen reports
        # it, or does not happen. Drain relies on that: a launch that Frozen does not report would wait in a collective
        # that the other ranks never enter.
        queue = self._tensor_queue
        queue.frozen = True
        queue.open = None
        return Frozen(queue.epoch, queue.replay.freeze() if queue.replay is not None else ())
