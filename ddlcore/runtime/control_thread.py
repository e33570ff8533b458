"""The control thread: carries requests to the coordinator, and the coordinator's answers to the engine.

The control thread never runs a collective and never waits for a collective. So it can answer the coordinator even while
the engine waits for other ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from ddlcore.messages.elastic import CoordinatorLost
from ddlcore.messages.observing import (
    Alive,
    Busy,
    Differ,
    Digests,
    Explain,
    Notice,
    Observation,
    Probe,
    ReplayStatus,
    Sample,
    Settle,
    Settled,
    Show,
    Stack,
    Where,
)
from ddlcore.messages.to_coordinator import STOP, Leave, StopRequest, ToCoordinator
from ddlcore.messages.to_rank import (
    AgreedCall,
    Answer,
    CountCalls,
    Drain,
    Farewell,
    Freeze,
    FromCoordinator,
    Lost,
    Refused,
    Stalled,
    Welcome,
)
from ddlcore.observe.stacks import stack_of
from ddlcore.runtime.alarm import Alarm
from ddlcore.runtime.counted_calls import CountedCalls
from ddlcore.runtime.decisions import Decisions
from ddlcore.runtime.lookout import Lookout
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.patience import Patience
from ddlcore.runtime.standing import Standing
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.threads import OwnThread

log = logging.getLogger("ddl")
# How messages are counted: about operations that wait, about the rank's state, neither of these two; all others are
# control messages, of which a replayed step has none.
STALLS = (ReplayStatus, Busy, Alive, Stack, Where, Probe, Show)
PULSES = (Observation, Digests, Sample, Settle)
UNCOUNTED = (Notice, Explain, Settled)


class MessageChannel(Protocol):
    """Those methods of a connection to the coordinator that the control thread uses; see ddlcore.control.channel."""

    def send(self, message: ToCoordinator) -> None: ...

    def receive(self, timeout_s: float) -> list[FromCoordinator]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Informed(Protocol):
    """The rank, as far as the control thread asks about it."""

    rank: int

    def explain(self, asked: Explain) -> Sample:
        """Return the values that the coordinator asks for."""

    def dump_flight(self, reason: str, text: str) -> object:
        """Save a record of what this rank did last, at a stall or when a signal asks for it."""


class ControlThread:
    """The thread that exchanges messages with the coordinator. Only this thread uses the channel from ``start`` on."""

    def __init__(
        self,
        channel: MessageChannel,
        outbox: Outbox,
        tensor_queue: TensorQueue,
        lookout: Lookout,
        decisions: Decisions,
        standing: Standing,
        counted: Mapping[str, CountedCalls],
        informed: Informed,
        meter: Meter,
        patience: Patience,
    ) -> None:
        """Create the thread that carries messages between the coordinator and the parts of this rank.

        ``channel`` is the connection to the coordinator. ``counted`` has a counter for each kind of call at which all
        ranks may act together.
        """
        self._channel = channel
        self._outbox = outbox
        self._tensor_queue = tensor_queue
        self._lookout = lookout
        self._decisions = decisions
        self._standing = standing
        self._counted = counted
        self._stop_calls = counted[STOP]
        self._informed = informed
        self._meter = meter
        self.user_thread = threading.get_ident()  # the thread whose stack is reported
        self.dump_wanted = False  # set by a signal handler, which must not take a lock
        self._stopping = False
        self._alarm = Alarm(patience)
        self._patience_s = self._alarm.interval_s
        # The function that handles each kind of message. If it returns a message, that is sent to the coordinator.
        self._deeds: Mapping[type[FromCoordinator], Callable[[Any], ToCoordinator | None]] = {
            Answer: decisions.answer,
            Freeze: decisions.freeze,
            Drain: decisions.drain,
            Welcome: standing.welcome,
            Refused: standing.refused,
            Farewell: standing.farewell,
            Lost: standing.lost,
            CoordinatorLost: standing.coordinator_lost,
            Stalled: standing.stalled,
            Differ: standing.differ,
            Settled: standing.settle,
            CountCalls: lambda message: counted[message.kind].count(),
            AgreedCall: lambda message: counted[message.kind].agreed(message),
            Explain: informed.explain,
            Where: lambda message: lookout.replay_status(),
            Probe: lambda message: Alive(lookout.describe_state()),
            Show: lambda message: self._show(),
            Notice: lambda message: log.warning("%s", message.text),
        }
        self._thread = OwnThread(target=self._loop, name=f"ddl-control-{informed.rank}")

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Have the thread send the remaining messages, close the channel and end.

        Wait for the end of the thread, at most ``timeout_s`` seconds.
        """
        self._stopping = True
        self._channel.wake()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        self._lookout.begin()
        try:
            while True:
                # Read before the outbox is emptied: a message that was put there before ``stop`` set the flag is then
                # still sent. If the flag were read afterwards, a last message such as Done could be lost.
                stopping = self._stopping
                for message in self._outbox.taken():
                    self._send(message)
                if stopping:
                    break
                if self.dump_wanted:
                    self.dump_wanted = False
                    self._informed.dump_flight("signal", "somebody asked by a signal")
                wanted = self._stop_calls.take_wanted()
                if wanted:
                    self._send(StopRequest(wanted))
                # Everything below runs at least once a second, even without a message. So this also finishes calls that
                # a signal handler interrupted, if no other thread takes the tensor queue's lock in the meantime.
                self._lookout.look()
                for alarm in self._alarm.look(self._lookout.doing, time.monotonic()):
                    if isinstance(alarm, Busy) or alarm.alarm:
                        self._informed.dump_flight("stall", "this rank stands at one bucket")
                    self._send(alarm)
                request = self._tensor_queue.take_request()
                if request is not None:
                    self._send(request)
                pause = self._tensor_queue.take_pause()
                if pause is not None:
                    self._send(pause)
                for received in self._channel.receive(self._patience_s):
                    self._receive(received)
        except Exception as error:
            self._standing.unreachable(error)
        finally:
            self._channel.close()
            self._standing.over()

    def _send(self, message: ToCoordinator) -> None:
        if isinstance(message, Leave):
            message = msgspec.structs.replace(message, replay_status=self._alarm.since(self._lookout.replay_status()))
        if isinstance(message, STALLS):
            self._meter.stalls += 1
        elif isinstance(message, PULSES):
            self._meter.pulses += 1
        else:
            self._meter.control += 1
        self._channel.send(message)

    def _receive(self, message: FromCoordinator) -> None:
        if isinstance(message, STALLS):
            self._meter.stalls += 1
        elif not isinstance(message, UNCOUNTED):
            self._meter.control += 1
        deed = self._deeds.get(type(message))
        reply = deed(message) if deed is not None else None
        if reply is not None:
            self._send(reply)

    def _show(self) -> Stack:
        self._informed.dump_flight("stall", "other ranks wait for this one")
        return Stack(stack_of(self.user_thread))
