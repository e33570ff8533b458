"""Define the records of the control network: what ranks send to the coordinator and to the store, and the replies.

The records are plain data, encoded by msgspec. A record that cannot be decoded raises an error that names its sender.
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
    """The description of an operation that a rank requests under one name. It must be equal on all ranks."""

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
        """Whether the coordinator has to be asked in every step, even in replay.

        It hands on the digests of objects. For tensors on devices, it hands on the sizes of ragged kinds: memory for
        the result is allocated before the device's queue reaches the collective. On the host, the ranks exchange these
        sizes by the transport.
        """
        return self.kind.is_ragged and (self.is_object or self.device != CPU.kind)

    def nbytes(self, rows: tuple[int, ...] = ()) -> int:
        """Return the size of the tensor in bytes.

        ``rows``: for ragged kinds, the number of rows from each member, because their spec does not contain the first
        dimension.
        """
        return prod(self.shape) * self.dtype.itemsize * (sum(rows) if self.kind.is_ragged else 1)

    def compressor_by(self, setting: str) -> str:
        """Return the compressor for this tensor, where ``setting`` is the compressor in the job's settings.

        A spec with any compressor but BY_SETTING keeps its own. A spec with BY_SETTING (gradients, unless the user has
        named a compressor) gets ``setting`` if it is a sum or an average of float32, and "none" otherwise.
        """
        if self.compressor != BY_SETTING:
            return self.compressor
        sums = self.kind is Kind.ALLREDUCE and self.op in (ReduceOp.Sum, ReduceOp.Average)
        return setting if sums and self.dtype is DType.F32 else "none"


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request of one rank for one tensor, which is ready on that rank."""

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

    It is sent to the coordinator before the first Hello. If ``patient``, the answer comes after all of ``ranks`` have
    arrived. Otherwise this rank gives up: the answer comes at once, and contains those ranks that have arrived so far.
    """

    token: str  # random, one for each process: an equal rank with another token is of another launch
    ranks: tuple[int, ...]  # ranks of the launch that it asks about
    host: str  # equal for two ranks if and only if they are on one host
    kin: str  # equal for ranks that see each other's process ids
    pid: int
    address: str = ""  # the rank's own address on the route to the coordinator
    via: str = ""  # the coordinator's address on that route
    ports: tuple[int, ...] = ()  # two ports that are free on its host
    patient: bool = True
    timeout_s: float = 0.0  # if not ``patient``: how long this rank has waited


class Arrivals(msgspec.Struct, frozen=True, array_like=True, tag="arrivals"):
    """The answer to Arrive: those of its ``ranks`` that have arrived.

    If it was ``patient``, these are all of them, unless another rank that waits for the same ranks has given up. Then
    ``gave_up_s`` is how long that rank has waited, and all of them give up, so that each names the ranks that have not
    come, and none names a rank that has ended because of them.
    """

    arrived: tuple[tuple[int, Arrive], ...]
    gave_up_s: float = 0.0


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """The requests for all tensors that became ready on a rank since its last Request.

    A rank has at most one unanswered Request.
    """

    epoch: int
    serial: int
    asks: tuple[Ask, ...]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The message of a rank that leaves: by ``shutdown()``, at the end of its script, or because of an exception.

    ``broken``: its transport has failed, so it will not run buckets that the coordinator has already announced.
    ``waited_s``: if it leaves ``init`` because others have not called it: how long it has waited, in seconds.
    """

    reason: str
    broken: bool = False
    waited_s: float = 0.0


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The last message of a rank, after Farewell.

    The rank has run all announced buckets, so if its process ends now, this is no failure.
    """


class ReplayStatus(msgspec.Struct, frozen=True, array_like=True, tag="replay_status"):
    """The bucket of the schedule that a rank has reached in replay; not counted as a control message.

    If ``launched``, the rank has launched the bucket at ``place`` and waits for the other ranks. Otherwise that bucket
    is the next that it will launch, and ``missing`` are those tensors of the bucket that were not yet submitted. A rank
    sends this as the answer to Where. It also sends it unasked: with ``alarm`` if it has been at one bucket for long,
    and with ``moved`` when it has gone on after an alarm.
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
    """The report that a rank's engine has been busy with one step for long; not counted as a control message.

    A step is a negotiated bucket, a drain, or other work of the engine. It has the same ``what`` and ``index`` on all
    ranks. ``over``: the step, which was reported before, has now ended.
    """

    what: str  # description, such as "allreduce 'x'" or "leaving replay (Drain of epoch 3)"
    index: int  # index of a bucket; -1 for any other step
    set_id: int  # process set whose members take part
    names: tuple[str, ...]  # names of its tensors
    waits_s: float = 0.0
    over: bool = False
    has_deadline: bool = False  # the step has a time limit of its own: it is no stall while all ranks answer


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The answer to Probe: a text that says what this rank is doing; not counted as a control message."""

    text: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """A rank's request to leave replay, because what was submitted does not fit the schedule.

    ``slow``: the rank only suspects this, because it has launched no bucket for long; the schedule may still fit.
    """

    epoch: int
    reason: str
    slow: bool = False
    replay_status: ReplayStatus | None = None  # where the rank is, and since when


class Frozen(msgspec.Struct, frozen=True, array_like=True, tag="frozen"):
    """The answer to Freeze: the rank launches nothing more. ``launched`` is how far it has come."""

    epoch: int
    launched: tuple[tuple[int, int], ...]  # (set id, last launched place); place -1: none was launched


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """The traffic of a network interface of a host, of all programs together, in bytes since the host was started."""

    name: str
    received_bytes: int
    sent_bytes: int
    bits_per_s: float = 0.0  # speed of the link; 0: unknown


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells in its Pulse about its present operations and its time, if the launcher serves a live page.

    Counts and times are totals since ``init``.
    """

    doing: str  # a sentence
    waits_s: float = 0.0  # for how long at least no operation has ended, although some are in flight; 0: none is
    in_flight: tuple[tuple[str, tuple[int, ...]], ...] = ()  # the first operations by name: name, ranks; (): all ranks
    pending: int = 0  # how many operations are in flight
    input_s: float = 0.0  # time for which the main thread has waited for input
    sampled_s: float = 0.0  # time for which it is known whether the main thread waited for input
    transport_s: float = 0.0
    nbytes: int = 0  # bytes of this rank's tensors in delivered buckets
    route: str = ""  # the transport of process set 0
    traffic: tuple[Traffic, ...] = ()  # only from the first rank of each host, if there are several hosts


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """The load and progress of a rank, sent every ``pulse_s`` seconds if that is set; not counted as a control message.

    Counts and times are totals since ``init``.
    """

    at_s: float  # time by the rank's own monotonic clock
    steps: int
    user_s: float  # time that the user's threads have spent in ``wait``
    cpu_s: float
    resident_bytes: int
    gpu_share: float = -1.0  # utilization of its GPU when that was last used, 0 … 1; below 0: it has no GPU
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0
    activity: Activity | None = None


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """A record of where a rank's main thread spends its time; not counted as a control message.

    It is sent if the launcher asks for it.
    """

    steps: int  # number of steps that were sampled
    seconds: float  # duration of these steps
    input_s: float  # part of ``seconds``: time spent waiting for the next item of the loop's iterable
    loop: str  # the loop that was found
    lines: tuple[tuple[str, str, float, float], ...]  # file and line, text, seconds, input part of these


class Digests(msgspec.Struct, frozen=True, array_like=True, tag="digests"):
    """The digests of a rank's copies of the parameters after a step; not counted as a control message.

    No rank waits for the result of the comparison. ``label`` names the optimizer, and is the same on every member of
    the process set ``set_id``. ``tensors`` contains a description of each parameter, in order. It is empty if this rank
    has sent these descriptions before, with the same ``described``.
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

    It is empty if the tensor no longer has the digest that was sent.
    """

    dtype: str = ""
    data: bytes = b""


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """The message of a rank that is about to leave.

    The coordinator answers with Settled when the digests of this rank have been compared, or can no longer be compared.
    """


class Paused(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """The message of a rank that has launched everything before ``Resume.until``; sent only while a search runs.

    The rank launches no more in this epoch. ``periods_ns``: the duration of each period, without the first period after
    the Resume.
    """

    epoch: int
    periods_ns: tuple[int, ...]


class StopRequest(msgspec.Struct, frozen=True, array_like=True, tag="stop_request"):
    """The request of a rank that all ranks stop at the same call of ``should_stop()``; ``reason`` is for the user."""

    reason: str


class CallCount(msgspec.Struct, frozen=True, array_like=True, tag="call_count"):
    """The answer to CountCalls. The rank makes no further call of this kind until AgreedCall has come.

    ``joins`` is how often this rank has left ``join()``, and ``calls`` how many calls of the kind it has made since.
    """

    kind: str
    joins: int
    calls: int


Process = tuple[int, int]  # a process of an elastic job: its place, and the number of processes there before it
Ballot = tuple[int, int]  # a world of an elastic job: its generation, and the number of the coordinator that opened it


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """The message of a process of an elastic job that wants to be a member of the next world.

    The process takes part in no world any more. The answer is ``World``, ``Complete`` or ``Refused``, and may take as
    long as the training of the others.
    """

    protocol: int
    version: str
    generation: int  # of the newest world of which this process was a member; 0: of none
    steps: int  # how many steps its state contains; -1: it has no state yet
    reason: str  # why it has left that world; "" at an agreed call
    again: int = 0  # how many steps after ``steps`` it had computed, wholly or in part, and has given up
    effective: Ballot = (0, 0)  # the newest world in which all members have taken over the state; (0, 0): none


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The message of a member that knows that all members have reached the end of the training."""

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
    """The message to each rank that this world cannot begin; ``text`` says why.

    ``late``: some ranks have not called ``init`` in time, so a rank that waited for them has given up. All ranks that
    wait for the same world give up with it. Otherwise they would soon hear that the first one has ended, and would name
    that rank as the cause.
    """

    text: str
    late: bool = False


class Bucket(msgspec.Struct, frozen=True, array_like=True, tag="bucket"):
    """A bucket that the ranks must run, as one collective.

    ``index`` is its position in the one order of all buckets of all process sets.
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
    """The decision that the collectives with these names will not run.

    ``error`` is "mismatch" if the ranks disagree, or "lost" if ``ranks`` have left or died. For a mismatch, ``kinds``
    are the different operations that the ranks requested, and ``parts`` the different texts ``Spec.part_of``.
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

    If ``negotiated`` is true, only its place in the schedule is fixed: the bucket is negotiated in every step, see
    ``Spec.is_negotiated``.
    """

    set_id: int
    kind: Kind
    names: tuple[str, ...]  # "" for calls without a name, which are recognized by their specs
    specs: tuple[bytes, ...]
    negotiated: bool = False
    compressor: str = ""  # compressor of the bucket, if the compressor of its specs is BY_SETTING
    commit: bool = False  # a set's last device bucket in a segment: then the hosts tell each other that all launched it


class Arranged(msgspec.Struct, frozen=True, array_like=True, tag="arranged"):
    """A schedule: the buckets of one period, in the order in which the ranks launch them. It is sent once."""

    schedule: int
    digest: bytes
    buckets: tuple[Planned, ...]


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """The order to replay ``schedule`` from now on.

    Places are numbered through all periods: place = number of the period * number of buckets + position in the
    schedule. Launching begins at place ``start``. ``after`` holds, for each process set, the last place that has
    already run.
    """

    epoch: int
    schedule: int
    start: int
    after: tuple[tuple[int, int], ...] = ()
    until: int = -1  # the end of a period: launch nothing from this place on, but send Paused; -1: no limit


class Adjust(msgspec.Struct, frozen=True, array_like=True, tag="adjust"):
    """Values of settings that apply from now on, on every rank.

    Communicators that depend on these settings are closed and opened again.
    """

    values: tuple[tuple[str, str | int | float | bool], ...]


class Freeze(msgspec.Struct, frozen=True, array_like=True, tag="freeze"):
    """The command to a rank to launch no further bucket of the schedule, and to answer with Frozen."""

    epoch: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """The order to run all buckets up to place ``highest``.

    Buckets up to place ``lowest`` are valid, later ones are void.
    """

    epoch: int
    highest: tuple[tuple[int, int], ...]  # (set id, place)
    lowest: tuple[tuple[int, int], ...]
    items: tuple[Bucket | Failure | Arranged | Resume | Adjust, ...] = ()  # what to do after the drain; (): negotiate


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Buckets and other decisions of the coordinator, in the order in which they must be carried out.

    ``serial`` is the serial of the Request that it answers, or 0 if it answers none.
    """

    epoch: int
    serial: int
    items: tuple[Bucket | Failure | Arranged | Resume | Adjust, ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """The message that ranks have died: every collective that needs them has failed."""

    ranks: tuple[int, ...]  # world ranks of the session
    reason: str


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """The answer to Bye: the rank gets no bucket after it."""


class Where(msgspec.Struct, frozen=True, array_like=True, tag="where"):
    """The question at which bucket a rank is, which it answers with its ReplayStatus.

    It is asked because another rank has waited for too long.
    """

    epoch: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """The question whether a rank is still running, which it answers with Alive.

    It is asked because other ranks wait for this rank, and no other message has come from it.
    """


class Show(msgspec.Struct, frozen=True, array_like=True, tag="show"):
    """The request for the Python stack of a rank, which it answers with Stack.

    It is sent if other ranks wait for it.
    """


class Differ(msgspec.Struct, frozen=True, array_like=True, tag="differ"):
    """The message that the ranks' copies of the parameters differ and the job ends.

    The fields are those of ReplicasDiffer.
    """

    text: str
    tensor: str
    groups: tuple[tuple[int, ...], ...]
    step: int
    agreed_step: int
    distances: tuple[tuple[int, float], ...] = ()


class Explain(msgspec.Struct, frozen=True, array_like=True, tag="explain"):
    """The request for the values of tensor number ``index``, because the ranks' copies of it differ.

    The rank answers with a Sample.
    """

    set_id: int
    label: str
    step: int
    index: int


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="notice"):
    """A warning for the user's log; it has no other effect."""

    text: str


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """The answer to Settle: the coordinator will compare no more digests of this rank."""


class Stalled(msgspec.Struct, frozen=True, array_like=True, tag="stalled"):
    """The message that the job ends because of a stall; ``text`` says what waits for which ranks."""

    text: str


class CountCalls(msgspec.Struct, frozen=True, array_like=True, tag="count_calls"):
    """The question how many calls of a kind a rank has made, which it answers with CallCount.

    Kinds are STOP for ``should_stop()``, and COMMIT for ``commit()`` of an elastic state.
    """

    kind: str


class AgreedCall(msgspec.Struct, frozen=True, array_like=True, tag="agreed_call"):
    """The decision that all ranks act at call number ``call`` of a kind after ``joins`` joins, and at each later one.

    A rank has not made that call yet. ``reason`` is the one of the first request.
    """

    kind: str
    joins: int
    call: int
    reason: str


class World(msgspec.Struct, frozen=True, array_like=True, tag="world"):
    """The answer to Register: the next world of an elastic job, of which the process is a member.

    ``members`` are places of the launch, in the order of their ranks in this world. ``hosts`` has the host index of
    each place of the launch. All members take over the state of the member at place ``root``.
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
    effective: Ballot  # the newest world that is known to have begun
    ranks_lost: int = 0  # this and what follows: totals since the beginning of the job
    ranks_joined: int = 0
    seconds_lost: float = 0.0


class Complete(msgspec.Struct, frozen=True, array_like=True, tag="complete"):
    """The answer to Register if the training has ended: all members of the last world have reached its end."""


class CoordinatorLost(msgspec.Struct, frozen=True, array_like=True, tag="coordinatorlost"):
    """The message of an agent to each rank of its host that the coordinator is lost, and another one takes its place.

    The world of the rank has ended, also if all its members live. The rank registers for the next one on a new connection.
    """

    reason: str


class Dismissed(msgspec.Struct, frozen=True, array_like=True, tag="dismissed"):
    """The answer to Register of a process that is to leave the training, because its host leaves the job."""

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
    """The request to store a value under a key."""

    serial: int
    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """The request for the value of a key.

    The reply comes when the key exists, when ``timeout_s`` has passed, or when a rank is lost.
    """

    serial: int
    key: str
    timeout_s: float


class StoreAdd(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """The request to add ``amount`` to the integer that is stored under a key."""

    serial: int
    key: str
    amount: int


class StoreDelete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """The request to delete all keys that begin with ``prefix``."""

    serial: int
    prefix: str


class StoreClock(msgspec.Struct, frozen=True, array_like=True, tag="clock"):
    """The request for the time by the clock of the process that holds the store. The reply comes at once."""

    serial: int


class StoreReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The reply to a request to the store.

    ``error`` is "", "timeout", "closed", or a text that begins with "lost: " or "value: ".
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

    Text may contain lone surrogates, for example an error message with a path that is not UTF-8. They are replaced by
    backslash escapes, except in a Request: there they raise UnicodeEncodeError, because operations of different ranks
    are paired by their names, so names must not change.
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

    This and the other decoders raise msgspec.DecodeError for bytes that cannot be decoded, or its subclass
    ValidationError if they can be decoded but form no such message.
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
    """Decode the spec in an Ask."""
    return _decode(_spec, data)
