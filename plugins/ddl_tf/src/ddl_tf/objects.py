"""Python objects from one rank to all, and from all to all; the same eagerly and beside a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddl_tf.autograd import OPERATIONS
from ddl_tf.errors import translating
from ddlcore.api import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn"]


@translating
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of ``root_rank`` on every rank, picklable there; its bytes are checked before they are used.

    It is at once, also while a graph is built; ``session`` is accepted for Horovod's sake, and not needed.
    """
    return OPERATIONS.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """``broadcast_object`` of one argument, to be called again and again."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@translating
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all members, in rank order. ``session`` is as in ``broadcast_object``."""
    return OPERATIONS.allgather_object(obj, name, process_set)
