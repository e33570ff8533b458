"""Catch the launcher's signals that are meant for the job, and pass each of them to a function that reacts to it."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_FORWARDED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)

_ENDING = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


def _leave_to_the_reader(number: int, frame: FrameType | None) -> None:
    """Do nothing, because Python has already written the signal's number to the wake-up file descriptor."""


class SignalTrap:
    """A context manager in which the signals that are meant for the job do not end this process.

    Only the main thread may enter and leave the context. A separate thread reads the numbers of the signals from a
    socket and passes them to the job. A Python signal handler must not do this: a handler may interrupt the main thread
    at any point, even while the main thread has locked a lock that the handler would need.
    """

    def __init__(self, *, stays: bool = False) -> None:
        """Create the trap, without catching signals yet.

        If ``stays`` is true, Ctrl-Z will not stop this process. This is needed if the job has agents, because the
        agents would treat a stopped launcher as lost.
        """
        self.interrupts = 0  # number of SIGINTs so far
        self._stays = stays and hasattr(signal, "SIGTSTP")
        self._previous: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SignalTrap:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _FORWARDED:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the job outlives its terminal
            self._previous[number] = signal.signal(number, _leave_to_the_reader)
        if self._stays:
            self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, _leave_to_the_reader)
        return self

    def came(self) -> int:
        """Return the number of the first received signal that asks the job to end, or 0 if there is none yet.

        Call this only before ``forward``, because the thread of ``forward`` removes all signals from the socket.
        """
        try:
            numbers = self._reader.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        return next((number for number in numbers if number in _ENDING), 0)

    def forward(self, deliver: Callable[[int], None], say: Callable[[str], None] = lambda _: None) -> None:
        """Start a thread that calls ``deliver(number)`` for each signal.

        This includes the signals that have arrived since the context was entered. Call this only once. ``say`` is
        called with a line for the user each time Ctrl-Z was ignored.
        """
        self._thread = threading.Thread(target=self._run, args=(deliver, say), name="ddl-signals", daemon=True)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        with contextlib.suppress(OSError):
            self._writer.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        if self._thread is not None:
            self._thread.join(1.0)
        self._reader.close()

    def _run(self, deliver: Callable[[int], None], say: Callable[[str], None]) -> None:
        while data := self._reader.recv(64):
            for number in data:
                self.interrupts += number == signal.SIGINT
                if self._stays and number == signal.SIGTSTP:
                    say("Ctrl-Z does not stop a job on several hosts: they would take this one for lost")
                elif number in self._previous:
                    deliver(number)
