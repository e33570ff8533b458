"""Run one rank as a process of this machine: start it, signal it, and end it together with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


class RankProcess:
    """The process of one rank, which leads a process group of its own. One thread starts and ends it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], stdout: int, stderr: int) -> None:
        self.rank = rank
        self.process = process
        self.stdout = stdout  # reading end of its pipe; the object that reads it also closes it
        self.stderr = stderr

    @classmethod
    def begin(
        cls,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        in_child: Callable[[], None] | None = None,
    ) -> RankProcess:
        """Start the process of a rank. Raises OSError if it cannot be started.

        ``stdin`` None means the launcher's own stdin. ``in_child`` is called in the child between fork and exec.
        """
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=stdin,
                stdout=out_write,
                stderr=err_write,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                preexec_fn=in_child,
            )
        except BaseException:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            os.close(out_write)
            os.close(err_write)
        return cls(rank, process, out_read, err_read)

    def kill(self) -> None:
        """Kill the process and its group, wait for the end of the process, and close its pipes.

        Only for a caller that gives up before a supervisor watches the process.
        """
        self.signal_group(signal.SIGKILL)
        self.process.wait(5.0)
        os.close(self.stdout)
        os.close(self.stderr)

    def signal(self, number: int) -> None:
        """Send the signal to the rank alone, not to the processes that it started, such as DataLoader workers.

        A SIGUSR1 that only the script handles would kill those.
        """
        if self.process.returncode is None:
            self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send the signal to the rank and to all processes that it started and that are still in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS denies it for a group of zombies
            os.killpg(self.process.pid, number)

    def leaves_group(self) -> bool:
        """Return whether other processes of the rank's group still run after the rank itself has ended.

        Also reaps processes of the group that have ended and whose parent this process has become.
        """
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.process.pid, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def die_with_launcher(launcher: int) -> Callable[[], None] | None:
    """Return a function that makes a rank die when process ``launcher`` dies, or None if the system cannot do that.

    The rank dies even if the launcher was ended by kill -9. The rank calls the function, before or after exec. The rank
    is then tied to the thread that started it, which must therefore live as long as the job.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    death, kill = ctypes.c_ulong(signal.SIGKILL), ctypes.c_int(_SET_DEATH_SIGNAL)

    def tie() -> None:
        prctl(kill, death, 0, 0, 0)
        if os.getppid() != launcher:  # the launcher died before the line above, so no signal will come
            os._exit(1)

    return tie


def adopt_orphans() -> None:
    """Make this process the parent of processes that its ranks leave behind, so that it can see them end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
