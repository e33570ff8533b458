"""Joins this process to ddl's job, with the rank, the size and the store that init_process_group was given."""

from __future__ import annotations

import os
import secrets
import socket
from datetime import timedelta
from typing import Any

from ddlcore.api import current_job, is_initialized
from ddlcore.api.framework_groups import has_rank, init_as
from ddlcore.contracts import RankInfo

_LAUNCH, _HOST = "ddl/launch", "ddl/host"
_ONE_HOST, _SEVERAL = "one", "several"


def join_job(store: Any, rank: int, size: int, timeout: timedelta) -> bool:
    """Start ddl's job with the ranks of torch's default group, unless it runs already. Return whether this call did so.

    ``store``: torch's store, by which rank 0 tells the others what the launch is called. ``timeout``: of the group; a
    collective for which a rank waits longer ends the job, with an error that names the ranks that are missing, unless
    DDL_STALL_SHUTDOWN_S says otherwise. Raises ValueError if the job that runs has another rank or size.
    """
    runs = is_initialized()
    if has_rank() or size == 1:
        launch, on_one_host = "", False
    else:
        launch, on_one_host = _meet(store, rank, size, timeout)
    info = RankInfo(rank, size, local_size=size if on_one_host else None, launch=launch)
    init_as(info, "torch.distributed", {"DDL_STALL_SHUTDOWN_S": f"{timeout.total_seconds():g}"})
    assert current_job().size == size
    return not runs


def _meet(store: Any, rank: int, size: int, timeout: timedelta) -> tuple[str, bool]:
    """Return a name for the launch, and whether all ranks are on one host. Both are equal on all ranks."""
    store.set(f"{_HOST}/{rank}", _host())
    if rank == 0:
        keys = [f"{_HOST}/{other}" for other in range(size)]
        store.wait(keys, timeout)
        hosts = {store.get(key) for key in keys}
        store.set(_LAUNCH, f"{secrets.token_hex(8)} {_ONE_HOST if len(hosts) == 1 else _SEVERAL}")
    store.wait([_LAUNCH], timeout)
    launch, _, where = store.get(_LAUNCH).decode().partition(" ")
    return launch, where == _ONE_HOST


def _host() -> str:
    """Return a text that is equal for processes that can reach each other's sockets on this host."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
