"""The messages of the coordinator to a rank. Buckets and schedules are parts of them."""

from __future__ import annotations

import msgspec

from ddlcore.messages.elastic import Complete, CoordinatorLost, Dismissed, NextWorld, WorldReport
from ddlcore.messages.observing import Differ, Explain, Notice, Probe, Settled, Show, Where
from ddlcore.messages.ranks import AnyRank, LaunchedRank, WorldRank
from ddlcore.messages.to_coordinator import Arrive
from ddlcore.types import Kind


class Arrivals(msgspec.Struct, frozen=True, array_like=True, tag="arrivals"):
    """The answer to Arrive. ``arrived`` contains those of the requested ranks that have arrived.

    ``gave_up_s`` is 0 if all requested ranks have arrived. Otherwise a rank has given up waiting, and ``gave_up_s`` is
    how long that rank has waited, in seconds. Then the coordinator sends this answer to all ranks that wait for the
    same ranks, and they give up, too. So all of them report the ranks that have not arrived. Without this, the rank
    that gave up would end, and the others would report that rank as the cause.
    """

    arrived: tuple[tuple[LaunchedRank, Arrive], ...]
    gave_up_s: float = 0.0


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The message to each rank that the world begins, because all of its ranks have arrived.

    ``report``: None if the job is not elastic.
    """

    session: str
    report: WorldReport | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Tells each rank that a world cannot begin. ``text`` says why.

    ``late``: some ranks have not called ``init`` within ``start_timeout_s``, so a rank that waited for them has given
    up. Then all ranks that wait for the same world get this message and give up, too. Otherwise each of these ranks
    would soon be informed that the rank that gave up has ended, and would report that rank as the cause.
    """

    text: str
    late: bool = False


class Bucket(msgspec.Struct, frozen=True, array_like=True, tag="bucket"):
    """A bucket, which the ranks must run as one collective.

    ``index`` is the position of this bucket in the order of all buckets of all process sets.
    """

    index: int
    set_id: int
    kind: Kind
    names: tuple[str, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...] = ()  # ragged kinds: [name][member] = rows of that member
    digests: tuple[tuple[bytes, ...], ...] = ()  # object collectives: [name][member]
    specs: tuple[bytes, ...] = ()  # only if a member has joined: that member needs them to take part with zeros
    result: int = -1  # ADD_SET: id of the new set; JOIN: the last rank that joined
    compressor: str = ""  # compressor of the bucket, if the compressor of its specs is BY_SETTING
    contributors: int = 0  # by how many members an average divides, if not by all of them, as some have joined


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Tells the ranks that the collectives with these names will not run.

    ``error`` is "mismatch" if the ranks requested different operations under one name, or "lost" if ``ranks`` have left
    or died. For a mismatch, ``kinds`` are the names of the different operations, and ``parts`` are the different values
    of ``Spec.part_of``.
    """

    set_id: int
    names: tuple[str, ...]
    error: str
    text: str
    ranks: tuple[WorldRank, ...] = ()
    kinds: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """One bucket of a schedule.

    If ``negotiated`` is true, only the place of the bucket in the schedule is fixed: the ranks ask the coordinator
    about this bucket in every step, see ``Spec.is_negotiated``.
    """

    set_id: int
    kind: Kind
    names: tuple[str, ...]  # "" for calls without a name, which are recognized by their specs
    specs: tuple[bytes, ...]
    negotiated: bool = False
    compressor: str = ""  # compressor of the bucket, if the compressor of its specs is BY_SETTING
    commit: bool = False  # a set's last device bucket in a segment: the hosts then confirm that all launched the bucket


class Arranged(msgspec.Struct, frozen=True, array_like=True, tag="arranged"):
    """A schedule: the buckets of one period, in the order in which the ranks launch them.

    The coordinator sends each schedule only once. Later messages refer to it by the number ``schedule``.
    """

    schedule: int
    digest: bytes
    buckets: tuple[Planned, ...]


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """The command to replay the schedule number ``schedule`` from now on.

    A place is a number that counts the buckets through all periods: place = number of the period * number of buckets +
    position in the schedule. The first bucket to launch is the one at place ``start``. ``after`` contains, for each
    process set, the pair (id of the set, last place that has already run).
    """

    epoch: int
    schedule: int
    start: int
    after: tuple[tuple[int, int], ...] = ()
    until: int = -1  # the end of a period: launch nothing from this place on, but send Paused; -1: no limit


class Adjust(msgspec.Struct, frozen=True, array_like=True, tag="adjust"):
    """The command to use new values of some settings from now on, on every rank.

    Each rank closes the communicators that depend on these settings and opens them again.
    """

    values: tuple[tuple[str, str | int | float | bool], ...]


class Freeze(msgspec.Struct, frozen=True, array_like=True, tag="freeze"):
    """The command to a rank to launch no further bucket of the schedule, and to answer with Frozen."""

    epoch: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """The command to run the buckets that any rank has launched, so that all ranks leave replay.

    ``highest`` and ``lowest`` contain, for each process set, the pair (id of the set, place of a bucket); see Resume.
    In each process set, the rank runs all buckets up to the place in ``highest``. The results of buckets up to the
    place in ``lowest`` are valid; the buckets after that place are void.
    """

    epoch: int
    highest: tuple[tuple[int, int], ...]  # (set id, place)
    lowest: tuple[tuple[int, int], ...]
    items: tuple[Bucket | Failure | Arranged | Resume | Adjust, ...] = ()  # what to do after the drain; (): negotiate


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Buckets and other decisions of the coordinator, in the order in which they must be carried out.

    ``serial`` is the serial of the Request that this message answers, or 0 if this message answers no Request.
    """

    epoch: int
    serial: int
    items: tuple[Bucket | Failure | Arranged | Resume | Adjust, ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """A message to the remaining ranks of a world: the ranks in ``ranks`` have died.

    Every collective that needs one of the dead ranks has failed.
    """

    ranks: tuple[WorldRank, ...]
    reason: str


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """The answer to Bye. After this message, the coordinator sends the rank no more buckets."""


class Stalled(msgspec.Struct, frozen=True, array_like=True, tag="stalled"):
    """Tells the ranks that the job ends because of a stall.

    ``text`` names the operations that wait, and the ranks that these operations wait for.
    """

    text: str


class CountCalls(msgspec.Struct, frozen=True, array_like=True, tag="count_calls"):
    """Asks a rank how many calls of ``kind`` it has made. The rank answers with CallCount.

    ``kind`` is STOP for calls of ``should_stop()``, or COMMIT for calls of ``commit()`` of an elastic state.
    """

    kind: str


class AgreedCall(msgspec.Struct, frozen=True, array_like=True, tag="agreed_call"):
    """Tells the ranks at which call of ``should_stop()`` or ``commit()`` they all act: stop, or leave the world.

    Each rank counts its calls of ``kind`` (``should_stop()`` or ``commit()``) from 0 again after each return from
    ``join()``. The ranks act at the call number ``call`` after the return number ``joins`` from ``join()``, and at each
    later call. No rank has made that call yet. ``reason`` is the text of the first request.
    """

    kind: str
    joins: int
    call: int
    reason: str


FromCoordinator = (
    Differ
    | Explain
    | Notice
    | Settled
    | Arrivals
    | Where
    | Probe
    | Show
    | Stalled
    | CountCalls
    | AgreedCall
    | NextWorld
    | Complete
    | Dismissed
    | CoordinatorLost
    | Freeze
    | Drain
    | Welcome
    | Refused
    | Answer
    | Lost
    | Farewell
)

# Pairs of a message and the rank that must receive it, in the order in which they are sent.
Outgoing = list[tuple[AnyRank, FromCoordinator]]
