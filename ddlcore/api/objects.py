"""The collectives without tensors: barrier, join, and collectives of Python objects.

They are the same for all frameworks.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Sequence
from typing import Any

from ddlcore.api.kept_requests import kept_request, run_request
from ddlcore.api.process_set import ProcessSet, global_process_set
from ddlcore.api.world import current_job, job_of
from ddlcore.contracts.framework import JobService
from ddlcore.contracts.transport import Memory, view
from ddlcore.errors import InvalidArgument, ObjectDigestError
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.process.job import Job
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import ANONYMOUS, Entry, Given, PersistentMove
from ddlcore.types import Buffer, DType, Kind

__all__ = ["allgather_object", "barrier", "broadcast_object", "check_root", "checked_name", "join", "submit_control"]

MOST_NAME_BYTES = 4096


def check_root(root_rank: int, ranks: Sequence[int], set_id: int) -> None:
    """Raise InvalidArgument if ``root_rank`` is not one of ``ranks``, the members of process set ``set_id``."""
    if root_rank not in ranks:
        where = "the world" if set_id == 0 else f"process set {set_id}"
        raise InvalidArgument(f"root_rank={root_rank} is not in {where} (ranks {list(ranks)})")


def checked_name(name: str) -> str:
    """Return ``name``, the name of a tensor, unchanged if it is valid.

    Raises InvalidArgument if ``name`` is not a string, is not valid Unicode, is empty, or has more than 4096 bytes.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"a tensor's name is a string, not {type(name).__name__}: {name!r}")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"the tensor name {name!r} is not valid Unicode text (it has a lone surrogate), so it cannot be sent "
            "to other ranks; use another name"
        ) from None
    if not 0 < nbytes <= MOST_NAME_BYTES:
        raise InvalidArgument(
            f"the tensor name {name[:40]!r}... has {nbytes} bytes; names have 1 to {MOST_NAME_BYTES}, in UTF-8"
        )
    return name


def barrier(process_set: ProcessSet = global_process_set, job: JobService | None = None) -> None:
    """Wait until every member of the process set has called ``barrier``. ``job``: None means the current job."""
    job = job or current_job()
    set_id, _ = process_set.resolve(job)
    submit_control(job, set_id, ANONYMOUS, Spec(Kind.BARRIER)).wait()


def join(device: int = -1, job: JobService | None = None) -> int:
    """Declare that this rank has no more data, and wait until all ranks have joined. Return the rank that joined last.

    Until then, this rank takes part in the operations of the other ranks with values that do not change the result,
    such as zeros for a sum. An average divides by the number of ranks that contribute values; with the setting
    ``join_average=size``, by the number of all ranks of the process set, as in Horovod. ``device`` is accepted for
    compatibility with Horovod.
    """
    job = job or current_job()
    last = int(submit_control(job, 0, "join", Spec(Kind.JOIN)).wait())
    job_of(job).joined()
    return last


def submit_control(job: JobService, set_id: int, name: str, spec: Spec, waits: bool = True) -> Handle:
    """Submit an operation without a tensor, and return its handle.

    The result of the handle is ``Outcome.result``. For a join, this is the rank that joined last. For a barrier, the
    result has no meaning.
    """
    handle = Handle(job_of(job).waiter, 1, lambda outcomes: None if outcomes[0] is None else outcomes[0].result)
    job.submit([Entry(handle, 0, set_id, name, spec, encode(spec))], waits)
    return handle


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    job: JobService | None = None,
) -> Any:
    """Return the object of ``root_rank`` on every member of the process set. All members must call this.

    ``root_rank`` is a rank of the world. ``obj`` is used only on the root, where cloudpickle must be able to pickle it.
    ``name`` pairs the calls of different ranks; calls without a name are paired by their order. ``job``: None means the
    current job.

    The transport sends the object's bytes. If they leave the host, the root announces their digest over the
    authenticated control network. If the received bytes do not have that digest, they are not unpickled, and
    ObjectDigestError is raised.
    """
    job = job or current_job()
    set_id, ranks = process_set.resolve(job)
    check_root(root_rank, ranks, set_id)
    payload = _pickled(obj) if job.rank == root_rank else b""
    parts = _exchange(job, set_id, ranks, name, payload, [root_rank])
    return obj if job.rank == root_rank else pickle.loads(parts[0])


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set, job: JobService | None = None
) -> list[Any]:
    """Return a list of the objects of all members of the process set, in the order of their ranks.

    All members must call this. If the bytes leave the host, each rank announces the digest of its object. ``name`` and
    ``job`` have the same meaning as in ``broadcast_object``. Raises ObjectDigestError if received bytes do not have the
    announced digest.
    """
    job = job or current_job()
    set_id, ranks = process_set.resolve(job)
    return [pickle.loads(part) for part in _exchange(job, set_id, ranks, name, _pickled(obj), ranks)]


class _NotPlainError(Exception):
    """The object contains something that is not of a built-in type."""


class _PlainPickler(pickle.Pickler):
    """Pickles built-in containers, texts and numbers, which have the same meaning everywhere; refuses all other objects."""

    def reducer_override(self, obj: Any) -> Any:  # is not called for built-in types
        raise _NotPlainError


def _pickled(obj: Any) -> bytes:
    """Return the bytes of ``obj``. Functions and classes that other ranks cannot import are pickled by value."""
    file = io.BytesIO()
    try:  # takes a tenth of the time of cloudpickle
        _PlainPickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    except _NotPlainError:
        import cloudpickle

        return bytes(cloudpickle.dumps(obj))
    return file.getvalue()


def _exchange(
    job: JobService, set_id: int, ranks: Sequence[int], name: str | None, payload: bytes, wanted: Sequence[int]
) -> list[bytes]:
    """Gather the payloads of all members, and return the payloads of the ranks in ``wanted``, in that order.

    ``ranks``: all members. ``payload``: this rank's bytes. Raises ObjectDigestError if the digest of a returned payload
    differs from the digest that its rank has announced.
    """
    memory = Memory(len(payload))
    if payload:
        view(memory.address, len(payload))[:] = payload
    source = Buffer(memory.address, len(payload), DType.U8, (len(payload),), owner=memory)
    root = wanted[0] if len(wanted) < len(ranks) else -1
    announced = not _stays_on_host(job_of(job), set_id)
    spec = Spec(Kind.ALLGATHER, root=root, is_object=True, is_announced=announced)
    if announced:
        outcome = _gather_announced(job_of(job), set_id, name, spec, source, payload)
    else:
        outcome = _gather(job_of(job), set_id, name, spec, source)
    assert outcome.memory is not None
    parts, at = {}, outcome.memory.address
    for number, (rank, (nbytes,)) in enumerate(zip(ranks, outcome.rows)):
        if rank in wanted:
            parts[rank] = bytes(view(at, nbytes))
        at += nbytes
        if announced and rank in wanted and _digest(parts[rank]) != outcome.digests[number]:
            raise ObjectDigestError(
                f"the object of rank {rank} ({name or 'a call without a name'}) arrived with other bytes than rank "
                f"{rank} announced; it was not unpickled. Somebody else may be writing to the data network"
            )
    return [parts[rank] for rank in wanted]


def _stays_on_host(job: Job, set_id: int) -> bool:
    """Return whether no network carries the tensors of process set ``set_id``, so that nobody else can write to them.

    The answer is the same on all members.
    """
    route = job.sets.route(set_id).serving(Kind.ALLGATHER)
    return len(job.sets.members(set_id) or ()) == 1 or all(
        provider.one_host or provider.in_process for provider in route.providers()
    )


def _gather(job: Job, set_id: int, name: str | None, spec: Spec, source: Buffer) -> Outcome:
    """Gather the bytes in ``source``. Their numbers travel with them, so replay is not left."""
    rows = (source.count,)
    if not name:
        handle = Handle(job.waiter, 1, lambda outcomes: outcomes[0])
        job.submit([Entry(handle, 0, set_id, ANONYMOUS, spec, encode(spec), source, None, rows)], True)
        outcome: Outcome = handle.wait()
        return outcome

    def make() -> PersistentMove:
        wire_name, nothing = f"object.{checked_name(name)}", Buffer(0, 0, DType.U8, (0,))
        return PersistentMove(job.waiter, set_id, wire_name, spec, encode(spec), nothing)

    return run_request(job, kept_request(job, ("object", name, set_id), spec, make), Given(source, None, rows))


def _gather_announced(job: Job, set_id: int, name: str | None, spec: Spec, source: Buffer, payload: bytes) -> Outcome:
    """Gather the bytes in ``source``, which are ``payload``, and announce their digest over the control network."""
    handle = Handle(job.waiter, 1, lambda outcomes: outcomes[0])
    wire_name = f"object.{checked_name(name)}" if name else ANONYMOUS
    rows = (len(payload),)
    job.submit([Entry(handle, 0, set_id, wire_name, spec, encode(spec), source, None, rows, _digest(payload))])
    outcome: Outcome = handle.wait()
    return outcome


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=32).digest()
