"""Sends Python objects from one rank to all ranks, or from all ranks to all ranks."""

from __future__ import annotations

from typing import Any

from ddl_mxnet.autograd import OPERATIONS
from ddlcore.api import ProcessSet, global_process_set


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send ``obj`` of the rank ``root_rank`` to every member of ``process_set``, and return it on every member.

    The root's object must be picklable. On the other members, ``obj`` is ignored. The bytes that arrive are checked
    before they are unpickled.
    """
    return OPERATIONS.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return a list of the objects that all members of ``process_set`` pass, in rank order.

    Every member must call this function, with a picklable object.
    """
    return OPERATIONS.allgather_object(obj, name, process_set)
