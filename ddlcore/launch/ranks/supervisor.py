"""Watch the ranks of one run: record the ends of ranks, pass signals on to ranks, and decide when to end ranks."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ddlcore.control.liveness import Watcher
from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.text.ranks import ranks_text

KILL_AFTER_S = 3.0  # time from SIGTERM to SIGKILL
LEFT_BEHIND_S = 1.0  # time from SIGTERM to SIGKILL for processes that run longer than the rank that started them
_DEAD_AFTER_S = 5.0  # at the end of a job, a process that still runs this long after SIGKILL hangs in the kernel
_HANGS_AFTER_S = 30.0  # the same while others go on: the memory of a large process takes a while to be released
_GROUP_POLL_S = 0.02  # poll interval, because no event reports the end of a group's last process
_IDLE_S = 3600.0
_WISH_S = 60.0  # after a signal to the job, an end by the same signal follows from it; a rank may handle it for as long
LOST = 255  # the return code recorded for a rank that was lost with its host


class Watched(Protocol):
    """The interface of a rank that a supervisor watches: a process of this host, or a rank that an agent runs."""

    @property
    def rank(self) -> LaunchedRank: ...

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process of the rank, or None for a rank that an agent runs.

        An agent reports the end of the rank itself, and ends the processes that the rank has left behind.
        """

    def signal(self, number: int) -> None:
        """Send the signal ``number`` only to the rank's own process."""

    def signal_group(self, number: int) -> None:
        """Send the signal ``number`` to the rank's process and to all processes that the rank has started."""

    def leaves_group(self) -> bool:
        """Return whether processes that the rank has started still run after the rank itself has ended."""


class RestartPolicy(Protocol):
    """The interface of an object that decides, in an elastic job, whether a rank that has ended is started again."""

    def delay_s(self, end: End) -> float | None:
        """Return the time in seconds after which the supervisor starts the ended rank again.

        ``end`` is the end of the rank. Return None if the supervisor must not start the rank again.
        """

    def otherwise(self, end: End) -> str:
        """Return words for the user that say what happens after ``end``, for which ``delay_s`` has returned None."""

    @property
    def over(self) -> bool:
        """Whether no rank needs to be started any more, because the training is complete or the job cannot go on."""

    def has_failed(self, running: Collection[LaunchedRank]) -> bool:
        """Return whether the job cannot go on, and none of the ranks in ``running`` has been in its last world."""

    @property
    def expects(self) -> bool:
        """Whether ranks may still be started although none runs."""

    def is_done(self, running: Collection[LaunchedRank]) -> bool:
        """Return whether the training is complete and needs no rank in ``running``, the ranks that still run."""


class Supervisor:
    """The supervisor of the ranks of one run, from their start to their end.

    Only one thread may call ``run`` and ``stop``. Any thread may call the methods whose description says so.
    """

    def __init__(
        self,
        processes: Sequence[Watched],
        *,
        grace_s: float,
        ended: Callable[[End], None],
        say: Callable[[str], None],
        revival: RestartPolicy | None = None,
        begin: Callable[[LaunchedRank], Watched] | None = None,
        stays: bool = False,
    ) -> None:
        """Watch ``processes``. ``ended`` is called at once for each end of a rank. ``say`` shows a line to the user.

        If a rank fails, the other ranks are ended ``grace_s`` seconds after the first failure. If ``revival`` is given,
        the job is elastic: the other ranks continue, and ``revival`` decides whether the failed rank is started again.
        ``begin`` starts a rank again, and raises OSError if this is not possible. If ``begin`` is None, no rank is
        started again. If ``stays`` is true, ``run`` does not return when all ranks have ended: it waits for calls of
        ``start`` until ``release`` is called.
        """
        self._stays = stays
        self._revival = revival
        self._begin = begin
        self._due: dict[LaunchedRank, float] = {}  # by rank: the time at which a process of the rank is started
        self._running = {process.rank: process for process in processes}
        self._grace_s = grace_s
        self._tell = ended
        self._say = say
        # Other threads only append to these queues and wake the watcher; only the thread in `run` reads them and acts.
        # So the sets and deadlines below need no lock. An entry must be appended before the wake-up: in the other order
        # `run` could look at the queue in between and then sleep although there is work.
        self._watcher = Watcher()
        self._signals: deque[int] = deque()
        # Rank, signal, whether the rank's whole group gets it.
        self._orders: deque[tuple[LaunchedRank, int, bool]] = deque()
        self._silent: deque[tuple[LaunchedRank, str]] = deque()  # rank, description of its state
        self._killed_silent: dict[LaunchedRank, str] = {}
        # Rank, return code, why it is lost, whether that is certain.
        self._remote_ends: deque[tuple[LaunchedRank, int, str, bool]] = deque()
        self._tasks: deque[Callable[[], None]] = deque()
        self._abandoned = False
        self._finished = False
        self._left_behind: dict[Watched, float] = {}  # by ended rank whose group still has processes: when it ended
        self._ends: list[End] = []
        self._stopped: set[LaunchedRank] = set()
        # By the return code of a rank that has no handler for a signal: when this signal was passed on to all ranks.
        self._wished: dict[int, float] = {}
        self._terminate_at_s: float | None = None
        self._kill_at_s: float | None = None
        self._lost_at_s: float | None = None
        self._dead_by_s: dict[LaunchedRank, float] = {}  # by rank that got SIGKILL alone: when it should have ended
        self.interrupted_s: float | None = None  # time of the first Ctrl-C; None: there was none
        self.killed = False  # all ranks were killed, because of a second Ctrl-C or a call of `abandon`
        for process in processes:
            if process.process is not None:
                self._watcher.add(process.rank, process.process)

    def deliver(self, number: int) -> None:
        """React to the signal ``number``, which the user or the system has sent to the job. Any thread may call this.

        At the first SIGINT (Ctrl-C), all ranks get SIGINT. At the second SIGINT, all ranks are killed. Every other
        signal is sent to each rank.
        """
        self._signals.append(number)
        self._watcher.wake()

    def order(self, rank: LaunchedRank, number: int, group: bool) -> None:
        """Send signal ``number`` to the process of ``rank``. Any thread may call this.

        If ``group`` is true, also send the signal to all processes that the rank has started.
        """
        self._orders.append((rank, number, group))
        self._watcher.wake()

    def kill_silent(self, rank: LaunchedRank, why: str) -> None:
        """Kill ``rank``, which does not answer after a stall has ended the job.

        The rank is reported as the cause of the job's failure, and ``why`` describes the state of the rank. The rank
        gets SIGKILL at once: no other signal ends a stopped process, and a process in which a thread keeps the
        interpreter lock runs no signal handler. The other ranks end by themselves. Any thread may call this.
        """
        self._silent.append((rank, why))
        self._watcher.wake()

    def ended_on_host(self, rank: LaunchedRank, returncode: int, lost: str = "", certain: bool = True) -> None:
        """Record that a rank that an agent runs has ended. Any thread may call this.

        If ``lost`` is not empty, it says why the rank counts as ended although its end was not seen. Only the first
        report on a rank counts. ``certain`` is false if the host is only silent, so that the process may live.
        """
        self._remote_ends.append((rank, returncode, lost, certain))
        self._watcher.wake()

    def do(self, task: Callable[[], None]) -> None:
        """Let the thread that executes ``run`` call ``task`` soon. Any thread may call this."""
        self._tasks.append(task)
        self._watcher.wake()

    def start(self, rank: LaunchedRank) -> None:
        """Start a process of ``rank``, of which no process runs now. Any thread may call this."""
        self.do(lambda: self._due.__setitem__(rank, time.monotonic()))

    def release(self) -> None:
        """Let ``run`` return when all ranks have ended, even if ``stays`` was given. Any thread may call this."""
        self._stays = False
        self._watcher.wake()

    def finish(self) -> None:
        """End every rank, because the job has reached its goal. These ends do not count as failures.

        Any thread may call this.
        """
        self._finished = True
        self._watcher.wake()

    def abandon(self) -> None:
        """Kill every rank without a message to the user. ``run`` then returns. Any thread may call this."""
        self._abandoned = True
        self.release()

    def run(self) -> list[End]:
        """Watch until every rank, and every process that a rank has started, has ended.

        Return the ends of the ranks in the order in which they happened.
        """
        try:
            while self._running or self._left_behind or self._due or self._tasks or self._stays or self._expects():
                for rank, returncode in self._watcher.wait(self._patience_s()):
                    self._note(rank, returncode)
                # A task that was given before an end, such as that the host is lost, is done before the end is judged.
                ends = [self._remote_ends.popleft() for _ in range(len(self._remote_ends))]
                while self._tasks:
                    self._tasks.popleft()()
                for rank, returncode, lost, certain in ends:
                    if rank in self._running:
                        self._note(rank, returncode, lost, certain)
                while self._silent:
                    self._end_silent(*self._silent.popleft())
                while self._orders:
                    self._follow(*self._orders.popleft())
                while self._signals:
                    self._obey(self._signals.popleft())
                self._escalate(time.monotonic())
                self._clear_groups(time.monotonic())
                self._revive(time.monotonic())
                if self._revival is not None:
                    self._look_whether_over(self._revival, time.monotonic())
            return self._ends
        finally:
            self._watcher.close()

    def stop(self) -> None:
        """End every rank, because the caller gives up.

        The ranks get SIGTERM first, and SIGKILL after ``LEFT_BEHIND_S`` seconds.
        """
        now_s = time.monotonic()
        self._begin = None
        self._terminate()
        self._kill_at_s = now_s + LEFT_BEHIND_S
        watcher, self._watcher = self._watcher, Watcher()
        watcher.close()
        for process in list(self._running.values()):
            if process.process is None:
                continue
            # The caller may have been interrupted after the rank's end was seen and before it was recorded. The new
            # watcher would never report that end, so ask for it here.
            returncode = process.process.poll()
            if returncode is None:
                self._watcher.add(process.rank, process.process)
            else:
                self._note(process.rank, returncode)
        self.run()

    # --- what happened

    def _note(self, rank: LaunchedRank, returncode: int, lost: str = "", certain: bool = True) -> None:
        now_s = time.monotonic()
        process = self._running.pop(rank)
        self._dead_by_s.pop(rank, None)
        silent = self._killed_silent.pop(rank, "")
        if returncode != -signal.SIGKILL:
            silent = ""  # it has ended by itself, just before
        self._conclude(End(rank, returncode, now_s, rank in self._stopped, lost, silent, certain))
        if process.leaves_group():
            process.signal_group(signal.SIGTERM)
            self._left_behind[process] = now_s

    def _conclude(self, end: End) -> None:
        """Record and report ``end``, and decide whether to end other ranks or to start the rank again."""
        self._tell(end)
        self._ends.append(end)
        if self._revival is not None:
            self._go_on(end, self._revival)
        elif end.failed and self._terminate_at_s is None and not self._stays:
            self._terminate_at_s = end.at_s + self._grace_s

    def _go_on(self, end: End, revival: RestartPolicy) -> None:
        """In an elastic job, decide whether the rank of ``end`` is started again, and report this to the user."""
        delay_s = revival.delay_s(end)
        # Whether the end follows from a signal to the job: then the rank is not to be started again.
        is_wished = end.at_s - self._wished.get(end.returncode, -math.inf) < _WISH_S
        if self._begin is None or self._ends_all or is_wished:
            delay_s = None
        if delay_s is not None:
            self._due[end.rank] = end.at_s + delay_s
        if end.failed:
            self._say(
                f"rank {end.rank}{':' if end.lost else ''} {end.reason}; {_what_follows(delay_s) or revival.otherwise(end)}"
            )

    def _look_whether_over(self, revival: RestartPolicy, now_s: float) -> None:
        """End the ranks that still run if no world needs them any more."""
        if self._terminate_at_s is not None:  # this is done already
            return
        if revival.is_done(self._running):
            self.finish()
        elif self._running and revival.has_failed(self._running):
            # Those that are still loading would not notice it before they register.
            self._terminate_at_s = now_s + self._grace_s

    def _expects(self) -> bool:
        if self._begin is None or self._revival is None or self._ends_all or self._finished or self.killed:
            return False
        return not self._wished and self._revival.expects

    @property
    def _ends_all(self) -> bool:
        """Whether all ranks are being ended, so that no rank may be started any more."""
        return self._terminate_at_s is not None or self._kill_at_s is not None or self.interrupted_s is not None

    def _revive(self, now_s: float) -> None:
        if self._ends_all or self._finished or self.killed or (self._revival is not None and self._revival.over):
            self._due.clear()
        for rank in [rank for rank, at_s in self._due.items() if at_s <= now_s and self._begin is not None]:
            del self._due[rank]
            if rank in self._running:
                continue
            assert self._begin is not None
            try:
                watched = self._begin(rank)
            except OSError as error:
                text = f"it cannot be started again: {error.strerror} ({error.filename})"
                self._conclude(End(rank, LOST, now_s, lost=text, certain=False))  # nothing is known of the one before
                continue
            self._running[rank] = watched
            if watched.process is not None:
                self._watcher.add(rank, watched.process)

    def _obey(self, number: int) -> None:
        if number != signal.SIGINT:
            if number in (signal.SIGTERM, signal.SIGHUP):
                self._wished[-number] = time.monotonic()
            for process in self._running.values():
                process.signal(number)
        elif self.interrupted_s is None:
            self.interrupted_s = time.monotonic()
            self._signal_groups(signal.SIGINT)
            self._say("interrupted: the ranks were asked to stop; press Ctrl-C again to kill them")
        elif not self.killed:
            self.killed = True
            self._say("killing the ranks")
            self._kill()

    def _end_silent(self, rank: LaunchedRank, why: str) -> None:
        process = self._running.get(rank)
        if process is not None and rank not in self._stopped:
            self._killed_silent[rank] = why
            self._signal_group(process, signal.SIGKILL)

    def _follow(self, rank: LaunchedRank, number: int, group: bool) -> None:
        process = self._running.get(rank)
        if process is not None and group:
            self._signal_group(process, number)
        elif process is not None:
            process.signal(number)

    def _signal_group(self, process: Watched, number: int) -> None:
        process.signal_group(number)
        if number == signal.SIGKILL and process.process is not None:
            self._dead_by_s[process.rank] = time.monotonic() + _HANGS_AFTER_S

    # --- what follows

    def _patience_s(self) -> float:
        if self._left_behind:
            return _GROUP_POLL_S
        deadlines = [at for at in (self._terminate_at_s, self._kill_at_s, self._lost_at_s) if at is not None]
        deadlines += [*self._due.values(), *self._dead_by_s.values()]
        return max(0.0, min([_IDLE_S, *(at - time.monotonic() for at in deadlines)]))

    def _escalate(self, now_s: float) -> None:
        if self._finished and self._terminate_at_s is None:
            self._terminate_at_s = float("inf")
            self._terminate()
            self._kill_at_s = now_s + KILL_AFTER_S
        if self._abandoned and not self.killed:
            self.killed = True
            self._kill()
        if self._terminate_at_s is not None and now_s >= self._terminate_at_s:
            self._terminate_at_s = float("inf")  # do this only once
            if self._running and self._kill_at_s is None and self._lost_at_s is None:
                self._say(
                    f"{ranks_text(sorted(self._running))} still ran {self._grace_s:g} s after the failure: ending them"
                )
                self._terminate()
                self._kill_at_s = now_s + KILL_AFTER_S
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill()
        if self._lost_at_s is not None and now_s >= self._lost_at_s:
            if self._running:
                self._give_up(list(self._running))
            self._left_behind.clear()
            self._lost_at_s = None
        overdue = [rank for rank, by_s in self._dead_by_s.items() if now_s >= by_s]
        for rank in overdue:
            del self._dead_by_s[rank]
            if rank in self._running and _may_signal(self._running[rank]):
                self._give_up([rank])

    def _give_up(self, ranks: Sequence[LaunchedRank]) -> None:
        """Take it that ``ranks``, which got SIGKILL, have ended: none of their own code will run any more."""
        who = "it hangs" if len(ranks) == 1 else "they hang"
        self._say(
            f"{ranks_text(sorted(ranks))} cannot be ended by SIGKILL ({who} in the kernel): not waited for any more"
        )
        for rank in ranks:
            process = self._running[rank].process
            if process is not None:
                self._watcher.forget(process)
            self._note(rank, -signal.SIGKILL)

    def _terminate(self) -> None:
        self._stopped.update(self._running)
        self._signal_groups(signal.SIGTERM)

    def _kill(self) -> None:
        self._stopped.update(self._running)
        self._signal_groups(signal.SIGKILL)
        self._kill_at_s = None
        self._lost_at_s = time.monotonic() + _DEAD_AFTER_S

    def _signal_groups(self, number: int) -> None:
        for process in self._running.values():
            process.signal_group(number)

    def _clear_groups(self, now_s: float) -> None:
        for process, since_s in list(self._left_behind.items()):
            if now_s - since_s >= LEFT_BEHIND_S or self.killed:
                process.signal_group(signal.SIGKILL)
            if not process.leaves_group() or now_s - since_s >= 2 * LEFT_BEHIND_S:
                del self._left_behind[process]


def _what_follows(delay_s: float | None) -> str:
    if delay_s is None:
        return ""
    return "it is started again" if not delay_s else f"it is started again in {delay_s:g} s"


def _may_signal(watched: Watched) -> bool:
    """Return whether SIGKILL can have reached the process of ``watched``: it may be that of another user, as by sudo."""
    try:
        if watched.process is not None:
            os.kill(watched.process.pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True
