"""Watches over the ranks of one run: who ended, what the user asked by signal, and whom to end when."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ddlcore.control.liveness import Watcher
from ddlcore.launch.exit_status import End, ranks_text

__all__ = ["LOST", "Supervisor", "Watched"]

KILL_AFTER_S = 3.0  # from SIGTERM to SIGKILL
LEFT_BEHIND_S = 1.0  # what a rank began may outlive it by so much, SIGTERM included
_DEAD_AFTER_S = 5.0  # a process that SIGKILL does not end within it hangs in the kernel
_GROUP_POLL_S = 0.02  # nothing tells when the last of a group has ended
_IDLE_S = 3600.0
LOST = 255  # stands for the exit code of a rank that was lost with its host


class Watched(Protocol):
    """A rank as it is watched over: of this host, or of another by its agent."""

    @property
    def rank(self) -> int: ...

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """None for a rank of another host, whose agent tells of its end and of what it left behind."""

    def signal(self, number: int) -> None:
        """To the rank alone."""

    def signal_group(self, number: int) -> None:
        """To the rank and all that it began."""

    def leaves_group(self) -> bool:
        """Whether anything that it began is still there."""


class Supervisor:
    """Runs in one thread from the ranks' begin to their end; ``deliver`` may come from any other."""

    def __init__(
        self,
        processes: Sequence[Watched],
        *,
        grace_s: float,
        ended: Callable[[End], None],
        say: Callable[[str], None],
    ) -> None:
        """``ended`` is told of every end at once; ``say`` shows a line to the user."""
        self._running = {process.rank: process for process in processes}
        self._grace_s = grace_s
        self._tell = ended
        self._say = say
        self._watcher = Watcher()
        self._signals: deque[int] = deque()
        self._orders: deque[tuple[int, int, bool]] = deque()  # rank, signal, whether to its whole group
        self._silent: deque[tuple[int, str]] = deque()  # rank, what is known of it
        self._killed_silent: dict[int, str] = {}
        self._remote_ends: deque[tuple[int, int, str]] = deque()  # rank, return code, why it is lost
        self._abandoned = False
        self._finished = False
        self._left_behind: dict[Watched, float] = {}  # ended ranks with something still in their group; since when
        self._ends: list[End] = []
        self._stopped: set[int] = set()
        self._terminate_at_s: float | None = None
        self._kill_at_s: float | None = None
        self._lost_at_s: float | None = None
        self.interrupted = False
        self.killed = False  # by the user's second Ctrl-C
        for process in processes:
            if process.process is not None:
                self._watcher.add(process.rank, process.process)

    def deliver(self, number: int) -> None:
        """A signal came for the job."""
        self._signals.append(number)
        self._watcher.wake()

    def order(self, rank: int, number: int, group: bool) -> None:
        """A signal for one rank, or for all that it began too. Any thread."""
        self._orders.append((rank, number, group))
        self._watcher.wake()

    def kill_silent(self, rank: int, why: str) -> None:
        """The job is over without the rank, which does not answer: it is killed, and named as the cause. Any thread.

        By SIGKILL at once: nothing else ends a process that is stopped, and one that holds the interpreter lock runs
        no handler. The other ranks leave by themselves.
        """
        self._silent.append((rank, why))
        self._watcher.wake()

    def ended_on_host(self, rank: int, returncode: int, lost: str = "") -> None:
        """The rank, of another host, has ended; ``lost``: or so it must be taken. Only the first word counts. Any thread."""
        self._remote_ends.append((rank, returncode, lost))
        self._watcher.wake()

    def finish(self) -> None:
        """The job has done what it was for: ends every rank, which is no failure of theirs. Any thread."""
        self._finished = True
        self._watcher.wake()

    def abandon(self) -> None:
        """Kills every rank, without a word to anybody: there is nobody left to say it to. Any thread."""
        self._abandoned = True
        self._watcher.wake()

    def run(self) -> list[End]:
        """Until every rank has ended, and what they began too. In the order in which they ended."""
        try:
            while self._running or self._left_behind:
                for rank, returncode in self._watcher.wait(self._patience_s()):
                    self._note(rank, returncode)
                while self._remote_ends:
                    rank, returncode, lost = self._remote_ends.popleft()
                    if rank in self._running:
                        self._note(rank, returncode, lost)
                while self._silent:
                    self._end_silent(*self._silent.popleft())
                while self._orders:
                    self._follow(*self._orders.popleft())
                while self._signals:
                    self._obey(self._signals.popleft())
                self._escalate(time.monotonic())
                self._clear_groups(time.monotonic())
            return self._ends
        finally:
            self._watcher.close()

    def stop(self) -> None:
        """Ends every rank, SIGKILL following SIGTERM within ``LEFT_BEHIND_S``; for a caller that gives up."""
        now_s = time.monotonic()
        self._terminate()
        self._kill_at_s = now_s + LEFT_BEHIND_S
        watcher, self._watcher = self._watcher, Watcher()
        watcher.close()
        for process in list(self._running.values()):
            if process.process is None:
                continue
            # The caller may have been interrupted between its end and our note of it.
            returncode = process.process.poll()
            if returncode is None:
                self._watcher.add(process.rank, process.process)
            else:
                self._note(process.rank, returncode)
        self.run()

    # --- what happened

    def _note(self, rank: int, returncode: int, lost: str = "") -> None:
        now_s = time.monotonic()
        process = self._running.pop(rank)
        silent = self._killed_silent.get(rank, "") if returncode == -signal.SIGKILL else ""
        end = End(rank, returncode, now_s, rank in self._stopped, lost, silent)
        self._tell(end)
        self._ends.append(end)
        if end.failed and self._terminate_at_s is None:
            self._terminate_at_s = now_s + self._grace_s
        if process.leaves_group():
            process.signal_group(signal.SIGTERM)
            self._left_behind[process] = now_s

    def _obey(self, number: int) -> None:
        if number != signal.SIGINT:
            for process in self._running.values():
                process.signal(number)
        elif not self.interrupted:
            self.interrupted = True
            self._signal_groups(signal.SIGINT)
            self._say("interrupted: the ranks were asked to stop; press Ctrl-C again to kill them")
        elif not self.killed:
            self.killed = True
            self._say("killing the ranks")
            self._kill()

    def _end_silent(self, rank: int, why: str) -> None:
        process = self._running.get(rank)
        if process is not None and rank not in self._stopped:
            self._killed_silent[rank] = why
            process.signal_group(signal.SIGKILL)

    def _follow(self, rank: int, number: int, group: bool) -> None:
        process = self._running.get(rank)
        if process is not None and group:
            process.signal_group(number)
        elif process is not None:
            process.signal(number)

    # --- what follows

    def _patience_s(self) -> float:
        if self._left_behind:
            return _GROUP_POLL_S
        deadlines = [at for at in (self._terminate_at_s, self._kill_at_s, self._lost_at_s) if at is not None]
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
            self._terminate_at_s = float("inf")  # once
            if self._running and self._kill_at_s is None and self._lost_at_s is None:
                self._say(
                    f"{ranks_text(sorted(self._running))} still ran {self._grace_s:g} s after the failure: ending them"
                )
                self._terminate()
                self._kill_at_s = now_s + KILL_AFTER_S
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill()
        if self._lost_at_s is not None and now_s >= self._lost_at_s:
            self._say(
                f"{ranks_text(sorted(self._running))} cannot be ended by SIGKILL (they hang in the kernel): giving up on them"
            )
            for rank in list(self._running):
                self._note(rank, -signal.SIGKILL)
            self._left_behind.clear()
            self._lost_at_s = None

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
