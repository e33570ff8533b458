"""The verbs for MXNet's arrays (a first part)."""

from __future__ import annotations

import weakref
from typing import Any

from ddl_mxnet.engine import EngineOperations, Recurrence
from ddlcore.api import ProcessSet, current_job, global_process_set, resolve_op

__all__ = ["OPERATIONS", "allreduce_"]

OPERATIONS = EngineOperations()
_recurrences: weakref.WeakKeyDictionary[Any, dict[Any, Recurrence]] = weakref.WeakKeyDictionary()


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """``tensor`` itself, which MXNet's engine reduces in place; returns at once, as any operator of MXNet."""
    how: dict[str, Any] = {
        "op": resolve_op(op, average),
        "prescale_factor": float(prescale_factor),
        "postscale_factor": float(postscale_factor),
        "process_set": process_set,
    }
    if name is None:
        OPERATIONS.allreduce_async(tensor, output=tensor, **how)
        return tensor
    job = current_job()
    Recurrence(OPERATIONS, tensor, name, job, **how).start(priority)
    return tensor
