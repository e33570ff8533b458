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

        ``first_delay_s``: how long the first start that is not immediate waits; each further one waits twice as long.
        ``startable(rank)``: whether its host is there, so that another process can be started.

        ``over()``: why no world can open any more; "": one can. ``complete()``: whether the training has reached its
        end. ``world()``: the number of the last world, 0 if there was none, and its ranks. Other threads change what these
        functions return.
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
        """Return after how many seconds the rank that has ended so is started again; None: never.

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
        """Whether no process has to be started any more: the training is complete, or the job cannot go on."""
        return self._complete() or bool(self._over())

    def is_done(self, running: Collection[int]) -> bool:
        """Return whether the processes that still run are not needed: the training is complete without them."""
        return self._complete() and not set(running) & set(self._world()[1])

    def relevant(self) -> list[End]:
        """Return the ends that decide how the job has ended, at most one for each rank.

        If the training is complete, those of the ranks that completed it. Otherwise the first end of each rank in the
        last world: what came later came because of that, and what came in an earlier world had been mended.
        """
        number, members = self._world()
        last = {end.rank: end for _, end in self._in_world}
        if self._complete():
            return [end for end in last.values() if end.rank in members]
        first = {end.rank: end for at, end in reversed(self._in_world) if at == number}
        return sorted({**last, **first}.values(), key=lambda end: end.at_s)
