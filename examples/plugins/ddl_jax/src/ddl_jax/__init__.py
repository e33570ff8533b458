"""ddl's verbs for JAX arrays on the CPU: ``allreduce``, ``allgather``, ``broadcast`` and an asynchronous allreduce.

    import ddl_jax as ddl
    ddl.init()
    gradients = ddl.allreduce(gradients, name="w")

Call the verbs outside of ``jax.jit``; each returns a new array.
"""

from __future__ import annotations

from typing import Any

from ddl_jax.adapter import JaxAdapter
from ddlcore.api import Operations, Waitable, init, rank, shutdown, size
from ddlcore.types import Average, ReduceOp, Sum

__all__ = [
    "Average",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_async",
    "broadcast",
    "init",
    "rank",
    "shutdown",
    "size",
]

_operations = Operations(JaxAdapter())


def allreduce_async(tensor: Any, name: str, op: ReduceOp = Average, compression: str = "none") -> Waitable:
    """Begin an allreduce; ``wait()`` of the returned handle returns the result."""
    return _operations.allreduce_async(tensor, name=name, op=op, compression=compression)


def allreduce(tensor: Any, name: str, op: ReduceOp = Average, compression: str = "none") -> Any:
    """Return the average (or another op, such as the sum) of the arrays of all ranks, which have one shape."""
    return allreduce_async(tensor, name, op, compression).wait()


def allgather(tensor: Any, name: str) -> Any:
    """Return the concatenation of all ranks' arrays, which may differ in their first dimension."""
    return _operations.allgather_async(tensor, name=name).wait()


def broadcast(tensor: Any, root_rank: int, name: str) -> Any:
    """Return the array of ``root_rank`` on every rank."""
    return _operations.broadcast_async(tensor, root_rank=root_rank, name=name).wait()
