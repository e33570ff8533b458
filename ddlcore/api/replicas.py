"""Compares this rank's parameters with those of the other ranks by digests, after steps or in ``verify``.

This module is the same for every framework. A framework's package only says where its tensors are. Bytes are compared,
not values: -0.0 differs from 0.0, and a NaN is equal to a NaN with the same bits.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ddlcore.api.objects import allgather_object, broadcast_object
from ddlcore.api.process_set import ProcessSet, global_process_set
from ddlcore.api.world import current_job
from ddlcore.contracts.framework import JobService
from ddlcore.contracts.transport import view
from ddlcore.errors import InvalidArgument, ReplicasDiffer
from ddlcore.messages.observing import Differ, Digests, Explain, Sample
from ddlcore.process.job import Job

__all__ = ["Replica", "Verifier", "array_replica", "named", "verify", "verify_replicas"]

FIRST_BYTES = 256 << 20  # most bytes of parameters that are compared for the warning after the first step
HELD_BYTES = 64 << 20  # bytes of device tensors that are copied to the host at a time
SAMPLE_BYTES = 256 << 10  # most bytes that a rank sends of a tensor that differs
SHOWN_BYTES = 64 << 20  # the largest tensor whose values ``verify`` compares if it differs


@dataclass(frozen=True)
class Replica:
    """The description of this rank's copy of one tensor.

    ``host()`` returns two values: the address of the tensor's bytes in host memory, in row-major order, and an object
    that keeps these bytes alive.
    """

    name: str
    dtype: str  # numpy's name of the type, or "bfloat16"
    shape: tuple[int, ...]
    nbytes: int
    host: Callable[[], tuple[int, Any]]
    on_host: bool = True  # ``host`` does not wait for a device

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'})"


class Verifier:
    """Sends the digests of one optimizer's parameters to the coordinator after some steps, as the settings require.

    One thread at a time may use a Verifier. ``kind``: the optimizer's name in messages, the same on every rank.
    ``replicas()`` returns the optimizer's parameters, in the same order on every rank. ``fatal``: if true, parameters
    are compared as the setting ``verify_every`` says, and a difference then ends the job; if false, they are compared
    only after the first step, and a difference is only a warning. ``advice``: a text for the case that the parameters
    were never equal; it says what the user should do.
    """

    def __init__(
        self, kind: str, replicas: Callable[[], Sequence[Replica]], fatal: bool = True, advice: str = ""
    ) -> None:
        self._kind = kind
        self._replicas = replicas
        self._fatal = fatal
        self._advice = advice
        self._job: Job | None = None
        self._set_id = 0
        self._label = kind
        self._step = 0
        self._next = 0  # the step after which digests are sent
        self._every = 0
        self._names: tuple[str, ...] = ()
        self._described = b""
        self._told: tuple[int, bytes] = (0, b"")  # the last step whose digests were sent, and the digests

    def stepped(self, job: JobService, set_id: int = 0) -> None:
        """Record that the optimizer has made a step, and send the digests if the settings require it after this step.

        ``set_id``: the id of the process set whose ranks compare their parameters. The call does not wait for other
        ranks.
        """
        if job is not self._job:
            self._bind(cast("Job", job), set_id)
        step = self._step + 1
        if step == self._next:
            self._tell(step)
        self._step = step  # last, because a signal handler may call this method again

    def _bind(self, job: Job, set_id: int) -> None:
        self._job, self._set_id, self._step, self._next = job, set_id, 0, 0
        self._names, self._described = (), b""
        self._every = job.settings.whole("verify_every") if self._fatal else 0
        if len(job.members(set_id) or ()) < 2:
            return
        if self._every or job.settings["verify_first_step"]:
            self._next = 1
            self._label = job.verification.add(set_id, self._kind, self)

    def _tell(self, step: int) -> None:
        job = self._job
        assert job is not None
        replicas = self._replicas()
        if not self._every:
            replicas = _within(replicas, FIRST_BYTES)
        if not replicas:  # the optimizer no longer exists
            return
        names = _names(replicas)
        news = names != self._names
        if news:
            self._described = _digest(names)
        digests = _digests(job, replicas)
        self._told = step, digests
        place = (self._set_id, self._label, step, self._described, digests)
        job.tell(Digests(*place, fatal=bool(self._every), advice=self._advice, tensors=names if news else ()))
        self._names = names  # only now: if a signal handler interrupts this method, its call sends the names as well
        if self._every:
            self._next = (step // self._every + 1) * self._every

    def sample(self, asked: Explain) -> Sample:
        """Return the first elements of the tensor that ``asked`` names.

        Return an empty Sample if the tensor no longer has the digest that was sent, or if the tensor is on a device.
        The control thread calls this, so this must not wait.
        """
        job, (step, digests) = self._job, self._told
        replicas = self._replicas()
        if job is None or step != asked.step or not 0 <= asked.index < len(replicas):
            return Sample()
        replica = replicas[asked.index]
        if not replica.on_host or not replica.nbytes:
            return Sample()
        address, held = replica.host()
        data = bytes(view(address, min(replica.nbytes, SAMPLE_BYTES)))
        now = job.kernels.digests(
            [address], [replica.nbytes]
        )  # after the copy: detects a change before or during the copy
        del held
        return Sample(replica.dtype, data) if now == digests[8 * asked.index : 8 * asked.index + 8] else Sample()


def _names(replicas: Sequence[Replica]) -> tuple[str, ...]:
    """Return a unique name for each tensor. The tensors with the same name on different ranks are compared."""
    names = tuple(map(str, replicas))
    if len(set(names)) == len(names):
        return names
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} number {seen[name]}")
    return tuple(unique)


def _within(replicas: Sequence[Replica], limit: int) -> Sequence[Replica]:
    """Return as many of ``replicas``, in their order, as fit into ``limit`` bytes together.

    A tensor that is larger than the bytes still left is skipped.
    """
    taken = []
    for one in replicas:
        if one.nbytes <= limit:
            taken.append(one)
            limit -= one.nbytes
    return taken


def _digest(names: tuple[str, ...]) -> bytes:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).digest()


def _digests(job: Job, replicas: Sequence[Replica]) -> bytes:
    """Return the digests of all tensors, 8 bytes for each. Device tensors are copied to the host a few at a time."""
    parts: list[bytes] = []
    places: list[tuple[int, Any]] = []
    first, held = 0, 0
    for index, one in enumerate(replicas):
        places.append(one.host())
        held += one.nbytes
        if held >= HELD_BYTES or index == len(replicas) - 1:
            parts.append(
                job.kernels.digests(
                    [place for place, _ in places], [each.nbytes for each in replicas[first : index + 1]]
                )
            )
            places.clear()
            first, held = index + 1, 0
    return b"".join(parts)


def verify_replicas(
    replicas: Sequence[Replica], process_set: ProcessSet = global_process_set, job: Job | None = None
) -> None:
    """Check that the tensors of all members are equal bit by bit. If they differ, raise ReplicasDiffer on every member.

    All members of ``process_set`` must call this.
    """
    job = job or current_job()
    _, ranks = process_set.resolve(job)
    if len(ranks) == 1:
        return
    names = _names(replicas)
    digests = _digests(job, replicas)
    whole = hashlib.blake2b(_digest(names) + digests, digest_size=16).digest()
    if len(set(allgather_object(whole, process_set=process_set, job=job))) == 1:
        return
    # Imported here: a rank needs the coordinator's module only to describe a difference.
    from ddlcore.coordinator.agreement import differing, wording

    told = dict(zip(ranks, allgather_object((names, digests), process_set=process_set, job=job)))
    every = {rank: names for rank, (names, _) in told.items()}
    index, groups, count = differing(every, {rank: digests for rank, (_, digests) in told.items()})
    if not groups:  # the same tensors in another order
        return
    tensor = every[ranks[0]][index] if index >= 0 else ""
    distances = _distances(replicas[names.index(tensor)], ranks, process_set, job) if index >= 0 else {}
    what = "found by verify()" if index >= 0 else f"found by verify()\n{_counts(every)}"
    differ = Differ(what, tensor, groups, -1, -1, tuple(distances.items()))
    advice = "broadcast_parameters makes the parameters equal again; if a difference is intended, pass only what must be equal"
    raise ReplicasDiffer(wording(differ, count, advice), tensor, groups, distances=distances)


def _counts(names: Mapping[int, tuple[str, ...]]) -> str:
    lines = []
    for rank, own in names.items():
        other = names[min(names)]
        only = [name for name in own if name not in other] or [name for name in other if name not in own]
        lines.append(
            f"  rank {rank}: {len(own)} tensors" + (f"; other than rank {min(names)}: {only[0]}" if only else "")
        )
    return "\n".join(lines)


def _distances(replica: Replica, ranks: Sequence[int], process_set: ProcessSet, job: Job) -> dict[int, float]:
    """Return, for each rank, the largest absolute difference between its elements and those of the first of ``ranks``.

    Ranks whose elements are equal to those of the first rank are left out. The result is empty if the tensor is larger
    than SHOWN_BYTES. All members must call this, because it communicates.
    """
    if replica.nbytes > SHOWN_BYTES:  # the same on every rank
        return {}
    address, held = replica.host()
    mine = bytes(view(address, replica.nbytes))
    del held
    first = broadcast_object(mine, ranks[0], process_set=process_set, job=job)
    far = _distance(replica.dtype, mine, first)
    every = dict(zip(ranks, allgather_object(far, process_set=process_set, job=job)))
    return {rank: value for rank, value in every.items() if value != 0.0}


def _distance(dtype: str, mine: bytes, first: bytes) -> float:
    if mine == first:
        return 0.0
    one, other = _numbers(dtype, mine), _numbers(dtype, first)
    with np.errstate(all="ignore"):
        far = np.abs(one - other)
        far[(one == other) | (np.isnan(one) & np.isnan(other))] = 0
    return float(far.max())


def _numbers(dtype: str, data: bytes) -> Any:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    try:
        numbers = np.frombuffer(data, np.dtype(dtype))
    except TypeError:  # numpy does not have the type: compare the bytes, not the values
        numbers = np.frombuffer(data, np.uint8)
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


# --- numpy


def array_replica(name: str, array: Any) -> Replica:
    """Return the Replica that describes ``array``. ``array`` may be any value that numpy can convert to an array."""
    whole = np.ascontiguousarray(array)
    shape = tuple(np.shape(array))
    return Replica(name, str(whole.dtype), shape, whole.nbytes, lambda: (whole.ctypes.data, whole))


def verify(arrays: Any, process_set: ProcessSet = global_process_set) -> None:
    """Check that the arrays of all members of ``process_set`` are equal bit by bit. All members must call this.

    ``arrays``: a dict of names and arrays, an iterable of arrays, or an iterable of pairs (name, array). Raises
    ReplicasDiffer on every member if an array differs or if the ranks do not have the same arrays. Raises ValueError if
    a value is not an array of numbers.
    """
    verify_replicas([array_replica(name, _array(name, array)) for name, array in named(arrays)], process_set)


def _array(name: str, value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise InvalidArgument(
            f"verify: {name} is a {type(value).__name__}, not an array of numbers; use allgather_object"
        )
    return array


def named(values: Any) -> list[tuple[str, Any]]:
    """Return ``values`` as a list of pairs (name, value).

    ``values``: a dict, an iterable of such pairs, or an iterable of values. A value without a name gets the name
    "number N", where N is its position.
    """
    if isinstance(values, Mapping):
        return [(str(name), value) for name, value in values.items()]
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise InvalidArgument(f"verify takes a dict or an iterable, not {type(values).__name__}")
    pairs = []
    for place, value in enumerate(values):
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
            pairs.append(value)
        else:
            pairs.append((f"number {place}", value))
    return pairs
