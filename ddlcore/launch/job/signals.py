"""Catch the signals that are meant for the job and pass them on. The receiver decides what to do about a signal."""

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
    """Do nothing: before Python calls this handler, it has written the signal's number to the wake-up descriptor."""


class SignalTrap:
    """A context manager in which the signals that are meant for the job do not end this process.

    Only the main thread enters and leaves it. A separate thread reads the signals from a socket and passes them to the
    job. A Python signal handler cannot pass them on: it may interrupt the main thread at any point, even while that
    thread holds a lock that the handler would need.
    """

    def __init__(self, *, stays: bool = False) -> None:
        """Prepare the trap.

        If ``stays`` is true, Ctrl-Z does not stop this process, because the agents would take a stopped launcher for
        lost.
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
        """Return the number of the first signal received so far that asks the job to end, or 0 if there is none.

        Call it before ``forward``, whose thread then takes all signals.
        """
        try:
            numbers = self._reader.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        return next((number for number in numbers if number in _ENDING), 0)

    def forward(self, deliver: Callable[[int], None], say: Callable[[str], None] = lambda _: None) -> None:
        """Call ``deliver(number)`` for each signal from now on, and for those that arrived since the trap was entered.

        Call it once. ``say`` shows the user a line when Ctrl-Z was ignored.
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
