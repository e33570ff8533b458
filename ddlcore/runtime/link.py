"""The control thread: carries requests to the coordinator and its answers to the engine.

It never runs a collective and never waits for one, so that it answers whatever the engine is stuck in.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from ddlcore.errors import DdlInternalError, MismatchError, PeerLost
from ddlcore.messages import (
    Answer,
    Arranged,
    Batch,
    Drain,
    Failure,
    Farewell,
    Freeze,
    FromCoordinator,
    Lost,
    Refused,
    Resume,
    Standing,
    ToCoordinator,
    Welcome,
    Where,
)
from ddlcore.runtime.checks import describe
from ddlcore.runtime.engine import Engine, Todo
from ddlcore.runtime.inbox import Inbox
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.verdict import Verdict

__all__ = ["Channel", "Link"]

IDLE_S = 1.0


class Channel(Protocol):
    """What the control thread needs of a line to the coordinator; see ddlcore.control.channel."""

    def send(self, message: ToCoordinator) -> None: ...

    def receive(self, timeout_s: float) -> list[FromCoordinator]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Link:
    """Owns the channel from ``start`` to ``stop``. ``broken`` is told of ranks that are lost, once."""

    def __init__(
        self,
        channel: Channel,
        inbox: Inbox,
        engine: Engine,
        verdict: Verdict,
        broken: Callable[[Callable[[str], BaseException]], None],
        sets: ProcessSets,
        meter: Meter,
        stall_warning_s: float,
        rank: int,
        name: str,
    ) -> None:
        self._sets = sets
        self._meter = meter
        self._rank = rank
        self._channel = channel
        self._inbox = inbox
        self._engine = engine
        self._verdict = verdict
        self._broken = broken
        self._outbox: deque[ToCoordinator] = deque()
        self._stopping = False
        self._alarm = _Alarm(stall_warning_s)
        self._patience_s = min(IDLE_S, stall_warning_s / 2) if stall_warning_s > 0 else IDLE_S
        self.session = ""
        self.refusal = ""
        self.welcomed = threading.Event()  # Welcome, Refused or the end of the job
        self.parted = threading.Event()  # Farewell or the end of the job
        engine.say = self.say
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def say(self, message: ToCoordinator) -> None:
        """Sends ``message`` as soon as may be; from any thread."""
        self._outbox.append(message)
        self._channel.wake()

    def stop(self, timeout_s: float) -> None:
        """Sends what is left, then closes the channel."""
        self._stopping = True
        self._channel.wake()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        try:
            while True:
                stopping = self._stopping
                while self._outbox:
                    self._send(self._outbox.popleft())
                if stopping:
                    break
                stuck = self._inbox.stuck()
                if stuck is not None:
                    self._engine.leave(stuck, slow=True)
                alarm = self._alarm.look(self._inbox.standing, time.monotonic())
                if alarm is not None:
                    self._send(alarm)
                request = self._inbox.take_request()
                if request is not None:
                    self._send(request)
                for message in self._channel.receive(self._patience_s):
                    self._receive(message)
        except Exception as error:  # the coordinator is out of reach, or one of us is wrong: nothing can go on
            self._end(error)
        finally:
            self._channel.close()
            self.welcomed.set()
            self.parted.set()

    def _end(self, error: Exception) -> None:
        known = isinstance(error, DdlInternalError)
        text = str(error) if known else f"the control thread failed: {type(error).__name__}: {error}"

        def make(during: str) -> BaseException:
            failure = DdlInternalError(f"{text} (during {during})" if during else text)
            failure.__cause__ = error
            return failure

        self._broken(make)

    def _send(self, message: ToCoordinator) -> None:
        if isinstance(message, Standing):
            self._meter.stalls += 1
        else:
            self._meter.control += 1
        self._channel.send(message)

    def _receive(self, message: FromCoordinator) -> None:
        if isinstance(message, Where):
            self._meter.stalls += 1
            standing = self._inbox.standing()
            if standing is not None:
                self._send(standing)
            return
        self._meter.control += 1
        if isinstance(message, Answer):
            for item in message.items:
                self._item(item)
            self._inbox.answered(message.serial)
        elif isinstance(message, Freeze):
            frozen = self._inbox.freeze(message.epoch)
            if frozen is not None:
                self._send(frozen)
        elif isinstance(message, Drain):
            # What was decided leaves the inbox first: draining asks anew for all that is still in it.
            after = [self._todo(item) for item in message.items]
            self._engine.post(partial(self._engine.drain, message))
            for todo in after:
                if todo is not None:
                    self._engine.post(todo)
        elif isinstance(message, Lost):
            ranks, reason = message.ranks, message.reason
            self._broken(lambda during: PeerLost(ranks, reason, during))
            self.welcomed.set()
            self.parted.set()
        elif isinstance(message, Welcome):
            self.session = message.session
            self.welcomed.set()
        elif isinstance(message, Refused):
            self.refusal = message.text
            self.welcomed.set()
            self.parted.set()
        elif isinstance(message, Farewell):
            self.parted.set()

    def _item(self, item: Batch | Failure | Arranged | Resume) -> None:
        if isinstance(item, Batch) and self._inbox.fill(item):
            return
        todo = self._todo(item)
        if todo is not None:
            self._engine.post(todo)

    def _todo(self, item: Batch | Failure | Arranged | Resume) -> Todo | None:
        """What the engine is to do about it, in its turn."""
        if isinstance(item, Batch):
            return item, self._inbox.take(item.set_id, item.names)
        if isinstance(item, Resume):
            return lambda: self._engine.resume(item, self._sets.all(), self._rank)
        if isinstance(item, Failure):
            self._fail(item)
        else:
            self._inbox.learn(item)
        return None

    def _fail(self, failure: Failure) -> None:
        entries = self._inbox.take(failure.set_id, failure.names)
        error: BaseException
        if failure.error == "lost":
            error = PeerLost(failure.ranks, failure.text, describe(failure.names, failure.set_id))
        else:
            error = MismatchError(failure.text)
        self._engine.fail(entries, error)


class _Alarm:
    """Notices that this rank stands at one batch of its schedule, with tensors in it, for longer than ``after_s``; 0: never."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._look_s = 0.0  # when to look again: the control thread comes by more often
        self._at: tuple[int, int] | None = None  # (epoch, place), which never come again
        self._since_s = 0.0

    def look(self, standing: Callable[[], Standing | None], now_s: float) -> Standing | None:
        """The alarm, once a batch."""
        if self._after_s <= 0 or now_s < self._look_s:
            return None
        self._look_s = now_s + min(IDLE_S, self._after_s / 4)
        one = standing()
        waits = one is not None and (one.launched or len(one.missing) < len(one.names))
        at = (one.epoch, one.place) if one is not None and waits else None
        if at != self._at:
            self._at, self._since_s = at, now_s
        if one is None or at is None or now_s - self._since_s < self._after_s:
            return None
        self._since_s = float("inf")  # said
        return msgspec.structs.replace(one, alarm=True)
