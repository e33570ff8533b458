"""Joins this process to ddl's job, with the rank, the size and the store that init_process_group was given."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ddl_torch.distributed.meeting import meet
from ddlcore.api import current_job, is_initialized
from ddlcore.api.framework_groups import has_rank, init_as
from ddlcore.contracts import RankInfo


def join_job(store: Any, rank: int, size: int, timeout: timedelta) -> bool:
    """Start ddl's job with the ranks of torch's default group, unless it runs already. Return whether this call did so.

    ``store``: torch's store, by which the ranks meet if ddl does not know them yet. ``timeout``: of the group; a
    collective for which a rank waits longer ends the job, with an error that names the ranks that are missing, unless
    DDL_STALL_SHUTDOWN_S says otherwise. Raises ValueError if the job that runs has another rank or size, and
    DeadlineExceeded if some of the ranks do not come within ``timeout``.
    """
    runs = is_initialized()
    defaults = {"DDL_STALL_SHUTDOWN_S": f"{timeout.total_seconds():g}"}
    if has_rank() or size == 1:
        info = RankInfo(rank, size, launch="")
    else:
        meeting = meet(store, rank, size, timeout)
        info = RankInfo(rank, size, local_size=size if meeting.on_one_host else None, launch=meeting.name)
    init_as(info, "torch.distributed", defaults)
    assert current_job().size == size
    return not runs
