"""Makes the preparations and checks that calls of a transport have in common, and waits for the end of a call."""

from __future__ import annotations

from typing import Any

from ddlcore.contracts.transport import Memory, Plan, Prepared, Transport, Work
from ddlcore.errors import TransportError
from ddlcore.runtime.process_sets import Communicator
from ddlcore.types import Buffer, DType, Kind, ReduceOp

WAIT_SLICE_S = 1.0
PREPARED_LIMIT = 4096


class Unserved(TransportError):
    """Raised if a transport or a compressor cannot do an operation. The operation fails, and the job continues.

    Either every rank raises it for the same operation, or a rank raises it after it has taken part in the collective.
    """


def require(communicator: Communicator, kind: Kind, dtype: DType, op: ReduceOp) -> None:
    """Raise Unserved if the transport for collectives of ``kind`` cannot reduce values of type ``dtype`` by ``op``."""
    capabilities = communicator.transport.capabilities_for(kind)
    if dtype not in capabilities.dtypes or op not in capabilities.ops:
        name = communicator.route.serving(kind).name
        raise Unserved(f"transport {name} does not reduce {dtype.label} by {op.name.lower()}; use another --backend")


def prepared(known: dict[Any, Prepared], key: object, transport: Transport, plan: Plan) -> Prepared:
    """Return the prepared operation that ``known`` contains under ``key``.

    If there is none, ``transport`` prepares ``plan``, and the prepared operation is stored in ``known``.
    """
    found = known.get(key)
    if found is None:
        if len(known) >= PREPARED_LIMIT:  # shapes that are never used again must not fill the memory
            known.clear()
        found = known[key] = transport.prepare(plan)
    return found


def new_memory(count: int, dtype: DType) -> Buffer:
    """Return new host memory for ``count`` elements, which a transport can use. Its owner is a Memory."""
    memory = Memory(count * dtype.itemsize)
    return Buffer(memory.address, count, dtype, (count,), owner=memory)


def finish(work: Work) -> None:
    """Wait until ``work`` has ended."""
    while not work.wait(WAIT_SLICE_S):
        pass  # no deadline: a peer may just be slow, and abort() ends this wait
