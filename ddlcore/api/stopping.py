"""Stops a training at the same step on all ranks, after a signal to any rank or a call of ``request_stop``."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from ddlcore.api.world import current_job, elastic_member, job_of, present_job
from ddlcore.contracts.framework import JobService
from ddlcore.errors import InvalidArgument

__all__ = ["request_stop", "should_stop"]

log = logging.getLogger("ddl")


def should_stop(job: JobService | None = None) -> bool:
    """Return whether all ranks should save a checkpoint and end.

    A signal or a call of ``request_stop`` asks the ranks to do so. All ranks must call this function equally often, for
    example once after each step. Then the result becomes true on all ranks at the same call, and stays true. The call
    sends no message until a rank has asked for a stop. The first call in the main thread installs handlers for the
    signals in the setting ``stop_signals`` (by default SIGTERM and SIGUSR1). A signal that the process already handles
    or ignores is left as it is. If ranks have different numbers of batches, leave the training loop when the result is
    true, and call ``join`` before you save.

    Raises NotInitialized before ``init``. Raises the error of the job if the job ends while the ranks agree on the call
    at which they stop.
    """
    owner = job_of(job or current_job())
    _listener.listen(owner.settings.text("stop_signals"))
    if _listener.waiting:
        owner.stop_calls.wanted, _listener.waiting = _listener.waiting, ""
    return owner.stop_calls.called()


def request_stop(reason: str = "request_stop()", job: JobService | None = None) -> None:
    """Ask all ranks to stop: ``should_stop`` then becomes true on all ranks at the same call, as after a signal.

    It is enough that one rank calls this. A signal handler and any thread may call this. The call returns at once, and
    the request is sent within about one second. ``reason`` is a text that is shown to the user. Raises InvalidArgument
    if ``reason`` is empty.
    """
    if not isinstance(reason, str) or not reason:
        raise InvalidArgument(f"request_stop: the reason is a text that is not empty, not {reason!r}")
    job_of(job or current_job()).stop_calls.wanted = reason


class _Listener:
    """Listens to the signals that ask for a stop, in the process that has called ``should_stop``.

    In a process that was forked from that process, such a signal does not ask for a stop: it ends the forked process.
    """

    def __init__(self) -> None:
        self._pid = 0
        self.waiting = ""  # a request between two worlds of an elastic job: the next call of should_stop submits it

    def listen(self, names: str) -> None:
        """Install the handler for some signals, at the first call in the main thread of this process.

        Calls in other threads, and later calls in the main thread, have no effect. ``names``: the names of the signals,
        separated by commas. A signal that already has a handler, or that is ignored, is left as it is. Raises
        InvalidArgument if a name is not the name of a signal.
        """
        if self._pid == os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        for name in filter(None, (part.strip().upper() for part in names.split(","))):
            number = getattr(signal, name, None)
            if not isinstance(number, signal.Signals):
                raise InvalidArgument(f"stop_signals={names!r}: {name} is no signal's name; such as SIGTERM is")
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handle)
            else:
                log.debug("should_stop: %s has a handler already and does not ask for a stop", name)
        self._pid = os.getpid()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        job = present_job()
        # A forked DataLoader worker inherits this handler, but must end by SIGTERM. A rank whose job is over must end,
        # too: its launcher ends it by this signal, and the rank would make no further call that could return True.
        mine = os.getpid() == self._pid
        asks = f"{signal.Signals(number).name} on rank {job.rank}" if job is not None else ""
        # Between two worlds of an elastic job, a first signal is kept for the next world. A second signal ends the
        # process, because there may be no next world.
        if mine and job is not None and job.is_over and elastic_member() is not None and not self.waiting:
            self.waiting = asks
            return
        if not mine or job is None or job.is_over:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        job.stop_calls.wanted = asks


_listener = _Listener()
