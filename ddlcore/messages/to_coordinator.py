"""The messages of a rank to the coordinator."""

from __future__ import annotations

import msgspec

from ddlcore.messages.elastic import Finished, Register
from ddlcore.messages.observing import Alive, Busy, Digests, Observation, ReplayStatus, Sample, Settle, Stack
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import Ask

STOP, COMMIT = "stop", "commit"  # kinds of calls that all ranks make equally often, see CountCalls


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The message of a rank that enters ``init``.

    ``ranks`` is the world that it asks for. ``ordinal`` counts how many times this rank has asked for that world. In an
    elastic job, ``ranks`` is empty: it stands for the members of the world whose generation is ``ordinal``. There may be
    thousands of them, and as many ranks that would name them all.
    """

    rank: LaunchedRank
    ranks: tuple[LaunchedRank, ...]
    ordinal: int
    protocol: int
    version: str
    fusion_bytes: int  # only the value of the world's rank 0 is used
    pid: int = 0
    first_bucket_bytes: int = 0  # only the value of the world's rank 0 is used
    overlap: bool = True  # only the value of the world's rank 0 is used
    join_average: str = "contributors"  # only the value of the world's rank 0 is used
    stall_shutdown_s: float = 0.0  # only the value of the world's rank 0 is used, unless the launcher has its own


class Arrive(msgspec.Struct, frozen=True, array_like=True, tag="arrive"):
    """The registration of a rank that another launcher has started.

    The rank sends this message to the coordinator before its first Hello. If ``patient`` is true, the coordinator
    answers when all of ``ranks`` have arrived. If ``patient`` is false, the sender gives up waiting: the coordinator
    answers at once, with those ranks that have arrived so far.
    """

    token: str  # random, one for each process: if an equal rank has another token, it belongs to another launch
    ranks: tuple[LaunchedRank, ...]  # ranks of the launch for which the sender waits
    host: str  # equal for two ranks if and only if they are on one host
    kin: str  # equal for ranks that see each other's process ids
    pid: int
    address: str = ""  # the rank's own address on the route to the coordinator
    via: str = ""  # the coordinator's address on that route
    ports: tuple[int, ...] = ()  # two ports that are free on the rank's host
    patient: bool = True
    timeout_s: float = 0.0  # if not ``patient``: how long this rank has waited


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """The requests for all tensors that have become ready on a rank since the last Request of that rank.

    A rank has at most one Request that the coordinator has not answered.
    """

    epoch: int
    serial: int
    asks: tuple[Ask, ...]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The message of a rank that leaves: by ``shutdown()``, at the end of its script, or because of an exception.

    ``broken``: the rank's transport has failed, or the rank cannot go on, so the rank will not run buckets that the
    coordinator has already announced. ``waited_s``: if the rank leaves ``init`` because other ranks have not called
    ``init``, how long the rank has waited, in seconds; otherwise 0.
    """

    reason: str
    broken: bool = False
    waited_s: float = 0.0


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The last message of a rank, which the rank sends after it has received Farewell.

    The rank has run all announced buckets. So the end of its process is no failure from now on.
    """


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The request of a rank to leave replay, because the submitted operations do not fit the schedule.

    ``slow``: the rank has launched no bucket for long, and only suspects that the operations do not fit. They may still
    fit.
    """

    epoch: int
    reason: str
    slow: bool = False
    replay_status: ReplayStatus | None = None  # where the rank is, and since when


class Frozen(msgspec.Struct, frozen=True, array_like=True, tag="frozen"):
    """The answer to Freeze: the rank launches no further bucket.

    ``launched`` contains the last place that the rank has launched in each process set.
    """

    epoch: int
    launched: tuple[tuple[int, int], ...]  # (set id, last launched place); place -1: none was launched


class Paused(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """Reports that a rank has launched all buckets before the place ``Resume.until``.

    A rank sends this message only while a search for better settings runs. The rank launches no more buckets in this
    epoch. ``periods_ns``: the duration in nanoseconds of each period (one run of the whole schedule), without the first
    period after the Resume.
    """

    epoch: int
    periods_ns: tuple[int, ...]


class StopRequest(msgspec.Struct, frozen=True, array_like=True, tag="stop_request"):
    """Asks that all ranks stop at the same call of ``should_stop()``. Any rank may send this message.

    ``reason`` is a text for the user.
    """

    reason: str


class CallCount(msgspec.Struct, frozen=True, array_like=True, tag="call_count"):
    """The answer to CountCalls: how many calls of ``kind`` the rank has made.

    ``joins`` is how often this rank has returned from ``join()``. ``calls`` is how many calls of ``kind`` the rank has
    made since it last returned from ``join()``. After this answer, the rank makes no further call of ``kind`` until it
    has received AgreedCall.
    """

    kind: str
    joins: int
    calls: int


ToCoordinator = (
    Observation
    | Digests
    | Sample
    | Settle
    | Arrive
    | ReplayStatus
    | Busy
    | Alive
    | Stack
    | StopRequest
    | CallCount
    | Register
    | Finished
    | Leave
    | Frozen
    | Paused
    | Hello
    | Request
    | Bye
    | Done
)
