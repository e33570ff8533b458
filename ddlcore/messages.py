"""Define the wire records of the control network: what ranks send to the coordinator and to the store, and the replies.

The records are plain data, encoded by msgspec. A record that cannot be decoded raises an error that names its sender.
"""

from __future__ import annotations

from math import prod
from typing import Any, TypeVar

import msgspec

from ddlcore.types import DType, Kind, ReduceOp

PROTOCOL = 2  # version of the protocol; ranks and coordinator must have the same
BY_SETTING = "setting"  # value of Spec.compressor: the job's setting decides how the tensor is compressed


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """What a rank asks for under one name; all ranks must ask for the same."""

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
    group: int = 0  # number of tensors in its grouped call; its name up to the last "[" is the name of that call
    ranks: tuple[int, ...] | None = None  # for ADD_SET the members; for REMOVE_SET (set id,)
    part_of: str = ""  # caller's description of what it belongs to; must be the same on all ranks

    def nbytes(self, rows: tuple[int, ...] = ()) -> int:
        """Return the size of the tensor in bytes.

        For ragged kinds, the spec does not contain the first dimension: ``rows`` holds the number of rows for each
        member.
        """
        return prod(self.shape) * self.dtype.itemsize * (sum(rows) if self.kind.is_ragged else 1)

    def compressor_by(self, setting: str) -> str:
        """Return the name of the compressor for this tensor, where ``setting`` is the compressor in the job's settings.

        The setting applies only to specs whose compressor is BY_SETTING (gradients, unless the user has named a
        compressor), and among these only to sums and averages of float32. For the others of these, the compressor is
        "none".
        """
        if self.compressor != BY_SETTING:
            return self.compressor
        sums = self.kind is Kind.ALLREDUCE and self.op in (ReduceOp.Sum, ReduceOp.Average)
        return setting if sums and self.dtype is DType.F32 else "none"


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor that is ready on a rank."""

    set_id: int
    name: str
    spec: bytes  # an encoded Spec: the coordinator compares bytes, and decodes each distinct value once
    rows: tuple[int, ...] = ()  # allgather: (rows,); alltoall: rows to each member; other kinds: ()
    stamp: int = -1  # index of the last bucket that the user's code has seen complete
    digest: bytes = b""  # digest of an object's bytes: receivers accept only bytes that match it


# --- rank to coordinator


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A rank enters ``init``.

    ``ranks`` is the world that it asks for. ``ordinal`` counts how many times this rank has asked for that world.
    """

    rank: int  # world rank in the launch
    ranks: tuple[int, ...]
    ordinal: int
    protocol: int
    version: str
    fusion_bytes: int  # rank 0's value counts
    pid: int = 0
    first_bucket_bytes: int = 0  # rank 0's value counts
    overlap: bool = True  # rank 0's value counts


class Arrive(msgspec.Struct, frozen=True, array_like=True, tag="arrive"):
    """A rank that another launcher has started registers with the coordinator, before its first Hello.

    If ``patient``, the answer comes after all of ``ranks`` have arrived; otherwise at once, with those that have.
    """

    token: str  # random, one for each process: the same rank with another token belongs to another launch
    ranks: tuple[int, ...]  # ranks of the launch that it asks about
    host: str  # equal for two ranks if and only if they are on one host
    kin: str  # equal for ranks that see each other's process ids
    pid: int
    address: str = ""  # the rank's own address on the route to the coordinator
    via: str = ""  # the coordinator's address on that route
    ports: tuple[int, ...] = ()  # two ports that are free on its host
    patient: bool = True


class Arrivals(msgspec.Struct, frozen=True, array_like=True, tag="arrivals"):
    """The answer to Arrive: those of its ``ranks`` that have arrived; all of them if it was ``patient``."""

    arrived: tuple[tuple[int, Arrive], ...]


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """The tensors that became ready on a rank since its last request. A rank has at most one unanswered request."""

    epoch: int
    serial: int
    asks: tuple[Ask, ...]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """A rank leaves on its own: by ``shutdown()``, at the end of its script, or because of an exception.

    ``broken``: its data path has failed, so it will not run buckets that the coordinator has already announced.
    """

    reason: str
    broken: bool = False


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The last message of a rank, after Farewell.

    It has run every announced bucket, so the end of its process is no failure.
    """


class ReplayStatus(msgspec.Struct, frozen=True, array_like=True, tag="replay_status"):
    """The bucket of the schedule at which a rank is during replay; not counted as a control message.

    A rank sends it on its own as an ``alarm`` if it has been at one bucket for long, and with ``moved`` when it has
    gone on after an alarm. If ``launched``, the rank has launched the bucket at ``place`` and waits for the other
    ranks. Otherwise that bucket is its next one, and ``missing`` are the tensors of it that were not yet submitted.
    """

    epoch: int
    place: int
    launched: bool
    set_id: int
    names: tuple[str, ...]  # names of the bucket's tensors
    missing: tuple[str, ...] = ()
    alarm: bool = False
    moved: bool = False  # it has gone on since its alarm
    waits_s: float = 0.0  # for how long it has been at this bucket


class Busy(msgspec.Struct, frozen=True, array_like=True, tag="busy"):
    """A rank's engine has been busy with one decided step for long; not counted as a control message.

    ``over``: that step has now ended. The same step has the same ``what`` and ``index`` on all ranks.
    """

    what: str  # description, such as "allreduce 'x'" or "leaving replay (Drain of epoch 3)"
    index: int  # index of a bucket; -1 for any other step
    set_id: int  # process set whose members take part
    names: tuple[str, ...]  # names of its tensors
    waits_s: float = 0.0
    over: bool = False
    has_deadline: bool = False  # the step ends on its own in the end: no stall while all ranks answer


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The answer to Probe: a description of what this rank is doing; not counted as a control message."""

    text: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """A rank in replay asks to leave replay, because its schedule does not fit what was submitted.

    ``slow``: the rank only suspects this, because nothing has moved for long; the schedule may still fit.
    """

    epoch: int
    reason: str
    slow: bool = False
    replay_status: ReplayStatus | None = None  # where the rank is, and since when


class Frozen(msgspec.Struct, frozen=True, array_like=True, tag="frozen"):
    """The answer to Freeze: the rank launches nothing more.

    It says the last place that was launched in each process set.
    """

    epoch: int
    launched: tuple[tuple[int, int], ...]  # (set id, place); place -1: nothing was launched


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """Load and progress of a rank, sent every ``pulse_s`` seconds if that is set; not counted as a control message.

    Counts and times are totals since ``init``.
    """

    at_s: float  # by the rank's own monotonic clock
    steps: int
    user_s: float  # time that the user's threads have spent in ``wait``
    cpu_s: float
    resident_bytes: int
    gpu_share: float = -1.0  # utilization of its GPU when that was last used, 0 … 1; below 0: it has no GPU
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """Where a rank's main thread spends its time, sent if the launcher asks; not counted as a control message."""

    steps: int  # number of steps that were sampled
    seconds: float  # duration of these steps
    input_s: float  # of these, time spent waiting for the next item of the loop's iterable
    loop: str  # the loop that was found
    lines: tuple[tuple[str, str, float, float], ...]  # file and number, text, seconds, of these input


class Digests(msgspec.Struct, frozen=True, array_like=True, tag="digests"):
    """Digests of a rank's copies of the parameters after a step; not counted as a control message.

    Nobody waits for the outcome. ``label`` names the optimizer, and is the same on every member of the process set
    ``set_id``. ``tensors`` describes the parameters in words and in their order. It is empty if a description with
    the same ``described`` was sent before.
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
    """The answer to Explain: the first elements of that tensor, as digested; empty if it has changed since."""

    dtype: str = ""
    data: bytes = b""


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """A rank is about to leave. It gets Settled when its digests have been compared, or can no longer be compared."""


class Paused(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """A rank has launched everything before ``Resume.until``, and launches no more in this epoch; only while tuning.

    ``periods_ns``: the duration of each period, without the first one after the Resume.
    """

    epoch: int
    periods_ns: tuple[int, ...]


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
    | Leave
    | Frozen
    | Paused
    | Hello
    | Request
    | Bye
    | Done
)


# --- coordinator to rank


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """All ranks of the world have arrived, and the world begins."""

    session: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """This world cannot begin; ``text`` says why."""

    text: str


class Bucket(msgspec.Struct, frozen=True, array_like=True, tag="bucket"):
    """One collective. Its ``index`` is its position in one order that is common to all process sets."""

    index: int
    set_id: int
    kind: Kind
    names: tuple[str, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...] = ()  # ragged kinds: [name][member] = rows of that member
    digests: tuple[tuple[bytes, ...], ...] = ()  # object collectives: [name][member]
    specs: tuple[bytes, ...] = ()  # only if a member has joined: it needs them to take part with zeros
    result: int = -1  # ADD_SET: id of the new set; JOIN: the last rank that joined
    compressor: str = ""  # compressor of the bucket, if its specs leave the choice to the setting


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The collectives with these names will not run.

    ``error`` is "mismatch", or "lost" if ranks are gone; these are ``ranks``. ``kinds`` and ``parts`` are what the ranks
    asked for, if they disagree: the operations, and what the tensors are part of.
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

    A ragged slot keeps its place but is negotiated each time, because its sizes or bytes differ from step to step.
    """

    set_id: int
    kind: Kind
    names: tuple[str, ...]  # "" for calls without a name, which are recognized by their specs
    specs: tuple[bytes, ...]
    ragged: bool = False
    compressor: str = ""  # compressor of the bucket, if its specs leave the choice to the setting
    commit: bool = False  # a set's last bucket on devices before a wait: after it the hosts confirm to each other


class Arranged(msgspec.Struct, frozen=True, array_like=True, tag="arranged"):
    """A schedule, sent once: the buckets of one period, in the order in which the ranks launch them."""

    schedule: int
    digest: bytes
    buckets: tuple[Planned, ...]


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """From now on, the ranks replay ``schedule``.

    A place is period * buckets + position. Launching begins at ``start``. For each process set, places up to
    ``after[set]`` have run already.
    """

    epoch: int
    schedule: int
    start: int
    after: tuple[tuple[int, int], ...] = ()
    until: int = -1  # the end of a period: launch nothing from here on, then send Paused; -1: no limit


class Adjust(msgspec.Struct, frozen=True, array_like=True, tag="adjust"):
    """Settings that apply from now on, on every rank. Communicators that depend on them are closed and opened again."""

    values: tuple[tuple[str, str | int | float | bool], ...]


class Freeze(msgspec.Struct, frozen=True, array_like=True, tag="freeze"):
    """Tells a rank to launch nothing more, and to answer with Frozen."""

    epoch: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Tells a rank to run everything up to ``highest``. Places up to ``lowest`` are valid, those after it are void."""

    epoch: int
    highest: tuple[tuple[int, int], ...]  # (set id, place)
    lowest: tuple[tuple[int, int], ...]
    items: tuple[Bucket | Failure | Arranged | Resume | Adjust, ...] = ()  # what follows; (): negotiation


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Buckets and other decisions that became ready, in order.

    ``serial`` is the serial of the request that it acknowledges, or 0 if it acknowledges none.
    """

    epoch: int
    serial: int
    items: tuple[Bucket | Failure | Arranged | Resume | Adjust, ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """Ranks that died: every collective that needs them has failed."""

    ranks: tuple[int, ...]  # world ranks of the session
    reason: str


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """The answer to Bye: no bucket will be sent after it."""


class Where(msgspec.Struct, frozen=True, array_like=True, tag="where"):
    """Asks a rank to answer with its ReplayStatus, because another rank has waited for too long."""

    epoch: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Asks a rank to answer with Alive: others wait for it, and there is no other sign that it is still running."""


class Show(msgspec.Struct, frozen=True, array_like=True, tag="show"):
    """Asks a rank to answer with its Stack, because others wait for it."""


class Differ(msgspec.Struct, frozen=True, array_like=True, tag="differ"):
    """The ranks' copies of the parameters differ and the job ends; the fields are those of ReplicasDiffer."""

    text: str
    tensor: str
    groups: tuple[tuple[int, ...], ...]
    step: int
    agreed_step: int
    distances: tuple[tuple[int, float], ...] = ()


class Explain(msgspec.Struct, frozen=True, array_like=True, tag="explain"):
    """Asks a rank to answer with a Sample of tensor number ``index``, because the ranks' copies of it differ."""

    set_id: int
    label: str
    step: int
    index: int


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="notice"):
    """A warning for the user's log; it has no other effect."""

    text: str


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """The answer to Settle: nothing of this rank is left to be compared."""


class Stalled(msgspec.Struct, frozen=True, array_like=True, tag="stalled"):
    """Nothing has moved for so long that the job ends; ``text`` says what waits for which ranks."""

    text: str


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
    """Stores a value under a key."""

    serial: int
    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Asks for the value of a key.

    The answer comes when the key exists, when ``timeout_s`` has passed, or when a rank is lost.
    """

    serial: int
    key: str
    timeout_s: float


class StoreAdd(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Adds ``amount`` to the integer that is stored under a key."""

    serial: int
    key: str
    amount: int


class StoreDelete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Deletes every key that begins with ``prefix`` from the store."""

    serial: int
    prefix: str


class StoreClock(msgspec.Struct, frozen=True, array_like=True, tag="clock"):
    """Asks for the time by the clock of the process that holds the store; it is answered at once."""

    serial: int


class StoreReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The answer to a store request. ``error`` is "", "timeout", "closed", or begins with "lost: " or "value: "."""

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
    """Return the encoded bytes of any record of this module.

    Text of an error may contain lone surrogates, as paths that are not UTF-8 do: they are replaced by backslash
    escapes. In a Request they raise UnicodeEncodeError, because names are compared and must not change.
    """
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        if isinstance(record, Request):
            raise
        return _encoder.encode(encodable(record))


def encodable(value: Any) -> Any:
    """Return ``value``, a record or a part of one, with all text in it made encodable as UTF-8."""
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

    This and the other decoders raise msgspec.DecodeError (ValidationError for well-formed bytes of the wrong shape).
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
