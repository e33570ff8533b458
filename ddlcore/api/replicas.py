"""Tells what this rank's copy of the parameters is, by digests: beside the job after steps, or together in ``verify``.

The same for every framework, which only says where its tensors lie. Bytes are compared, not values: -0.0 is not 0.0,
and a NaN equals itself.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlcore.api.objects import allgather_object, broadcast_object
from ddlcore.api.world import ProcessSet, current_job, global_process_set
from ddlcore.contracts.transport import view
from ddlcore.errors import InvalidArgument, ReplicasDiffer
from ddlcore.job import Job
from ddlcore.messages import Differ, Digests, Explain, Sample
from ddlcore.runtime.agreement import differing, wording

__all__ = ["Replica", "Verifier", "array_replica", "named", "verify", "verify_replicas"]

FIRST_BYTES = 256 << 20  # of parameters that are digested for the warning after the first step
HELD_BYTES = 64 << 20  # of copies on the host at a time
SAMPLE_BYTES = 256 << 10  # that a rank sends of a tensor that differs, beside the job
SHOWN_BYTES = 64 << 20  # up to which ``verify`` compares the values of a tensor that differs


@dataclass(frozen=True)
class Replica:
    """This rank's copy of one tensor. ``host()`` gives the address of its bytes, row-major, and what keeps them there."""

    name: str
    dtype: str  # as numpy calls it; "bfloat16"
    shape: tuple[int, ...]
    nbytes: int
    host: Callable[[], tuple[int, Any]]
    on_host: bool = True  # ``host`` waits for no device

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'})"


class Verifier:
    """Tells the digests of one optimizer's parameters after its steps, as the settings ask. One thread at a time.

    ``kind``: how a message calls the optimizer; the same on every rank. ``replicas()``: its parameters in their order,
    the same on every rank. ``fatal``: whether a difference may end the job (``verify_every``); else there is only the
    warning after the first step. ``advice``: what to do where the ranks have never agreed.
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
        self._next = 0  # the step after which digests are told
        self._every = 0
        self._names: tuple[str, ...] = ()
        self._described = b""
        self._told: tuple[int, bytes] = (0, b"")  # the last step, and its digests

    def stepped(self, job: Job, set_id: int = 0) -> None:
        """Note that the optimizer has stepped, and tell the digests if it is time; waits for no other rank."""
        if job is not self._job:
            self._bind(job, set_id)
        step = self._step + 1
        if step == self._next:
            self._tell(job, step)
        self._step = step  # last: a signal handler may have this called again

    def _bind(self, job: Job, set_id: int) -> None:
        self._job, self._set_id, self._step, self._next = job, set_id, 0, 0
        self._names, self._described = (), b""
        self._every = job.settings.whole("verify_every") if self._fatal else 0
        if len(job.sets.members(set_id) or ()) < 2:
            return
        if self._every or job.settings["verify_first_step"]:
            self._next = 1
            self._label = job.add_verifier(set_id, self._kind, self)

    def _tell(self, job: Job, step: int) -> None:
        replicas = self._replicas()
        if not self._every:
            replicas = _within(replicas, FIRST_BYTES)
        if not replicas:  # they have been let go of
            return
        names = _names(replicas)
        news = names != self._names
        if news:
            self._described = _digest(names)
        digests = _digests(job, replicas)
        self._told = step, digests
        place = (self._set_id, self._label, step, self._described, digests)
        job.tell(Digests(*place, fatal=bool(self._every), advice=self._advice, tensors=names if news else ()))
        self._names = names  # only now: where a signal handler has come in between, they are told again
        if self._every:
            self._next = (step // self._every + 1) * self._every

    def sample(self, asked: Explain) -> Sample:
        """Return the beginning of a tensor, if it is still what was told of. From the control thread: it waits for no device."""
        job, (step, digests) = self._job, self._told
        replicas = self._replicas()
        if job is None or step != asked.step or not 0 <= asked.index < len(replicas):
            return Sample()
        replica = replicas[asked.index]
        if not replica.on_host or not replica.nbytes:
            return Sample()
        address, held = replica.host()
        data = bytes(view(address, min(replica.nbytes, SAMPLE_BYTES)))
        now = job.digests([address], [replica.nbytes])  # after the copy: what has changed since shows here
        del held
        return Sample(replica.dtype, data) if now == digests[8 * asked.index : 8 * asked.index + 8] else Sample()


def _names(replicas: Sequence[Replica]) -> tuple[str, ...]:
    """What they are called, each by another name: tensors of different ranks are paired by it."""
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
    """Those that fit ``limit`` bytes, in their order."""
    taken = []
    for one in replicas:
        if one.nbytes <= limit:
            taken.append(one)
            limit -= one.nbytes
    return taken


def _digest(names: tuple[str, ...]) -> bytes:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).digest()


def _digests(job: Job, replicas: Sequence[Replica]) -> bytes:
    """8 bytes for each, without a copy of all of a device's tensors on the host at once."""
    parts: list[bytes] = []
    places: list[tuple[int, Any]] = []
    first, held = 0, 0
    for index, one in enumerate(replicas):
        places.append(one.host())
        held += one.nbytes
        if held >= HELD_BYTES or index == len(replicas) - 1:
            parts.append(
                job.digests([place for place, _ in places], [each.nbytes for each in replicas[first : index + 1]])
            )
            places.clear()
            first, held = index + 1, 0
    return b"".join(parts)


def verify_replicas(
    replicas: Sequence[Replica], process_set: ProcessSet = global_process_set, job: Job | None = None
) -> None:
    """Raise ReplicasDiffer on every member unless all have these tensors alike, to the last bit. Every member calls it."""
    job = job or current_job()
    _, ranks = process_set.resolve(job)
    if len(ranks) == 1:
        return
    names = _names(replicas)
    digests = _digests(job, replicas)
    whole = hashlib.blake2b(_digest(names) + digests, digest_size=16).digest()
    if len(set(allgather_object(whole, process_set=process_set, job=job))) == 1:
        return
    told = dict(zip(ranks, allgather_object((names, digests), process_set=process_set, job=job)))
    every = {rank: names for rank, (names, _) in told.items()}
    index, groups, count = differing(every, {rank: digests for rank, (_, digests) in told.items()})
    if not groups:  # the same, in another order
        return
    tensor = every[ranks[0]][index] if index >= 0 else ""
    distances = _distances(replicas[names.index(tensor)], ranks, process_set, job) if index >= 0 else {}
    what = "found by verify()" if index >= 0 else f"found by verify()\n{_counts(every)}"
    differ = Differ(what, tensor, groups, -1, -1, tuple(distances.items()))
    advice = "broadcast_parameters makes the parameters one again; where a difference is meant, pass only what is to be alike"
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
    """By rank, how far its elements are from the lowest rank's; without those that are alike. All members call it."""
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
    except TypeError:  # a type that numpy does not have: its bytes are told apart, not its values
        numbers = np.frombuffer(data, np.uint8)
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


# --- numpy


def array_replica(name: str, array: Any) -> Replica:
    """Return the Replica of what numpy can make an array of."""
    whole = np.ascontiguousarray(array)
    shape = tuple(np.shape(array))
    return Replica(name, str(whole.dtype), shape, whole.nbytes, lambda: (whole.ctypes.data, whole))


def verify(arrays: Any, process_set: ProcessSet = global_process_set) -> None:
    """Check that every member of ``process_set`` has the same arrays, to the last bit; every member calls it.

    ``arrays``: a dict of names and arrays, an iterable of arrays, or one of pairs (name, array). Raises ReplicasDiffer
    on every member where one differs, or where the ranks do not have the same arrays; ValueError for what is no array.
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
    """Return pairs of names and values, of a dict, of pairs, or of values that have none but their places."""
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
