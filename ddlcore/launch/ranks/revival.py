"""Decides whether and when the process of a rank that has failed is started again, and how an elastic job has ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection

from ddlcore.launch.ranks.exit_status import End

WINDOW_S = 600.0
_LONGEST = 64  # delays grow to at most so many times the first one


class Revival:
    """The rules of one elastic job for processes that fail. The supervisor's thread calls it."""

    def __init__(
        self,
        restarts: int,
        first_delay_s: float,
        startable: Callable[[int], bool],
        over: Callable[[], str],
        complete: Callable[[], bool],
        world: Callable[[], tuple[int, Collection[int]]],
    ) -> None:
        """Allow ``restarts`` starts of each rank within WINDOW_S.

        ``first_delay_s`` is how many seconds the first start waits that is not made at once; each further one waits
        twice as long as the one before. ``startable(rank)`` returns whether the rank's host is there, so that another
        process can be started.

        Other threads change what the remaining functions return. ``over()`` returns why no further world can open, or
        an empty string as long as one can. ``complete()`` returns whether the training has reached its end. ``world()``
        returns the number of the last world (0 if there was none) and its ranks.
        """
        self._restarts = restarts
        self._first_delay_s = first_delay_s
        self._startable = startable
        self._over = over
        self._complete = complete
        self._world = world
        self._in_world: list[tuple[int, End]] = []  # the ends, each with the number of the last world at that time
        self._failures: dict[int, deque[float]] = defaultdict(deque)

    def delay_s(self, end: End) -> float | None:
        """Return after how many seconds the rank that ended as ``end`` says is started again, or None if it never is.

        A process that was killed is started at once, then after 1, 2, 4, … times ``first_delay_s``. One that ended by
        itself, maybe by an error that all ranks raise, is never started at once: if all have ended by then, the job is
        over, and no second process hides the error.
        """
        number, members = self._world()
        self._in_world.append((number, end))
        if not end.failed or not self._startable(end.rank) or self._over() or self._complete():
            return None
        if end.returncode > 0 and not members:
            return None  # no world has begun: it would come again, as a mistake in the script does
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
        """Return, for the user, what follows from ``end`` after ``delay_s`` has returned None."""
        return "it is not started again"

    @property
    def over(self) -> bool:
        """Whether no process has to be started any more, because the training is complete or the job cannot go on."""
        return self._complete() or bool(self._over())

    def is_done(self, running: Collection[int]) -> bool:
        """Return whether the processes that are ``running`` are not needed any more.

        That is so when the training is complete without them.
        """
        return self._complete() and not set(running) & set(self._world()[1])

    def relevant(self) -> list[End]:
        """Return the ends that decide how the job has ended, at most one for each rank.

        If the training is complete, these are the ends of the ranks that completed it. Otherwise, they are the first
        end of each rank in the last world: later ends are consequences of these, and failures of earlier worlds had
        been mended.
        """
        number, members = self._world()
        last = {end.rank: end for _, end in self._in_world}
        if self._complete():
            return [end for end in last.values() if end.rank in members]
        first = {end.rank: end for at, end in reversed(self._in_world) if at == number}
        return sorted({**last, **first}.values(), key=lambda end: end.at_s)
