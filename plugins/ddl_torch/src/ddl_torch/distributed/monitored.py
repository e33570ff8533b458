"""The monitored barrier of torch.distributed: it names the ranks that do not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from ddl_torch.distributed.meeting import named

_KNOW_S = 10.0  # for the other ranks, all together, to read that all have come


def wait_for_all(store: Any, rank: int, size: int, patience: timedelta, wait_all_ranks: bool) -> None:
    """Wait until all ranks have called this. Raises RuntimeError on all ranks if some do not within ``patience``.

    ``store``: holds nothing but what these calls write. ``wait_all_ranks``: whether the error of rank 0 names all missing
    ranks, or only the first one. The errors begin as Gloo's do: there are programs that look for these words.
    """
    store.set(str(rank), "here")
    missing: list[int] = []
    if rank == 0:
        missing = _missing(store, size, patience, wait_all_ranks)
        store.set("over", ",".join(map(str, missing)))
        if not missing:  # the store may end with this process, so the others must have read this before it goes on
            deadline_s = time.monotonic() + _KNOW_S
            for other in range(1, size):
                _is_there(store, f"{other} knows", _until(deadline_s))
    elif _is_there(store, "over", 2 * patience):
        missing = [int(other) for other in store.get("over").decode().split(",") if other]
        store.set(f"{rank} knows", "yes")
    else:
        missing = [0]
    if missing:
        raise RuntimeError(_not_passed(rank, missing, round(1e3 * patience.total_seconds())))


def _missing(store: Any, size: int, patience: timedelta, wait_all_ranks: bool) -> list[int]:
    """Return the ranks that have not come within ``patience``; [0] if rank 0 has no time left to wait for any other."""
    deadline_s = time.monotonic() + patience.total_seconds()
    missing: list[int] = []
    for rank in range(1, size):
        if time.monotonic() >= deadline_s and not wait_all_ranks:
            return [0]
        if not _is_there(store, str(rank), _until(deadline_s)):
            missing.append(rank)
            if not wait_all_ranks:
                break
    return missing


def _until(deadline_s: float) -> timedelta:
    """Return the time that is left. Stores take 0 for no limit, so it is never less than a millisecond."""
    return timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))


def _not_passed(rank: int, missing: list[int], patience_ms: int) -> str:
    """Return the words of the error of a monitored barrier on ``rank``."""
    if rank > 0:
        return (
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0: {named(missing)} did not call it within {patience_ms} ms"
        )
    if missing == [0]:
        return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {patience_ms} ms."
    return f"[Rank 0]: {named(missing).capitalize()} failed to pass monitoredBarrier in {patience_ms} ms"


def _is_there(store: Any, key: str, patience: timedelta) -> bool:
    """Wait until ``store`` has ``key``, for at most ``patience``, and return whether it has."""
    try:
        store.wait([key], patience)
    except RuntimeError:
        return False
    return True
