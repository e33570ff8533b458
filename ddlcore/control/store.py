"""Implement the job's key-value store, except the transport of requests and replies.

``Shelf`` is the server's part: the values, and the ``get`` requests that wait for a value. ``JobStore`` is the client.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddlcore.contracts.store import Store
from ddlcore.errors import Closed, DdlInternalError, DeadlineExceeded, PeerLost
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.store import StoreAdd, StoreClock, StoreDelete, StoreGet, StoreReply, StoreRequest, StoreSet
from ddlcore.observe.clock import Reading, boot_id

ClientT = TypeVar("ClientT")  # the network's own identification of a caller

_ANSWER_S = 30.0  # a launcher that does not answer for so long counts as broken
_LATE_S = 5.0  # time after the timeout of a get during which its answer may still arrive

CLOSED = "closed"  # error with which a closed store answers on its own
_TIMEOUT, _LOST, _VALUE = "timeout", "lost: ", "value: "  # prefixes of StoreReply.error


@dataclass(frozen=True)
class _Waiting(Generic[ClientT]):
    client: ClientT
    rank: LaunchedRank
    serial: int
    deadline_s: float


class Shelf(Generic[ClientT]):
    """The values in the store of one job, and the ``get`` requests that wait for a value.

    A Shelf does no I/O: its methods return the replies to send, each together with the client that must get the reply.
    A waiting get fails when a rank is lost. Losses do not count if they happened before the waiting rank sent its last
    message Hello. A rank sends a Hello when it calls ``init``, and after a loss the remaining ranks may call ``init``
    again to train without the lost rank.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Waiting[ClientT]]] = {}
        self._lost: dict[LaunchedRank, str] = {}
        # By rank: losses that happened before its last Hello.
        self._known: dict[LaunchedRank, frozenset[LaunchedRank]] = {}
        self._boot = boot_id().encode()

    def handle(
        self, client: ClientT, rank: LaunchedRank, request: StoreRequest, now_s: float
    ) -> list[tuple[ClientT, StoreReply]]:
        serial = request.serial
        if isinstance(request, StoreGet):
            patience_s = request.timeout_s if request.timeout_s > 0.0 else 0.0  # 0 also for NaN
            return self._get(_Waiting(client, rank, serial, now_s + patience_s), request.key, now_s)
        if isinstance(request, StoreDelete):
            for key in [key for key in self._values if key.startswith(request.prefix)]:
                del self._values[key]
            return [(client, StoreReply(serial, b""))]
        if isinstance(request, StoreSet):
            return [(client, StoreReply(serial, b"")), *self._put(request.key, request.value)]
        if isinstance(request, StoreClock):
            return [(client, StoreReply(serial, b"%d %s" % (round(now_s * 1e9), self._boot)))]
        try:
            total = b"%d" % (int(self._values.get(request.key, b"0")) + request.amount)
        except ValueError:
            return [(client, StoreReply(serial, b"", f"{_VALUE}what stands under {request.key!r} is no whole number"))]
        return [(client, StoreReply(serial, total)), *self._put(request.key, total)]

    def hello(self, rank: LaunchedRank) -> None:
        """Record that ``rank`` calls ``init`` again. Earlier losses no longer make the gets of ``rank`` fail."""
        self._known[rank] = frozenset(self._lost)

    def lose(self, lost: Mapping[LaunchedRank, str]) -> list[tuple[ClientT, StoreReply]]:
        """Record which ranks are lost now, and return a reply with an error for each waiting get that must fail.

        ``lost`` has all lost ranks and the reason of each loss. A rank that was in ``lost`` at the last call but is not
        in it now has come back, for example because another process was started for this rank. A waiting get fails if a
        rank was lost after the last Hello of the rank that waits.
        """
        if lost.keys() == self._lost.keys():  # the usual case: called after every message
            return []
        back = self._lost.keys() - lost.keys()  # another process was started: its loss would be a new one
        if back:
            self._known = {rank: known - back for rank, known in self._known.items()}
        self._lost = dict(lost)
        return self._end(lambda waiting: self._loss(waiting.rank))

    def expire(self, now_s: float) -> list[tuple[ClientT, StoreReply]]:
        """End the waiting gets whose deadline has been reached at ``now_s``.

        Return a reply for each of them, which says that the get has timed out.
        """
        return self._end(lambda waiting: _TIMEOUT if waiting.deadline_s <= now_s else "")

    def deadline_s(self) -> float | None:
        """Return the time to call ``expire``, the earliest deadline of a waiting get. Return None if no get waits."""
        return min((waiting.deadline_s for queue in self._waiting.values() for waiting in queue), default=None)

    def _get(self, waiting: _Waiting[ClientT], key: str, now_s: float) -> list[tuple[ClientT, StoreReply]]:
        if key in self._values:
            return [(waiting.client, StoreReply(waiting.serial, self._values[key]))]
        error = self._loss(waiting.rank) or (_TIMEOUT if waiting.deadline_s <= now_s else "")
        if error:
            return [(waiting.client, StoreReply(waiting.serial, b"", error))]
        self._waiting.setdefault(key, []).append(waiting)
        return []

    def _put(self, key: str, value: bytes) -> list[tuple[ClientT, StoreReply]]:
        self._values[key] = value
        return [(waiting.client, StoreReply(waiting.serial, value)) for waiting in self._waiting.pop(key, ())]

    def _loss(self, rank: LaunchedRank) -> str:
        news = [other for other in self._lost if other not in self._known.get(rank, ())]
        return f"{_LOST}{','.join(map(str, news))}: {self._lost[news[0]]}" if news else ""

    def _end(self, error_of: Callable[[_Waiting[ClientT]], str]) -> list[tuple[ClientT, StoreReply]]:
        replies = []
        for key, queue in list(self._waiting.items()):
            for waiting in list(queue):
                error = error_of(waiting)
                if error:
                    queue.remove(waiting)
                    replies.append((waiting.client, StoreReply(waiting.serial, b"", error)))
            if not queue:
                del self._waiting[key]
        return replies


class JobStore(Store):
    """A rank's client of the job's store. Subclasses provide the transport of requests and replies.

    Any thread may call the methods, and a call does not block the calls of other threads.
    """

    def __init__(self) -> None:
        self._serials = itertools.count(1)

    def set(self, key: str, value: bytes) -> None:
        self._ask(StoreSet(next(self._serials), key, bytes(value)), _ANSWER_S, f"store.set({key!r})")

    def get(self, key: str, timeout_s: float) -> bytes:
        answer_s = max(timeout_s, 0.0) + _LATE_S
        return self._ask(StoreGet(next(self._serials), key, timeout_s), answer_s, f"store.get({key!r})", timeout_s)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(StoreAdd(next(self._serials), key, amount), _ANSWER_S, f"store.add({key!r})"))

    def delete(self, prefix: str) -> None:
        self._ask(StoreDelete(next(self._serials), prefix), _ANSWER_S, f"store.delete({prefix!r})")

    def clock(self) -> Reading:
        """Read the monotonic clock of the process that keeps the store's values, and return the Reading."""
        now_ns, _, boot = self._ask(StoreClock(next(self._serials)), _ANSWER_S, "store.clock()").decode().partition(" ")
        return Reading(int(now_ns), boot)

    @abstractmethod
    def close(self) -> None:
        """Close this client of the store. Calls in progress and later calls raise Closed.

        Any thread may call this, more than once.
        """

    @abstractmethod
    def _call(self, request: StoreRequest, answer_s: float) -> StoreReply:
        """Send ``request`` and return the reply that has the same serial number.

        Raises DeadlineExceeded if this reply does not arrive within ``answer_s`` seconds.
        """

    def _ask(self, request: StoreRequest, answer_s: float, call: str, timeout_s: float = 0.0) -> bytes:
        reply = self._call(request, answer_s)
        if not reply.error:
            return reply.value
        if reply.error == _TIMEOUT:
            raise DeadlineExceeded(f"{call}: no rank has set it within {timeout_s:g} s")
        if reply.error.startswith(_LOST):
            ranks, _, reason = reply.error[len(_LOST) :].partition(": ")
            raise PeerLost([int(rank) for rank in ranks.split(",")], reason, call)
        if reply.error.startswith(_VALUE):
            raise ValueError(f"{call}: {reply.error[len(_VALUE) :]}")
        if reply.error == CLOSED:
            raise Closed(f"{call}: the store of this rank was closed")
        raise DdlInternalError(f"{call}: {reply.error}")
