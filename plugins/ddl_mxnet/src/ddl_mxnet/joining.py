"""Offers ``join`` and ``remove_process_set``, which first wait for the operations still queued in MXNet's engine."""

from __future__ import annotations

from ddl_mxnet.traffic import Traffic
from ddlcore import api
from ddlcore.api import ProcessSet, current_job


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, wait until every rank has joined, and return the last rank that joined.

    First waits until MXNet's engine has handed over to ddl all operations that this rank has called. ``device`` is
    ignored; it exists for compatibility with Horovod.
    """
    traffic = current_job().companion(Traffic)
    traffic.handed_over()
    last = api.join(device)
    traffic.joined()
    return last


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; every rank must call it. Returns False for the global set and for an unregistered set.

    First waits until MXNet's engine has handed over to ddl all operations that this rank has called.
    """
    current_job().companion(Traffic).handed_over()
    return api.remove_process_set(process_set)
