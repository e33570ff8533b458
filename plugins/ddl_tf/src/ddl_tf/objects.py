"""Sends Python objects from one rank to all, or from all ranks to all.

The objects are sent during the call, even while a graph is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddl_tf.autograd import OPERATIONS
from ddl_tf.errors import translating
from ddlcore.api import ProcessSet, global_process_set


@translating
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object ``obj`` of the rank ``root_rank``, on every member. The root's object must be picklable.

    The received bytes are verified before they are unpickled. The result is ready when the call returns, even while a
    graph is built. ``session`` is accepted for compatibility with Horovod and not used.
    """
    return OPERATIONS.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function with one argument, the object, which it passes to ``broadcast_object``.

    The returned function may be called many times. For the arguments of this function, see ``broadcast_object``.
    """

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@translating
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return a list with the object ``obj`` of every member, in rank order.

    ``session`` is accepted for compatibility with Horovod and not used.
    """
    return OPERATIONS.allgather_object(obj, name, process_set)
