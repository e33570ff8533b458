"""Run one rank as a process of this host: start the process, send signals to it, and end it with all its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from ddlcore.messages.ranks import LaunchedRank

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


class RankProcess:
    """The process of one rank. It is the leader of a new process group. Only one thread may use this object."""

    def __init__(self, rank: LaunchedRank, process: subprocess.Popen[bytes], stdout: int, stderr: int) -> None:
        self.rank = rank
        self.process = process
        self.stdout = stdout  # reading end of the pipe; the object that reads the pipe also closes it
        self.stderr = stderr

    @classmethod
    def begin(
        cls,
        rank: LaunchedRank,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        in_child: Callable[[], None] | None = None,
    ) -> RankProcess:
        """Start the process of a rank. Raises OSError if it cannot be started.

        ``stdin`` is a file descriptor or ``subprocess.DEVNULL``; None means this process's own stdin. The process
        inherits the file descriptors in ``pass_fds``. ``in_child`` is called in the child between fork and exec.
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
        """Kill the process and its process group, wait for the end of the process, and close its pipes.

        Call this only if no supervisor watches the process yet and the caller gives up.
        """
        self.signal_group(signal.SIGKILL)
        self.process.wait(5.0)
        os.close(self.stdout)
        os.close(self.stderr)

    def signal(self, number: int) -> None:
        """Send the signal ``number`` only to the rank's own process.

        The processes that the rank has started, such as DataLoader workers, do not get the signal: a SIGUSR1 that only
        the script handles would kill them.
        """
        if self.process.returncode is None:
            self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send the signal ``number`` to all processes in the rank's process group.

        These are the rank's own process and the processes that the rank has started, unless they have left the group.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS denies it for a group of zombies
            os.killpg(self.process.pid, number)

    def leaves_group(self) -> bool:
        """Return whether other processes of the rank's process group still run after the rank itself has ended.

        If processes of the group have ended and this process has become their parent, also reap these processes.
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
    """Return a function that makes the calling process die when its parent, process ``launcher``, dies.

    The child process calls the function, before or after exec. After that, the kernel kills the child even if the
    launcher was ended by kill -9. The kernel also kills the child when the thread that started it ends, so this thread
    must live as long as the job. Return None if the system does not support this.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    death, kill = ctypes.c_ulong(signal.SIGKILL), ctypes.c_int(_SET_DEATH_SIGNAL)

    def tie() -> None:
        prctl(kill, death, 0, 0, 0)
        if os.getppid() != launcher:  # the launcher died before the line above, so no signal will arrive
            os._exit(1)

    return tie


def adopt_orphans() -> None:
    """Make this process the parent of the processes that its ranks leave behind.

    In this way, this process notices when these processes end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
