"""The functions ``join`` and ``remove_process_set`` for MXNet.

Both functions first wait until MXNet's engine has handed over all queued operations to ddl.
"""

from __future__ import annotations

from ddl_mxnet.traffic import EngineTraffic
from ddlcore import api
from ddlcore.api import ProcessSet, current_job


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, wait until every rank has joined, and return the last rank that joined.

    Before that, wait until MXNet's engine has handed over to ddl all collectives that this rank has called. ``device``
    is ignored; it exists for compatibility with Horovod.
    """
    traffic = current_job().companion(EngineTraffic)
    traffic.handed_over()
    last = api.join(device)
    traffic.joined()
    return last


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove ``process_set``, and return whether it was removed. Every rank must call this function.

    The result is False for the global process set and for a process set that is not registered. Before it removes the
    process set, the function waits until MXNet's engine has handed over to ddl all collectives that this rank has
    called.
    """
    current_job().companion(EngineTraffic).handed_over()
    return api.remove_process_set(process_set)
