"""The messages about the state of a rank: where it is, how it is loaded, and whether copies of parameters are equal."""

from __future__ import annotations

import msgspec


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


class Observation(msgspec.Struct, frozen=True, array_like=True, tag="observation"):
    """Carries what an observer of a rank tells the watches of the job; not counted as a control message.

    ``kind`` is the name of the form of ``data``, which only that observer and those watches know.
    """

    kind: str
    data: bytes


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


class Stack(msgspec.Struct, frozen=True, array_like=True, tag="stack"):
    """The answer to Show: the Python stack of the user's thread on this rank; not counted as a control message."""

    text: str


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
