"""Wire records of the control network: what ranks say to the coordinator and to the store, and back.

Plain data, encoded by msgspec; a record that does not decode is an error that names its sender.
"""

from __future__ import annotations

from math import prod
from typing import Any, TypeVar

import msgspec

from ddlcore.types import DType, Kind, ReduceOp

__all__ = [
    "BY_SETTING",
    "PROTOCOL",
    "Adjust",
    "Alive",
    "Answer",
    "Arranged",
    "Arrivals",
    "Arrive",
    "Ask",
    "Bucket",
    "Busy",
    "Bye",
    "Differ",
    "Digests",
    "Done",
    "Drain",
    "Explain",
    "Failure",
    "Farewell",
    "Freeze",
    "FromCoordinator",
    "Frozen",
    "Hello",
    "Leave",
    "Lost",
    "Notice",
    "Paused",
    "Planned",
    "Probe",
    "Profile",
    "Pulse",
    "Refused",
    "ReplayStatus",
    "Request",
    "Resume",
    "Sample",
    "Settle",
    "Settled",
    "Show",
    "Spec",
    "Stack",
    "Stalled",
    "StoreAdd",
    "StoreClock",
    "StoreDelete",
    "StoreGet",
    "StoreReply",
    "StoreRequest",
    "StoreSet",
    "ToCoordinator",
    "Welcome",
    "Where",
    "decode_from_coordinator",
    "decode_spec",
    "decode_store_reply",
    "decode_store_request",
    "decode_to_coordinator",
    "encodable",
    "encode",
]

PROTOCOL = 2  # ranks and coordinator must agree on it
BY_SETTING = "setting"  # a Spec's compressor: the job's setting says what the tensor travels as


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """What every rank must ask alike for one name."""

    kind: Kind
    dtype: DType = DType.U8
    shape: tuple[int, ...] = ()  # of ragged kinds without the first dimension
    op: ReduceOp = ReduceOp.Sum
    root: int = -1  # world rank of a broadcast's source
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    strides: tuple[int, ...] | None = None
    compressor: str = "none"  # BY_SETTING: see ``compressor_by``
    group: int = 0  # size of the grouped call it belongs to, whose name is its own up to the last "["
    ranks: tuple[int, ...] | None = None  # of ADD_SET: the members; of REMOVE_SET: (set id,)
    part_of: str = ""  # what the caller says that it belongs to, in words; the ranks must say the same

    def nbytes(self, rows: tuple[int, ...] = ()) -> int:
        """Of the tensor; of ragged kinds, which it alone does not tell, with these ``rows``."""
        return prod(self.shape) * self.dtype.itemsize * (sum(rows) if self.kind.is_ragged else 1)

    def compressor_by(self, setting: str) -> str:
        """Return the compressor that the tensor travels by, where the job's setting is ``setting``.

        The setting applies to what leaves it to the setting, which gradients do unless the user has named a
        compressor, and of that to sums and averages of float32.
        """
        if self.compressor != BY_SETTING:
            return self.compressor
        sums = self.kind is Kind.ALLREDUCE and self.op in (ReduceOp.Sum, ReduceOp.Average)
        return setting if sums and self.dtype is DType.F32 else "none"


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor that a rank has ready."""

    set_id: int
    name: str
    spec: bytes  # an encoded Spec: the coordinator compares bytes and decodes each kind of them once
    rows: tuple[int, ...] = ()  # allgather: (rows,); alltoall: rows to each member; else ()
    stamp: int = -1  # index of the last bucket whose completion the user's code has observed
    digest: bytes = b""  # of an object's bytes, so that they are trusted only as announced here


# --- rank to coordinator


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A rank enters ``init``. ``ranks`` is the world it asks for, ``ordinal`` its how-manieth of that world."""

    rank: int  # world rank as launched
    ranks: tuple[int, ...]
    ordinal: int
    protocol: int
    version: str
    fusion_bytes: int  # rank 0's value counts
    pid: int = 0
    first_bucket_bytes: int = 0  # rank 0's value counts
    overlap: bool = True  # likewise


class Arrive(msgspec.Struct, frozen=True, array_like=True, tag="arrive"):
    """A rank that another launcher has started comes to the coordinator, before any Hello: who it is, and where.

    ``patient``: it waits until all of ``ranks`` have come; else it is told at once who has.
    """

    token: str  # by chance, one a process: a second process with the same rank belongs to another launch
    ranks: tuple[int, ...]  # of the launch, that it wants to know of
    host: str  # equal for ranks of one host, and for these only
    kin: str  # equal for ranks that see each other's process ids
    pid: int
    address: str = ""  # its own on the route to the coordinator
    via: str = ""  # the coordinator's address on that route
    ports: tuple[int, ...] = ()  # two that are free on its host
    patient: bool = True


class Arrivals(msgspec.Struct, frozen=True, array_like=True, tag="arrivals"):
    """The answer to Arrive: those of its ``ranks`` that have come, all of them unless it would not wait."""

    arrived: tuple[tuple[int, Arrive], ...]


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """What a rank has ready since its last request. One is unanswered at a time."""

    epoch: int
    serial: int
    asks: tuple[Ask, ...]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """A rank leaves by itself: ``shutdown()``, the end of its script, or an exception.

    ``broken``: its data path has failed, so what it was promised to take part in will not happen.
    """

    reason: str
    broken: bool = False


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The last word after Farewell: every bucket that was promised has run; the end of the process is no loss."""


class ReplayStatus(msgspec.Struct, frozen=True, array_like=True, tag="replay_status"):
    """Where a rank is in replay; no control message. An ``alarm`` says that it has been there for long, ``moved`` that it is no more.

    ``launched``: in the bucket at ``place``, and waiting for the others; else that is the next one, of
    whose tensors ``missing`` have not been asked for.
    """

    epoch: int
    place: int
    launched: bool
    set_id: int
    names: tuple[str, ...]  # of the bucket
    missing: tuple[str, ...] = ()
    alarm: bool = False
    moved: bool = False  # it has gone on from where it gave the alarm
    waits_s: float = 0.0  # how long it has been there


class Busy(msgspec.Struct, frozen=True, array_like=True, tag="busy"):
    """A rank's engine has been in one thing that was decided for long; no control message. ``over``: it has come to its end.

    The same thing has the same ``what`` and ``index`` on all ranks.
    """

    what: str  # in words: "allreduce 'x'", "leaving replay (Drain of epoch 3)"
    index: int  # of a bucket; -1 where it is something else
    set_id: int  # whose members take part in it
    names: tuple[str, ...]  # of its tensors
    waits_s: float = 0.0
    over: bool = False
    has_deadline: bool = False  # it ends by itself, however long it takes: no stall as long as all ranks answer


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The answer to Probe: what this rank has under way, in words; no control message."""

    text: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """A rank that replays has met something that its schedule cannot serve.

    ``slow``: it only suspects so, since nothing has moved for long; the schedule may well fit.
    """

    epoch: int
    reason: str
    slow: bool = False
    replay_status: ReplayStatus | None = None  # where it is, and since when


class Frozen(msgspec.Struct, frozen=True, array_like=True, tag="frozen"):
    """The answer to Freeze: nothing is launched any more; for each process set the last place that was."""

    epoch: int
    launched: tuple[tuple[int, int], ...]  # (set id, place), -1 where none was


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """How a rank is, now and then and only where the launcher wants to know; no control message. Counts go on since ``init``."""

    at_s: float  # of a steady clock of its own
    steps: int
    user_s: float  # that its own threads stood in ``wait``
    cpu_s: float
    resident_bytes: int
    gpu_share: float = -1.0  # of the last moments in which its GPU was used, 0 … 1; below 0: it has none
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """Where a rank's main thread stands while it trains, only where the launcher wants to know; no control message."""

    steps: int  # that were seen
    seconds: float  # that they took
    input_s: float  # of these, that it waited for what the loop iterates over
    loop: str  # which that is
    lines: tuple[tuple[str, str, float, float], ...]  # of the loop: file and number, text, seconds, of these input


class Digests(msgspec.Struct, frozen=True, array_like=True, tag="digests"):
    """What a rank's copies of the parameters are after a step; no control message: nobody waits for what follows.

    ``label`` is the optimizer's, the same on every member of the process set ``set_id``. ``tensors`` describes the
    parameters in words, in their order, where a description with this ``described`` was not told before.
    """

    set_id: int
    label: str
    step: int
    described: bytes  # digest of names, shapes and types
    digests: bytes  # 8 bytes for each tensor
    fatal: bool  # a difference ends the job; else it is a warning
    advice: str = ""  # what to do about a difference, from one who knows the framework
    tensors: tuple[str, ...] = ()


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """The answer to Explain: the first elements of that tensor as they were told of; empty where it has changed since."""

    dtype: str = ""
    data: bytes = b""


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """A rank is about to leave: it is told (``Settled``) once its digests were compared, or cannot be."""


class Paused(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """A rank has launched all before ``Resume.until``, and launches nothing more in this epoch; only while tuning.

    ``periods_ns``: how long each period took, the first after the Resume left out.
    """

    epoch: int
    periods_ns: tuple[int, ...]


class Stack(msgspec.Struct, frozen=True, array_like=True, tag="stack"):
    """The answer to Show: where the user's thread of this rank is, as Python prints it; no control message."""

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
    """All ranks of the world are there."""

    session: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """This world cannot begin; ``text`` says why."""

    text: str


class Bucket(msgspec.Struct, frozen=True, array_like=True, tag="bucket"):
    """One collective, at its place in the one order of all process sets."""

    index: int
    set_id: int
    kind: Kind
    names: tuple[str, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...] = ()  # ragged kinds: [name][member] = that member's rows
    digests: tuple[tuple[bytes, ...], ...] = ()  # objects: [name][member]
    specs: tuple[bytes, ...] = ()  # only where a member has joined: it must know what it takes part in
    result: int = -1  # ADD_SET: the new set's id; JOIN: the last rank that joined
    compressor: str = ""  # that it travels by, where its specs leave that to the setting


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """These names will not run. ``error``: "mismatch" or "lost" (then ``ranks`` are those that are gone)."""

    set_id: int
    names: tuple[str, ...]
    error: str
    text: str
    ranks: tuple[int, ...] = ()


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """One bucket of a schedule. A ragged slot is negotiated each time, at its place: sizes or bytes differ from step to step."""

    set_id: int
    kind: Kind
    names: tuple[str, ...]  # "" for anonymous calls, which are known by their specs
    specs: tuple[bytes, ...]
    ragged: bool = False
    compressor: str = ""  # that it travels by, where its specs leave that to the setting
    commit: bool = False  # the last of a set on devices that somebody may wait for: behind it the hosts tell each other


class Arranged(msgspec.Struct, frozen=True, array_like=True, tag="arranged"):
    """A schedule, told once: the buckets of one period, in the order in which every rank launches its own of them."""

    schedule: int
    digest: bytes
    buckets: tuple[Planned, ...]


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """From here on ``schedule`` is replayed.

    A place is period * buckets + position. Launching begins at ``start``; what is not beyond
    ``after[set]`` has run already.
    """

    epoch: int
    schedule: int
    start: int
    after: tuple[tuple[int, int], ...] = ()
    until: int = -1  # a period's end: nothing from there on is launched, see Paused; -1: there is none


class Adjust(msgspec.Struct, frozen=True, array_like=True, tag="adjust"):
    """Settings that hold from here on, on every rank; communicators that depend on them are opened anew."""

    values: tuple[tuple[str, str | int | float | bool], ...]


class Freeze(msgspec.Struct, frozen=True, array_like=True, tag="freeze"):
    """Launch nothing more, and say how far you are."""

    epoch: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Take part in everything up to ``highest``; what is not beyond ``lowest`` is valid, the rest void."""

    epoch: int
    highest: tuple[tuple[int, int], ...]  # (set id, place)
    lowest: tuple[tuple[int, int], ...]
    items: tuple[Bucket | Failure | Arranged | Resume | Adjust, ...] = ()  # what comes next; else discovery


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What became ready, in order. ``serial`` is that of the request it acknowledges, 0 where none is."""

    epoch: int
    serial: int
    items: tuple[Bucket | Failure | Arranged | Resume | Adjust, ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """Ranks that died: every collective with them is over."""

    ranks: tuple[int, ...]  # world ranks of the session
    reason: str


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """The answer to Bye: no bucket comes after it."""


class Where(msgspec.Struct, frozen=True, array_like=True, tag="where"):
    """Answer with your ReplayStatus: another rank waits for too long."""

    epoch: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Answer with Alive: others wait for you, and nothing shows whether you are there."""


class Show(msgspec.Struct, frozen=True, array_like=True, tag="show"):
    """Answer with your Stack: others wait for you."""


class Differ(msgspec.Struct, frozen=True, array_like=True, tag="differ"):
    """The ranks' copies of the parameters differ, and the job ends; see ReplicasDiffer."""

    text: str
    tensor: str
    groups: tuple[tuple[int, ...], ...]
    step: int
    agreed_step: int
    distances: tuple[tuple[int, float], ...] = ()


class Explain(msgspec.Struct, frozen=True, array_like=True, tag="explain"):
    """Answer with a Sample of tensor number ``index``: the ranks' differ after this step."""

    set_id: int
    label: str
    step: int
    index: int


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="notice"):
    """A warning for the user's log; nothing else follows from it."""

    text: str


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """The answer to Settle: nothing of this rank waits to be compared."""


class Stalled(msgspec.Struct, frozen=True, array_like=True, tag="stalled"):
    """Nothing has moved for so long that the job ends; ``text`` says what waits for whom."""

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
    """Puts a value under a key."""

    serial: int
    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Answered when the key exists, or when ``timeout_s`` has passed, or when a rank is lost."""

    serial: int
    key: str
    timeout_s: float


class StoreAdd(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Adds to the whole number under a key."""

    serial: int
    key: str
    amount: int


class StoreDelete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Deletes every key that begins with ``prefix``."""

    serial: int
    prefix: str


class StoreClock(msgspec.Struct, frozen=True, array_like=True, tag="clock"):
    """Answered at once by the clock of whoever keeps the store."""

    serial: int


class StoreReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """``error``: "" or "timeout" or "lost: …"."""

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
    except UnicodeDecodeError as error:  # msgspec lets it through where a tag is no text
        raise msgspec.DecodeError(str(error)) from None


def encode(record: msgspec.Struct) -> bytes:
    """The bytes of any record of this file.

    What an error says may hold halves of surrogate pairs, as paths do that are no UTF-8: they become backslash escapes.
    In a request they raise UnicodeEncodeError: names are compared, and must not change.
    """
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        if isinstance(record, Request):
            raise
        return _encoder.encode(encodable(record))


def encodable(value: Any) -> Any:
    """``value``, a record or a part of one, with all its text as UTF-8 can have it."""
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
    """What a rank sends to the coordinator.

    Raises msgspec.DecodeError (ValidationError for well-formed bytes of the wrong shape); so do the others.
    """
    return _decode(_to_coordinator, data)


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """What the coordinator sends to a rank."""
    return _decode(_from_coordinator, data)


def decode_store_request(data: bytes) -> StoreRequest:
    """What a rank asks of the store."""
    return _decode(_store_request, data)


def decode_store_reply(data: bytes) -> StoreReply:
    """What the store answers."""
    return _decode(_store_reply, data)


def decode_spec(data: bytes) -> Spec:
    """The spec that an Ask carries."""
    return _decode(_spec, data)
