"""Asks the environment of this process for its rank, before the job has begun."""

from __future__ import annotations

import os

__all__ = ["get_env_rank_and_size"]

_LAUNCHERS = ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_")


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, as its launcher has told them; (0, 1) if none has.

    Raises RuntimeError if only one of the two is there.
    """
    for launcher in _LAUNCHERS:
        rank, size = (os.environ.get(f"{launcher}{what}") for what in ("RANK", "SIZE"))
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"Could not determine process rank and size: only one of {launcher}RANK and {launcher}SIZE found in environment"
            )
    return 0, 1
