"""Decide whether and when a failed rank of an elastic job is started again, and how the job has ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection

from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages.ranks import LaunchedRank

WINDOW_S = 600.0
_LONGEST = 64  # a delay is at most so many times the first delay


class Revival:
    """The rules of one elastic job for ranks that fail. Only the supervisor's thread may call the methods."""

    def __init__(
        self,
        restarts: int,
        first_delay_s: float,
        startable: Callable[[LaunchedRank], bool],
        over: Callable[[], str],
        complete: Callable[[], bool],
        world: Callable[[], tuple[int, Collection[LaunchedRank]]],
    ) -> None:
        """Allow each rank to be started again at most ``restarts`` times within WINDOW_S seconds.

        If a signal has killed a rank and this is the rank's first failure, the rank is started again at once. Every
        other start is delayed by ``first_delay_s`` seconds or a multiple of this time, see ``delay_s``.
        ``startable(rank)`` returns whether the rank's host can be reached, so that another process can be started
        there.

        The results of ``over``, ``complete`` and ``world`` may change at any time, because other threads change them.
        ``over()`` returns why no further world can begin, or "" as long as one can begin. ``complete()`` returns
        whether the training has reached its end. ``world()`` returns the number of the last world (0 if there was none)
        and the ranks of this world.
        """
        self._restarts = restarts
        self._first_delay_s = first_delay_s
        self._startable = startable
        self._over = over
        self._complete = complete
        self._world = world
        self._in_world: list[tuple[int, End]] = []  # the ends, each with the number of the last world at that time
        self._failures: dict[LaunchedRank, deque[float]] = defaultdict(deque)

    def delay_s(self, end: End) -> float | None:
        """Return the time in seconds after which the ended rank is started again, or None if it is not started again.

        ``end`` is the end of the rank. If a signal has killed the rank, the delay is 0 for its first failure within
        WINDOW_S seconds, then 1, 2, 4, … times ``first_delay_s``. If the rank has ended by itself, the delay is 1, 2,
        4, … times ``first_delay_s`` from the first failure on. A rank that has ended by itself is never started at
        once, because all ranks may raise the same error: if all ranks end during the delay, the job is over, and no new
        process hides the error.
        """
        number, members = self._world()
        self._in_world.append((number, end))
        if not end.failed or not self._startable(end.rank) or self._over() or self._complete():
            return None
        if end.returncode > 0 and not members:
            return None  # no world has begun: the error, such as a mistake in the script, would happen again
        failures = self._failures[end.rank]
        while failures and end.at_s - failures[0] > WINDOW_S:
            failures.popleft()
        failures.append(end.at_s)
        earlier = len(failures) - 1
        if earlier >= self._restarts:
            return None
        if end.returncode > 0:
            earlier += 1
        return self._first_delay_s * min(2 ** (earlier - 1), _LONGEST) if earlier else 0.0

    def otherwise(self, end: End) -> str:
        """Return words for the user that say what happens after ``end``, for which ``delay_s`` has returned None."""
        return "it is not started again"

    @property
    def over(self) -> bool:
        """Whether no rank needs to be started any more, because the training is complete or the job cannot go on."""
        return self._complete() or bool(self._over())

    def has_failed(self, running: Collection[LaunchedRank]) -> bool:
        """Return whether the job cannot go on, and none of the ranks in ``running`` has been in its last world.

        Those that have may still write what they have.
        """
        return not self._complete() and bool(self._over()) and not set(running) & set(self._world()[1])

    @property
    def has_begun(self) -> bool:
        """Whether a world has opened."""
        return self._world()[0] > 0

    def is_done(self, running: Collection[LaunchedRank]) -> bool:
        """Return whether the training is complete and needs no rank in ``running``, the ranks that still run.

        The ranks of the last world are needed until they end.
        """
        return self._complete() and not set(running) & set(self._world()[1])

    def relevant(self) -> list[End]:
        """Return the ends of processes that determine the job's exit code, at most one for each rank.

        If the training is complete, return the last ends of the ranks that have completed it. If it is not complete,
        return the first end of each rank during the last world, because later ends are consequences of these ends. The
        job had recovered from failures in earlier worlds, so these failures do not count. If no rank failed during the
        last world, also return the last end of each rank that did not end then.
        """
        number, members = self._world()
        last = {end.rank: end for _, end in self._in_world}
        if self._complete():
            return [end for end in last.values() if end.rank in members]
        first = {end.rank: end for at, end in reversed(self._in_world) if at == number}
        if not any(end.failed for end in first.values()):
            first = {**last, **first}
        return sorted(first.values(), key=lambda end: (end.at_s, end.rank))
