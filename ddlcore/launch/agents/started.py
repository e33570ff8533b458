"""Run the commands that start agents: start each command as a process, pass a task to it, read its output, end it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping

from ddlcore.contracts.launcher import StartCommand
from ddlcore.control.liveness import open_pidfd
from ddlcore.launch.agents.bootstrap import ANSWER, VARIABLE
from ddlcore.launch.ranks.process import die_with_launcher

_KEPT_BYTES = 1 << 15  # how much of a command's output is kept
_POLL_S = 0.2  # poll interval if the system has no pidfd


class Started:
    """One running command that starts agents, with a thread that reads the output of the command.

    The thread calls ``answered(public key)`` for each key that an agent prints, and ``ended(self, exit code)`` when the
    command has ended.
    """

    def __init__(
        self,
        command: StartCommand,
        task: bytes,
        environ: Mapping[str, str],
        *,
        ended: Callable[[Started, int], None],
        answered: Callable[[str], None],
    ) -> None:
        """Start ``command`` with the environment ``environ``. Raises OSError if it cannot be started.

        ``command.task`` says whether the command gets ``task`` on its standard input, in an environment variable, or
        not at all. ``ended`` and ``answered`` are described at the class. Call this in the main thread: the kernel
        kills the command when the thread that started it ends, and the main thread lives as long as the job.
        """
        self.command = command
        self._ended = ended
        self._answered = answered
        self._text = bytearray()
        self._line = bytearray()  # incomplete line of stdout
        added = {VARIABLE: task.decode().strip()} if command.task == "environment" else {}
        by_stdin = command.task == "stdin"
        self._process = subprocess.Popen(
            command.argv,
            env={**environ, **command.environ, **added},
            stdin=subprocess.PIPE if by_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C at the terminal reaches only this process, which passes it on
            preexec_fn=die_with_launcher(os.getpid()),
        )
        if by_stdin:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the command has already ended: its output says why
                os.write(self._process.stdin.fileno(), task)  # fits into a pipe, so this never blocks
        self._thread = threading.Thread(target=self._run, name="ddl-start", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """The last 32 KiB of the command's output, in the order of arrival.

        The output is stderr and stdout, but only stderr if the agents print their keys to stdout.
        """
        return bytes(self._text).decode("utf-8", "replace")

    def close(self, timeout_s: float) -> None:
        """Close the command's standard input; send SIGTERM after ``timeout_s`` seconds, and SIGKILL after 1 s more.

        Return as soon as the command has ended.
        """
        if self._process.stdin is not None:
            self._process.stdin.close()
        for patience_s, number in ((timeout_s, signal.SIGTERM), (1.0, signal.SIGKILL), (1.0, None)):
            self._thread.join(patience_s)
            if not self._thread.is_alive() or number is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _run(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        out, err = self._process.stdout.fileno(), self._process.stderr.fileno()
        poll = select.poll()
        pidfd = open_pidfd(self._process.pid)
        for fd in (out, err, *([pidfd] if pidfd >= 0 else [])):
            poll.register(fd, select.POLLIN)
        for fd in (out, err):
            os.set_blocking(fd, False)
        # Wait for the end of the process, not of the pipes: a connection that ssh keeps for reuse keeps the pipes open.
        while self._process.poll() is None:
            for fd, _ in poll.poll(None if pidfd >= 0 else _POLL_S * 1000):
                if fd != pidfd and not self._read(fd, fd == out):
                    poll.unregister(fd)
        for fd in (out, err):
            while self._read(fd, fd == out):
                pass
        if pidfd >= 0:
            os.close(pidfd)
        self._process.stdout.close()
        self._process.stderr.close()
        self._ended(self, self._process.returncode)

    def _read(self, fd: int, is_stdout: bool) -> bool:
        """Read and handle the data that can be read from ``fd`` now, and return True.

        Return False at the end of the stream, or if there is no data now.
        """
        try:
            data = os.read(fd, 1 << 14)
        except BlockingIOError:
            return False
        if is_stdout and self.command.task == "public":
            self._line += data
            while b"\n" in self._line:
                line, _, self._line = self._line.partition(b"\n")
                if line.startswith(ANSWER.encode()):
                    self._answered(line.decode("ascii", "replace")[len(ANSWER) :].strip())
        else:
            self._text += data
            del self._text[:-_KEPT_BYTES]
        return bool(data)
