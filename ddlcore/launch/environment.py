"""Decides the environment of each rank: ours, and what the scripts of other libraries expect."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from ddlcore.config import CHILD_MARK, Environment, Settings
from ddlcore.launch.command import ranks_path
from ddlcore.launch.ports import LOOPBACK, free_ports, is_free
from ddlcore.types import Placement

__all__ = [
    "THREAD_VARIABLES",
    "master_port",
    "rank_environments",
    "setting_variables",
    "thread_variables",
    "usable_cores",
]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_variables(environ: Mapping[str, str], cores: int, local_size: int) -> dict[str, str]:
    """The thread counts that the user left open: each rank's share of the host's cores, at least one."""
    share = str(max(1, cores // local_size))
    return {name: share for name in THREAD_VARIABLES if name not in environ}


def setting_variables(settings: Settings) -> dict[str, str]:
    """As environment, what came by flag or config file: ranks read it there. A flag wins over the environment."""
    given: dict[str, str] = {}
    for name, value in settings.items():
        if settings.source(name) in ("flag", "file"):
            given["DDL_" + name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
    return given


def master_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT where the user set it, else a free one. Raises ValueError where theirs is no port, or taken."""
    wanted = environ.get("MASTER_PORT")
    if wanted is None:
        return free_ports(1)[0]
    if not wanted.isdigit() or not 0 < int(wanted) < 65536:
        raise ValueError(f"MASTER_PORT={wanted} is no port; unset it, or set it to one between 1 and 65535")
    if not is_free(int(wanted)):
        raise ValueError(
            f"port {wanted} (MASTER_PORT) is taken; unset it and a free one is chosen, or end what listens there"
        )
    return int(wanted)


def rank_environments(
    environ: Mapping[str, str],
    hosts: Sequence[int],
    job_file: str,
    added: Mapping[str, str],
    port: int,
) -> list[dict[str, str]]:
    """One environment a rank. ``hosts`` is the host index of each, ``added`` the same for all, ``port`` MASTER_PORT's.

    RANK and its kin are what torchrun sets, TF_CONFIG what TensorFlow's multi-worker strategies read.
    """
    workers = [f"{LOOPBACK}:{free}" for free in free_ports(len(hosts), avoid=(port,))]
    base = {name: value for name, value in environ.items() if name != CHILD_MARK}
    base |= {**added, "PATH": ranks_path(environ.get("PATH", os.defpath)), "PYTHONUNBUFFERED": "1"}
    made = []
    for rank in range(len(hosts)):
        placement = Placement(rank, tuple(hosts))
        tf_config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        made.append(
            {
                **base,
                **Environment(placement, job_file).variables(),
                "RANK": str(rank),
                "WORLD_SIZE": str(placement.size),
                "LOCAL_RANK": str(placement.local_rank),
                "LOCAL_WORLD_SIZE": str(placement.local_size),
                "GROUP_RANK": str(placement.hosts[rank]),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port),
                "TF_CONFIG": json.dumps(tf_config),
            }
        )
    return made
