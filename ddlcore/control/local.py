"""Provide the control network within one process, for a world of one rank or for ranks that are threads.

This network uses no sockets and starts no threads.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from ddlcore.control.channel import Channel
from ddlcore.control.coordinator_protocol import CoordinatorProtocol
from ddlcore.control.store import CLOSED, JobStore, Shelf
from ddlcore.errors import Closed
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.store import StoreReply, StoreRequest
from ddlcore.messages.to_coordinator import Hello, ToCoordinator
from ddlcore.messages.to_rank import FromCoordinator, Outgoing

_TICK_S = 0.5  # how often the coordinator is asked what is overdue

_SLICE_S = 0.05  # a ``get`` notices its deadline at most so much too late

_Answer = queue.SimpleQueue  # a store call waits here for its only reply


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class LocalNetwork:
    """The control network of a world whose ``size`` ranks all run in this process, each in threads of its own.

    ``coordinator`` has no thread of its own. It runs in the threads that send messages to it, in one of them at a time.
    ``report`` is called with each line of text for the user.
    """

    def __init__(self, size: int, coordinator: CoordinatorProtocol, report: Callable[[str], None] = _to_stderr) -> None:
        self.size = size
        self._coordinator = coordinator
        self._report = report
        self._lock = threading.Lock()
        self._channels: dict[int, LocalChannel] = {}
        self._shelf: Shelf[_Answer[StoreReply]] = Shelf()
        self._tick_s = time.monotonic() + _TICK_S

    def channel(self, rank: LaunchedRank) -> LocalChannel:
        """Return a new channel of ``rank``. From now on, the coordinator's messages to ``rank`` go to this channel."""
        channel = LocalChannel(self, rank)
        with self._lock:
            self._channels[rank] = channel
        return channel

    def store(self, rank: LaunchedRank) -> LocalStore:
        return LocalStore(self, rank)

    def rank_ended(self, rank: LaunchedRank, reason: str) -> None:
        """Tell the coordinator that the thread of ``rank`` has ended, or must be treated as ended.

        ``reason`` says why, in words for the user. Any thread may call this.
        """
        with self._lock:
            self._tell(self._coordinator.rank_ended(rank, reason))

    def rank_started(self, rank: LaunchedRank, host: int = -1) -> None:
        """Tell the coordinator that a new thread now runs ``rank``. Any thread may call this.

        ``host`` is the index of the rank's host. -1 means the same host as before.
        """
        with self._lock:
            self._tell(self._coordinator.rank_started(rank, host))

    def dismiss(self, ranks: Collection[LaunchedRank], reason: str) -> None:
        """Tell the coordinator that ``ranks`` must leave the training. Any thread may call this.

        ``reason`` says why, in words for the user.
        """
        with self._lock:
            self._tell(self._coordinator.dismiss(ranks, reason))

    # --- for the channels and stores of this module

    def handle(self, rank: LaunchedRank, message: ToCoordinator) -> None:
        with self._lock:
            if isinstance(message, Hello):
                self._shelf.hello(rank)
            self._tell(self._coordinator.handle(rank, message))

    def ask(self, answer: _Answer[StoreReply], rank: LaunchedRank, request: StoreRequest) -> None:
        with self._lock:
            self._reply(self._shelf.handle(answer, rank, request, time.monotonic()))

    def expire(self) -> None:
        with self._lock:
            self._reply(self._shelf.expire(time.monotonic()))

    def tick(self) -> None:
        """Run the coordinator's periodic work (``overdue`` and ``due``) if the last run was at least 0.5 s ago.

        Threads that wait for messages call this, because the network has no thread of its own.
        """
        now_s = time.monotonic()
        if now_s < self._tick_s:
            return
        with self._lock:
            due = now_s >= self._tick_s
            texts = self._coordinator.overdue(now_s) if due else []
            self._tick_s = max(self._tick_s, now_s + _TICK_S)
            self._tell(self._coordinator.due())
        for text in texts:
            self._report(text)

    def _tell(self, outgoing: Outgoing[LaunchedRank]) -> None:
        for rank, message in outgoing:
            if rank in self._channels:
                self._channels[rank].deliver(message)
        self._reply(self._shelf.lose(self._coordinator.lost()))

    def _reply(self, replies: list[tuple[_Answer[StoreReply], StoreReply]]) -> None:
        for answer, reply in replies:
            answer.put(reply)


class LocalChannel(Channel):
    """The channel of a rank that runs in the same process as the coordinator.

    The coordinator puts its messages to the rank into a queue, and the rank's control thread takes them out.
    """

    def __init__(self, network: LocalNetwork, rank: LaunchedRank) -> None:
        self._network = network
        self._rank = rank
        # The lock of a Condition is reentrant, and this is needed: while this thread has the lock, a finalizer may run
        # in the same thread and call ``wake``.
        self._condition = threading.Condition()
        self._arrived: deque[FromCoordinator] = deque()
        self._woken = False
        self._closed = False

    def send(self, message: ToCoordinator) -> None:
        """Send ``message`` to the coordinator, which handles the message before this call returns.

        Raises Closed after ``close``. Unlike other channels, also raises DdlInternalError if the coordinator does not
        allow the message at this time.
        """
        self._check()
        self._network.handle(self._rank, message)

    def receive(self, timeout_s: float) -> list[FromCoordinator]:
        self._check()
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._condition:
                left_s = deadline_s - time.monotonic()
                if not (self._arrived or self._woken or left_s <= 0):
                    self._condition.wait(min(left_s, _TICK_S))
                if self._arrived or self._woken or left_s <= 0:
                    self._woken = False
                    arrived = list(self._arrived)
                    self._arrived.clear()
                    return arrived
            self._network.tick()

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self) -> None:
        self._closed = True

    def deliver(self, message: FromCoordinator) -> None:
        """Add ``message`` to the queue, and wake the thread that waits in ``receive``. Only the network calls this."""
        with self._condition:
            self._arrived.append(message)
            self._condition.notify()

    def _check(self) -> None:
        if self._closed:
            raise Closed(f"the control network of rank {self._rank} is closed")


class LocalStore(JobStore):
    """The client of the job's key-value store for a rank that runs in the same process as the store."""

    def __init__(self, network: LocalNetwork, rank: LaunchedRank) -> None:
        super().__init__()
        self._network = network
        self._rank = rank
        self._lock = threading.Lock()
        self._calls: dict[int, _Answer[StoreReply]] = {}  # calls in progress, by serial
        self._closed = False

    def _call(self, request: StoreRequest, answer_s: float) -> StoreReply:
        answer: _Answer[StoreReply] = _Answer()
        with self._lock:
            if self._closed:
                return StoreReply(request.serial, b"", CLOSED)
            self._calls[request.serial] = answer
        try:
            self._network.ask(answer, self._rank, request)
            while True:
                try:
                    return answer.get(timeout=_SLICE_S)
                except queue.Empty:
                    self._network.expire()
        finally:
            with self._lock:
                del self._calls[request.serial]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for serial, answer in self._calls.items():
                answer.put(StoreReply(serial, b"", CLOSED))
