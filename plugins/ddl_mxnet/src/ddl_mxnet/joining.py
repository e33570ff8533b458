"""Verbs that concern the job itself, after what MXNet's engine still has to hand over."""

from __future__ import annotations

from ddl_mxnet.traffic import Traffic
from ddlcore import api
from ddlcore.api import ProcessSet, current_job

__all__ = ["join", "remove_process_set"]


def join(device: int = -1) -> int:
    """Says that this rank has no more data; blocks until every rank has; returns the last that did.

    What this rank has asked for before is handed over first. ``device`` is accepted for Horovod's sake.
    """
    traffic = current_job().companions.get(Traffic)
    traffic.handed_over()
    last = api.join(device)
    traffic.joined()
    return last


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes a process set out; every rank calls it. False for the global set and for an unregistered one.

    What this rank has asked for before is handed over first.
    """
    current_job().companions.get(Traffic).handed_over()
    return api.remove_process_set(process_set)
