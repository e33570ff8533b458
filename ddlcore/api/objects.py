"""The collectives without tensors: barrier, join, and collectives of Python objects.

They are the same for all frameworks.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

from ddlcore.api.process_set import ProcessSet, global_process_set
from ddlcore.api.world import current_job, job_of
from ddlcore.contracts.framework import JobService
from ddlcore.contracts.transport import Memory, view
from ddlcore.errors import InvalidArgument, ObjectDigestError
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import ANONYMOUS, Entry
from ddlcore.types import Buffer, DType, Kind

__all__ = ["allgather_object", "barrier", "broadcast_object", "check_root", "checked_name", "join"]

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
    _control(job, set_id, ANONYMOUS, Spec(Kind.BARRIER)).wait()


def join(device: int = -1, job: JobService | None = None) -> int:
    """Declare that this rank has no more data, and wait until all ranks have joined. Return the rank that joined last.

    Until then, this rank takes part in the operations of the other ranks with values that do not change the result,
    such as zeros for a sum. An average divides by the number of ranks that contribute values; with the setting
    ``join_average=size``, by the number of all ranks of the process set, as in Horovod. ``device`` is accepted for
    compatibility with Horovod.
    """
    job = job or current_job()
    last = int(_control(job, 0, "join", Spec(Kind.JOIN)).wait())
    job_of(job).joined()
    return last


def _control(job: JobService, set_id: int, name: str, spec: Spec) -> Handle:
    """Submit an operation without a tensor, and return its handle.

    The result of the handle is ``Outcome.result``. For a join, this is the rank that joined last. For a barrier, the
    result has no meaning.
    """
    handle = Handle(job_of(job).waiter, 1, lambda outcomes: None if outcomes[0] is None else outcomes[0].result)
    job.submit([Entry(handle, 0, set_id, name, spec, encode(spec))])
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

    The transport sends the object's bytes, and the root announces their digest over the authenticated control network.
    If the received bytes do not have that digest, they are not unpickled, and ObjectDigestError is raised.
    """
    job = job or current_job()
    set_id, ranks = process_set.resolve(job)
    check_root(root_rank, ranks, set_id)
    payload = _pickled(obj) if job.rank == root_rank else b""
    spec = Spec(Kind.ALLGATHER, DType.U8, root=root_rank, is_object=True)
    parts = _exchange(job, set_id, ranks, name, spec, payload, [root_rank])
    return obj if job.rank == root_rank else pickle.loads(parts[0])


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set, job: JobService | None = None
) -> list[Any]:
    """Return a list of the objects of all members of the process set, in the order of their ranks.

    All members must call this. Each rank announces the digest of its object, and ``name`` and ``job`` have the same
    meaning as in ``broadcast_object``. Raises ObjectDigestError if received bytes do not have the announced digest.
    """
    job = job or current_job()
    set_id, ranks = process_set.resolve(job)
    spec = Spec(Kind.ALLGATHER, DType.U8, is_object=True)
    return [pickle.loads(part) for part in _exchange(job, set_id, ranks, name, spec, _pickled(obj), ranks)]


def _pickled(obj: Any) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps(obj))


def _exchange(
    job: JobService,
    set_id: int,
    ranks: Sequence[int],
    name: str | None,
    spec: Spec,
    payload: bytes,
    wanted: Sequence[int],
) -> list[bytes]:
    """Gather the payloads of all members, and return the payloads of the ranks in ``wanted``, in that order.

    ``ranks``: all members. ``payload``: this rank's bytes. Raises ObjectDigestError if the digest of a returned payload
    differs from the digest that its rank has announced.
    """
    memory = Memory(len(payload))
    if payload:
        view(memory.address, len(payload))[:] = payload
    source = Buffer(memory.address, len(payload), DType.U8, (len(payload),), owner=memory)
    handle = Handle(job_of(job).waiter, 1, lambda outcomes: outcomes[0])
    wire_name = f"object.{checked_name(name)}" if name else ANONYMOUS
    digest = hashlib.blake2b(payload, digest_size=32).digest()
    rows = (len(payload),)
    entry = Entry(handle, 0, set_id, wire_name, spec, encode(spec), source, None, rows, digest)
    job.submit([entry])
    outcome: Outcome = handle.wait()
    assert outcome.memory is not None
    parts, at = {}, outcome.memory.address
    for rank, (nbytes,), announced in zip(ranks, outcome.rows, outcome.digests):
        part = bytes(view(at, nbytes))
        at += nbytes
        if rank in wanted and hashlib.blake2b(part, digest_size=32).digest() != announced:
            raise ObjectDigestError(
                f"the object of rank {rank} ({entry.name!r}) arrived with other bytes than rank {rank} announced; "
                "it was not unpickled. Somebody else may be writing to the data network"
            )
        parts[rank] = part
    return [parts[rank] for rank in wanted]
