"""ddl's verbs for JAX arrays on the CPU: ``allreduce``, ``allgather``, ``broadcast`` and their asynchronous forms.

    import ddl_jax as ddl
    ddl.init()
    gradients = ddl.allreduce(gradients, name="w")

Call them outside of ``jax.jit``; what they return is a new array.
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
    """Begins an allreduce; ``wait()`` of what it returns gives the result."""
    return _operations.allreduce_async(tensor, name=name, op=op, compression=compression)


def allreduce(tensor: Any, name: str, op: ReduceOp = Average, compression: str = "none") -> Any:
    """The average (or sum) over all ranks of arrays of one shape."""
    return allreduce_async(tensor, name, op, compression).wait()


def allgather(tensor: Any, name: str) -> Any:
    """All ranks' arrays one behind the other; they may differ in their first dimension."""
    return _operations.allgather_async(tensor, name=name).wait()


def broadcast(tensor: Any, root_rank: int, name: str) -> Any:
    """The array of ``root_rank``."""
    return _operations.broadcast_async(tensor, root_rank=root_rank, name=name).wait()
