"""One rank as a process of this machine: begun, signalled and ended together with all that it began."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

__all__ = ["RankProcess", "adopt_orphans", "die_with_launcher"]

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


class RankProcess:
    """The process of one rank, leader of a group of its own. One thread begins and ends it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], stdout: int, stderr: int) -> None:
        self.rank = rank
        self.process = process
        self.stdout = stdout  # reading end; whoever takes it closes it
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
        """Starts it; OSError where that cannot be.

        ``stdin`` None: the launcher's own. ``in_child`` runs between fork and exec.
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
        """Ends it, for a caller that gives up before anybody watches over it."""
        self.signal_group(signal.SIGKILL)
        self.process.wait(5.0)
        os.close(self.stdout)
        os.close(self.stderr)

    def signal(self, number: int) -> None:
        """To the rank alone: its DataLoader workers would die of a SIGUSR1 that the script handles."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """To the rank and all that it began and that has not left its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS denies it for a group of zombies
            os.killpg(self.process.pid, number)

    def leaves_group(self) -> bool:
        """Whether anything of the group is still there, the rank itself having ended. Reaps what was adopted."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.process.pid, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def die_with_launcher(launcher: int) -> Callable[[], None] | None:
    """What a rank does so that kill -9 of process ``launcher`` ends it too; None where the system lacks it.

    To be called in the rank, before exec or after. It is tied to the thread that started the rank,
    which must live as long as the job.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    death, kill = ctypes.c_ulong(signal.SIGKILL), ctypes.c_int(_SET_DEATH_SIGNAL)

    def tie() -> None:
        prctl(kill, death, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)

    return tie


def adopt_orphans() -> None:
    """Makes this process the parent of what its ranks leave behind, so that it is seen to end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
