"""Python objects from one rank to all, and from all to all."""

from __future__ import annotations

from typing import Any

from ddl_mxnet.autograd import OPERATIONS
from ddlcore.api import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of ``root_rank`` on every rank, picklable there; its bytes are checked before they are used."""
    return OPERATIONS.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all members, in rank order."""
    return OPERATIONS.allgather_object(obj, name, process_set)
