"""Stops a training at the same step on all ranks, after a signal to any of them or a call of ``request_stop``."""

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
    """Return whether all ranks should save a checkpoint and end, because of a signal or of ``request_stop``.

    All ranks must call this equally often, for example once after each step; it then becomes true on all of them at the
    same call, and stays true. It sends no message unless somebody asks for a stop. The first call in the main thread
    makes this process listen to the signals of the setting ``stop_signals`` (SIGTERM and SIGUSR1), unless it handles
    them already. Where ranks have different numbers of batches, leave the loop if it is true, and call ``join`` before
    you save.

    Raises NotInitialized before ``init``, and the error of the job if it ends while the ranks agree on the step.
    """
    owner = job_of(job or current_job())
    _listener.listen(owner.settings.text("stop_signals"))
    if _listener.waiting:
        owner.stop_calls.wanted, _listener.waiting = _listener.waiting, ""
    return owner.stop_calls.next_is_agreed()


def request_stop(reason: str = "request_stop()", job: JobService | None = None) -> None:
    """Ask all ranks to stop, as a signal does: ``should_stop`` becomes true on all of them at the same call.

    One rank is enough. A signal handler and any thread may call this; it returns at once, and the request is sent
    within about a second. ``reason`` is shown to the user.
    """
    if not isinstance(reason, str) or not reason:
        raise InvalidArgument(f"request_stop: the reason is a text that is not empty, not {reason!r}")
    job_of(job or current_job()).stop_calls.wanted = reason


class _Listener:
    """Listens to the signals that ask for a stop, in the process that called ``should_stop`` first."""

    def __init__(self) -> None:
        self._pid = 0
        self.waiting = ""  # a request that came between two worlds of an elastic job, for the next call of should_stop

    def listen(self, names: str) -> None:
        """Install the handler for the signals ``names``, separated by commas, at the first call in the main thread.

        A signal that has a handler already, or that is ignored, stays as it is. Raises InvalidArgument for a name of no
        signal.
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
        # A DataLoader worker that was forked inherits this handler, and must end by SIGTERM. So must a rank whose job is
        # over: its launcher ends it by this signal, and no further call would come that could return True.
        mine = os.getpid() == self._pid
        asks = f"{signal.Signals(number).name} on rank {job.rank}" if job is not None else ""
        # Between two worlds of an elastic job, a first signal is kept for the next world. A second one ends the process,
        # as no next world may come.
        if mine and job is not None and job.is_over and elastic_member() is not None and not self.waiting:
            self.waiting = asks
            return
        if not mine or job is None or job.is_over:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        job.stop_calls.wanted = asks


_listener = _Listener()
