"""Run the commands that start agents: start each as a process, give it its task, read its output, and end it."""

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
    """One running command that starts agents, with a thread that reads its output.

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
        """Start the command. Raises OSError if it cannot be started.

        The command gets ``task`` on its standard input or in an environment variable, as it wants. ``ended`` is called
        when it has ended, and ``answered`` with each line that it prints. Call it in the main thread, because the
        command is tied to the thread that starts it, and the main thread lives as long as the job.
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
            start_new_session=True,  # so that Ctrl-C at the terminal reaches only us; we pass it on
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
        """The last part of what the command has written, stderr and stdout in the order of their arrival."""
        return bytes(self._text).decode("utf-8", "replace")

    def close(self, timeout_s: float) -> None:
        """End the command: close its standard input, after ``timeout_s`` seconds send SIGTERM, and finally SIGKILL."""
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
        # Wait for the process, not for the end of the pipes: a connection that ssh keeps for reuse holds them open.
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
        """Read the data that is there and return True.

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
