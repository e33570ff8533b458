"""Define the records of the control network.

These are the messages that ranks send to the coordinator and to the store, and the replies to them. The records are
plain data, which msgspec encodes. If a record cannot be decoded, an error is raised that names the sender.
"""

from __future__ import annotations

from math import prod
from typing import Any, TypeVar

import msgspec

from ddlcore.types import CPU, DType, Kind, ReduceOp

PROTOCOL = 7  # version of the protocol; ranks and coordinator must have the same
STOP, COMMIT = "stop", "commit"  # kinds of calls that all ranks make equally often, see CountCalls
BY_SETTING = "setting"  # value of Spec.compressor: the job's setting decides how the tensor is compressed
# Values of Spec.part_of: the ranks average by weights, whose sum they reduce beside the tensor, or by shares of 1.
BY_WEIGHT, BY_SHARE = "an average by weights", "an average by shares"


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """The description of an operation that a rank requests under one name. All ranks must send an equal description."""

    kind: Kind
    dtype: DType = DType.U8
    shape: tuple[int, ...] = ()  # for ragged kinds without the first dimension
    op: ReduceOp = ReduceOp.Sum
    root: int = -1  # world rank of the source of a broadcast
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    strides: tuple[int, ...] | None = None
    compressor: str = "none"  # BY_SETTING: see ``compressor_by``
    group: int = 0  # number of tensors in the grouped call, whose name is the tensor's up to the last "["
    ranks: tuple[int, ...] | None = None  # for ADD_SET the members; for REMOVE_SET (set id,)
    part_of: str = ""  # caller's text that says of what the tensor is a part; must be equal on all ranks
    is_object: bool = False  # the bytes of an object, whose digest is announced over the control network

    @property
    def is_negotiated(self) -> bool:
        """Whether the ranks must ask the coordinator about this operation in every step, even in replay.

        There are two reasons to ask. For an object, the coordinator sends its digest to the receivers. For a tensor of
        a ragged kind (allgather, alltoall) on a device, the coordinator sends the number of rows of each rank, because
        memory for the result is allocated before the device's queue reaches the collective. For a tensor in host
        memory, the ranks exchange the numbers of rows by the transport instead.
        """
        return self.kind.is_ragged and (self.is_object or self.device != CPU.kind)

    def nbytes(self, rows: tuple[int, ...] = ()) -> int:
        """Return the size of the tensor in bytes.

        ``rows``: for ragged kinds (allgather, alltoall), the number of rows from each member, because a spec of a
        ragged kind does not contain the first dimension. For other kinds, ``rows`` is not used.
        """
        return prod(self.shape) * self.dtype.itemsize * (sum(rows) if self.kind.is_ragged else 1)

    def compressor_by(self, setting: str) -> str:
        """Return the name of the compressor for this tensor. ``setting``: the compressor that the job's settings name.

        If this spec names a compressor, return that compressor. ``compressor`` is BY_SETTING for gradients for which
        the user has named no compressor. In this case, return ``setting`` for a sum or an average of float32, and
        "none" for any other operation.
        """
        if self.compressor != BY_SETTING:
            return self.compressor
        sums = self.kind is Kind.ALLREDUCE and self.op in (ReduceOp.Sum, ReduceOp.Average)
        return setting if sums and self.dtype is DType.F32 else "none"


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The request of one rank to reduce or send one tensor, which is ready on that rank."""

    set_id: int
    name: str
    spec: bytes  # an encoded Spec: the coordinator compares bytes, and decodes each different value once
    rows: tuple[int, ...] = ()  # allgather: (rows,); alltoall: rows to each member; other kinds: ()
    stamp: int = -1  # index of the last bucket whose completion the user's code has seen
    digest: bytes = b""  # digest of an object's bytes: receivers accept only bytes that match it


# --- rank to coordinator


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The message of a rank that enters ``init``.

    ``ranks`` is the world that it asks for. ``ordinal`` counts how many times this rank has asked for that world. In an
    elastic job, ``ranks`` is empty: it stands for the members of the world whose generation is ``ordinal``. There may be
    thousands of them, and as many ranks that would name them all.
    """

    rank: int  # world rank in the launch
    ranks: tuple[int, ...]
    ordinal: int
    protocol: int
    version: str
    fusion_bytes: int  # only the value of the world's rank 0 is used
    pid: int = 0
    first_bucket_bytes: int = 0  # only the value of the world's rank 0 is used
    overlap: bool = True  # only the value of the world's rank 0 is used
    join_average: str = "contributors"  # only the value of the world's rank 0 is used


class Arrive(msgspec.Struct, frozen=True, array_like=True, tag="arrive"):
    """The registration of a rank that another launcher has started.

    The rank sends this message to the coordinator before its first Hello. If ``patient`` is true, the coordinator
    answers when all of ``ranks`` have arrived. If ``patient`` is false, the sender gives up waiting: the coordinator
    answers at once, with those ranks that have arrived so far.
    """

    token: str  # random, one for each process: if an equal rank has another token, it belongs to another launch
    ranks: tuple[int, ...]  # ranks of the launch for which the sender waits
    host: str  # equal for two ranks if and only if they are on one host
    kin: str  # equal for ranks that see each other's process ids
    pid: int
    address: str = ""  # the rank's own address on the route to the coordinator
    via: str = ""  # the coordinator's address on that route
    ports: tuple[int, ...] = ()  # two ports that are free on the rank's host
    patient: bool = True
    timeout_s: float = 0.0  # if not ``patient``: how long this rank has waited


class Arrivals(msgspec.Struct, frozen=True, array_like=True, tag="arrivals"):
    """The answer to Arrive. ``arrived`` contains those of the requested ranks that have arrived.

    ``gave_up_s`` is 0 if all requested ranks have arrived. Otherwise a rank has given up waiting, and ``gave_up_s`` is
    how long that rank has waited, in seconds. Then the coordinator sends this answer to all ranks that wait for the
    same ranks, and they give up, too. So all of them report the ranks that have not arrived. Without this, the rank
    that gave up would end, and the others would report that rank as the cause.
    """

    arrived: tuple[tuple[int, Arrive], ...]
    gave_up_s: float = 0.0


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """The requests for all tensors that have become ready on a rank since the last Request of that rank.

    A rank has at most one Request that the coordinator has not answered.
    """

    epoch: int
    serial: int
    asks: tuple[Ask, ...]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The message of a rank that leaves: by ``shutdown()``, at the end of its script, or because of an exception.

    ``broken``: the rank's transport has failed, so the rank will not run buckets that the coordinator has already
    announced. ``waited_s``: if the rank leaves ``init`` because other ranks have not called ``init``, how long the rank
    has waited, in seconds; otherwise 0.
    """

    reason: str
    broken: bool = False
    waited_s: float = 0.0


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The last message of a rank, which the rank sends after it has received Farewell.

    The rank has run all announced buckets. So the end of its process is no failure from now on.
    """


class ReplayStatus(msgspec.Struct, frozen=True, array_like=True, tag="replay_status"):
    """Reports which bucket of the schedule a rank has reached in replay; not counted as a control message.

    ``place`` is the number of that bucket, see Resume. If ``launched`` is true, the rank has launched the bucket and
    waits for the other ranks. If ``launched`` is false, the bucket is the next one that the rank will launch, and
    ``missing`` are the names of those tensors of the bucket that were not yet submitted. A rank sends this message in
    three cases: as the answer to Where; with ``alarm`` if the rank has been at one bucket for long; and with ``moved``
    when the rank has gone on after an alarm.
    """

    epoch: int
    place: int
    launched: bool
    set_id: int
    names: tuple[str, ...]  # names of the bucket's tensors
    missing: tuple[str, ...] = ()
    alarm: bool = False
    moved: bool = False  # the rank has gone on since its alarm
    waits_s: float = 0.0  # how long the rank has been at this bucket


class Busy(msgspec.Struct, frozen=True, array_like=True, tag="busy"):
    """Reports that a rank's engine has been busy with one piece of work for long; not counted as a control message.

    The work is a negotiated bucket, a drain, or another action of the engine. The fields ``what`` and ``index`` of the
    same work are equal on all ranks. ``over``: this message says that the work, which the rank has reported before, has
    now ended.
    """

    what: str  # description, such as "allreduce 'x'" or "leaving replay (Drain of epoch 3)"
    index: int  # index of a bucket; -1 for any other work
    set_id: int  # process set whose members take part
    names: tuple[str, ...]  # names of the bucket's tensors
    waits_s: float = 0.0
    over: bool = False
    has_deadline: bool = False  # the work has its own time limit: it is no stall as long as all ranks answer


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The answer to Probe: a text that says what this rank is doing; not counted as a control message."""

    text: str


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


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """The traffic of one network interface of a host: the bytes of all programs since the host was started."""

    name: str
    received_bytes: int
    sent_bytes: int
    bits_per_s: float = 0.0  # speed of the link; 0: unknown


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """The part of a Pulse that describes a rank's present operations and how the rank spends its time.

    A rank sends this part only if the launcher serves a live page. Counts and times are totals since ``init``.
    """

    doing: str  # a sentence that says what the rank is doing
    waits_s: float = 0.0  # for at least so long no operation has ended although some are in flight; 0: none in flight
    in_flight: tuple[tuple[str, tuple[int, ...]], ...] = ()  # the first operations by name: name, ranks; (): all ranks
    pending: int = 0  # how many operations are in flight
    input_s: float = 0.0  # time for which the main thread has waited for input
    sampled_s: float = 0.0  # time for which it is known whether the main thread waited for input
    transport_s: float = 0.0
    nbytes: int = 0  # bytes of this rank's tensors in delivered buckets
    route: str = ""  # the transport of process set 0
    traffic: tuple[Traffic, ...] = ()  # only from the first rank of each host, if there are several hosts


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """The load and progress of a rank; not counted as a control message.

    A rank sends this message every ``pulse_s`` seconds if that setting is not 0. Counts and times are totals since
    ``init``.
    """

    at_s: float  # time by the rank's own monotonic clock
    steps: int
    user_s: float  # time that the user's threads have spent in ``wait``
    cpu_s: float
    resident_bytes: int
    gpu_share: float = -1.0  # utilization of the rank's GPU when it was last used, 0 … 1; below 0: there is no GPU
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0
    activity: Activity | None = None


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """A record of the lines of code where a rank's main thread spends its time; not counted as a control message.

    A rank sends this message only if the launcher asks for it.
    """

    steps: int  # number of steps that were sampled
    seconds: float  # duration of these steps
    input_s: float  # part of ``seconds``: time spent waiting for the next item of the loop's iterable
    loop: str  # the training loop that the sampler has found
    lines: tuple[tuple[str, str, float, float], ...]  # file and line, text, seconds, input part of these


class Digests(msgspec.Struct, frozen=True, array_like=True, tag="digests"):
    """The digests of a rank's copies of the parameters after a step; not counted as a control message.

    The coordinator compares the digests of all ranks; no rank waits for the result. ``label`` names the optimizer. The
    label is the same on every member of the process set ``set_id``. ``tensors`` contains a description of each
    parameter, in the order of the parameters, and ``described`` is a digest of these descriptions. ``tensors`` is empty
    if this rank has sent the same descriptions in an earlier message.
    """

    set_id: int
    label: str
    step: int
    described: bytes  # digest of the parameters' names, shapes and types
    digests: bytes  # 8 bytes for each parameter
    fatal: bool  # a difference ends the job; otherwise it is only a warning
    advice: str = ""  # what the user should do about a difference, as the framework's plugin says it
    tensors: tuple[str, ...] = ()


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """The answer to Explain: the first elements of the requested tensor.

    ``data`` is empty if the tensor has changed since the rank sent the digest, or if the rank cannot read the tensor.
    """

    dtype: str = ""
    data: bytes = b""


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """Asks the coordinator to answer when the digests of this rank have been compared or can no longer be compared.

    The answer is Settled. A rank sends this message before it leaves, and waits for the answer.
    """


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


Process = tuple[int, int]  # a process of an elastic job: its place, and the number of processes there before it
Ballot = tuple[int, int]  # a world of an elastic job: its generation, and the number of the coordinator that opened it


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """Asks for membership in the next world of an elastic job. A process sends this message when it is in no world.

    The answer is ``World``, ``Complete``, ``Dismissed`` or ``Refused``. The answer may come only when the other
    processes have finished their training.
    """

    protocol: int
    version: str
    generation: int  # of the newest world of which this process was a member; 0: of none
    steps: int  # how many steps its state contains; -1: it has no state yet
    reason: str  # why it has left that world; "" at an agreed call
    again: int = 0  # how many steps after ``steps`` it had computed, wholly or in part, and has given up
    effective: Ballot = (0, 0)  # the newest world in which all members have taken over the state; (0, 0): none


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """Reports that all members of a world have reached the end of the training. Any member may send this."""

    generation: int


class Stack(msgspec.Struct, frozen=True, array_like=True, tag="stack"):
    """The answer to Show: the Python stack of the user's thread on this rank; not counted as a control message."""

    text: str


ToCoordinator = (
    Pulse
    | Profile
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


# --- coordinator to rank


class WorldReport(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a world of an elastic job when it begins. Ranks are those of the launch.

    The fields after ``still_s`` are totals since the beginning of the job.
    """

    generation: int
    size: int
    lost: tuple[int, ...] = ()  # ranks that have failed since the world before
    joined: tuple[int, ...] = ()  # ranks that were not in the world before, or whose processes are new
    left: tuple[int, ...] = ()  # ranks of the world before that have left without a failure
    recomputed: int = 0  # steps that are computed again
    still_s: float = 0.0  # for how long the training has stood still before this world
    ranks_lost: int = 0
    ranks_joined: int = 0
    seconds_lost: float = 0.0
    text: str = ""  # what the user was told; "" for the first world


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
    ranks: tuple[int, ...] = ()
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

    ranks: tuple[int, ...]  # world ranks of the session
    reason: str


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """The answer to Bye. After this message, the coordinator sends the rank no more buckets."""


class Where(msgspec.Struct, frozen=True, array_like=True, tag="where"):
    """Asks a rank which bucket of the schedule it has reached. The rank answers with its ReplayStatus.

    The coordinator asks this because another rank has waited for too long.
    """

    epoch: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Asks a rank whether it is still running. The rank answers with Alive.

    The coordinator asks this if other ranks wait for this rank and this rank has sent no other message.
    """


class Show(msgspec.Struct, frozen=True, array_like=True, tag="show"):
    """Asks a rank for its Python stack. The rank answers with Stack.

    The coordinator sends this request if other ranks wait for this rank.
    """


class Differ(msgspec.Struct, frozen=True, array_like=True, tag="differ"):
    """Tells the ranks that the job ends, because the ranks' copies of the parameters differ.

    The fields have the same meaning as the attributes of the exception ``ddlcore.errors.ReplicasDiffer``.
    """

    text: str
    tensor: str
    groups: tuple[tuple[int, ...], ...]
    step: int
    agreed_step: int
    distances: tuple[tuple[int, float], ...] = ()


class Explain(msgspec.Struct, frozen=True, array_like=True, tag="explain"):
    """Asks a rank for the values of the parameter number ``index``, because the ranks' copies of that parameter differ.

    The rank answers with a Sample. ``set_id``, ``label`` and ``step`` are those of the Digests that differed.
    """

    set_id: int
    label: str
    step: int
    index: int


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="notice"):
    """A warning for the user's log. The message has no other effect."""

    text: str


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """The answer to Settle: the coordinator has finished the comparison of this rank's digests."""


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


class World(msgspec.Struct, frozen=True, array_like=True, tag="world"):
    """The answer to Register: the process is a member of the next world of an elastic job.

    A place is the number of a process in the launch. ``members`` are the places of the members, in the order of their
    ranks in this world. ``hosts`` contains the host index of each place of the launch. All members copy the state of
    the member at place ``root``.
    """

    generation: int
    members: tuple[int, ...]
    hosts: tuple[int, ...]
    root: int
    before: int  # the number of members of the world before this one; 0 for the first
    coordinator: int = 0  # the number of the coordinator that opened it; 0: the launcher

    @property
    def ballot(self) -> Ballot:
        """The name of this world. Two coordinators may count to the same generation, but their ballots differ."""
        return self.generation, self.coordinator


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The news to all agents of an elastic job that a world opens. It is sent before any member gets the world.

    With it, a successor of the coordinator knows of every world that a process of these agents may have received.
    """

    ballot: Ballot
    processes: tuple[Process, ...]  # the members; the first one decides between two halves
    places: tuple[int, ...]  # the members' places, in the order of their ranks
    hosts: tuple[int, ...]  # the host index of each place of the launch
    steps: int  # the most steps that a member had applied
    effective: Ballot  # the newest world that is known to have been received by all its members
    taken: Ballot = (0, 0)  # the newest world whose members are known to have taken over the state; (0, 0): none
    ranks_lost: int = 0  # this and the next two: totals since the beginning of the job
    ranks_joined: int = 0
    seconds_lost: float = 0.0
    complete: bool = False  # its members have reached the end of the training
    stopped: str = ""  # why they stop at a call of ``should_stop()`` on which they have agreed


class Complete(msgspec.Struct, frozen=True, array_like=True, tag="complete"):
    """The answer to Register if all members of the last world have reached the end of the training."""


class CoordinatorLost(msgspec.Struct, frozen=True, array_like=True, tag="coordinatorlost"):
    """The message of an agent to each rank of its host that the coordinator is lost, and another one takes its place.

    The world of the rank has ended, also if all its members live. The rank registers for the next one on a new connection.
    """

    reason: str


class Dismissed(msgspec.Struct, frozen=True, array_like=True, tag="dismissed"):
    """The answer to Register if the process must leave the training, because its host leaves the job."""

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
    | World
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


# --- the store


class StoreSet(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    """Asks the store to store a value under a key."""

    serial: int
    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Asks the store for the value under a key.

    The reply comes as soon as the key exists, ``timeout_s`` seconds have passed, or a rank is lost.
    """

    serial: int
    key: str
    timeout_s: float


class StoreAdd(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Asks the store to add ``amount`` to the integer under a key."""

    serial: int
    key: str
    amount: int


class StoreDelete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Asks the store to delete all keys that begin with ``prefix``."""

    serial: int
    prefix: str


class StoreClock(msgspec.Struct, frozen=True, array_like=True, tag="clock"):
    """Asks what time it is on the clock of the process that runs the store. The reply comes at once."""

    serial: int


class StoreReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The store's reply to a request.

    ``error`` is "" if the request succeeded. Otherwise ``error`` is "timeout", "closed", or a text that begins with
    "lost: " or "value: ".
    """

    serial: int
    value: bytes
    error: str = ""


StoreRequest = StoreSet | StoreGet | StoreAdd | StoreDelete | StoreClock

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_to_coordinator: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
_from_coordinator: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)
_store_request: msgspec.msgpack.Decoder[StoreRequest] = msgspec.msgpack.Decoder(StoreRequest)
_store_reply = msgspec.msgpack.Decoder(StoreReply)
_spec = msgspec.msgpack.Decoder(Spec)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:  # msgspec does not convert this error if a tag is not valid UTF-8
        raise msgspec.DecodeError(str(error)) from None


def encode(record: msgspec.Struct) -> bytes:
    """Return the encoded bytes of ``record``, which may be any record of this module.

    A text in ``record`` may contain lone surrogates; an example is an error message with a path that is not UTF-8. Lone
    surrogates are replaced by backslash escapes, except in a Request. In a Request, lone surrogates raise
    UnicodeEncodeError: the names in a Request must not change, because they pair the operations of different ranks.
    """
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        if isinstance(record, Request):
            raise
        return _encoder.encode(encodable(record))


def encodable(value: Any) -> Any:
    """Return a copy of ``value`` (a record or a part of one) in which all text can be encoded as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, msgspec.Struct):
        fields = {name: encodable(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, (tuple, list)):
        return type(value)(map(encodable, value))
    if isinstance(value, dict):
        return {encodable(name): encodable(one) for name, one in value.items()}
    return value


def decode_to_coordinator(data: bytes) -> ToCoordinator:
    """Decode a message from a rank to the coordinator.

    All ``decode_...`` functions of this module raise msgspec.DecodeError if ``data`` cannot be decoded. They raise its
    subclass msgspec.ValidationError if ``data`` can be decoded but is not a message of the expected type.
    """
    return _decode(_to_coordinator, data)


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """Decode a message from the coordinator to a rank."""
    return _decode(_from_coordinator, data)


def decode_store_request(data: bytes) -> StoreRequest:
    """Decode a request from a rank to the store."""
    return _decode(_store_request, data)


def decode_store_reply(data: bytes) -> StoreReply:
    """Decode a reply of the store."""
    return _decode(_store_reply, data)


def decode_spec(data: bytes) -> Spec:
    """Decode the bytes in the field ``spec`` of an Ask."""
    return _decode(_spec, data)
