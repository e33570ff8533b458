"""Decides the environment of each rank: ours, and what the scripts of other libraries expect."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.config import CHILD_MARK, Environment, Settings
from ddlcore.control.ports import LOOPBACK, free_ports, is_free
from ddlcore.launch.command import ranks_path
from ddlcore.types import Placement

__all__ = [
    "THREAD_VARIABLES",
    "HostPlace",
    "carried",
    "master_port",
    "own_environments",
    "rank_environments",
    "setting_variables",
    "shared_environment",
    "thread_variables",
    "usable_cores",
    "wanted_port",
]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# Of this host, user, session or process alone. All else goes over to other hosts, as with Horovod.
_STAYS = re.compile(
    r"HOME|USER|LOGNAME|SHELL|MAIL|HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_|TERM_SESSION_ID|WINDOWID"
    r"|SSH_\w+|XDG_\w+|DBUS_\w+|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|KRB5CCNAME|INVOCATION_ID|JOURNAL_STREAM"
    r"|BASH_FUNC_.*|.*\W.*"
    r"|SLURM_(PROCID|NODEID|LOCALID|TASK_PID|GTIDS|CPU_BIND\w*|LAUNCH_NODE_IPADDR|SRUN_COMM_\w+|TOPOLOGY_ADDR\w*)"
    r"|PMI_\w+|PMIX_\w+|DDL_(RANK|HOST_INDEXES|JOB_FILE|ADDRESS|LAUNCHED_BY|TIMELINE_DIR|AGENT|INIT_PID)"
)


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


def wanted_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT where the user set it, else 0. Raises ValueError where theirs is no port."""
    wanted = environ.get("MASTER_PORT", "1")
    if not wanted.isdecimal() or not 0 < int(wanted) < 65536:
        raise ValueError(f"MASTER_PORT={wanted} is no port; unset it, or set it to one between 1 and 65535")
    return int(environ.get("MASTER_PORT", "0"))


def master_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT where the user set it, else a free one. Raises ValueError where theirs is no port, or taken."""
    wanted = wanted_port(environ)
    if not wanted:
        return free_ports(1)[0]
    if not is_free(wanted):
        raise ValueError(
            f"port {wanted} (MASTER_PORT) is taken; unset it and a free one is chosen, or end what listens there"
        )
    return wanted


@dataclass(frozen=True)
class HostPlace:
    """What ranks are told of a host."""

    job_file: str = ""  # "": its agent knows
    address: str = ""  # by which other hosts reach it; "": there are none
    ports: tuple[int | str, ...] = ()  # free there, one a rank of it; (): found here
    cores: int = 1
    launcher: str = ""  # by which its ranks are started; "": by `ddl run` itself
    timeline_dir: str = ""  # see Environment; an agent has one of its own


def shared_environment(environ: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """What is the same for all ranks: ``environ``, the launching process's own, with ``added`` to it."""
    base = {name: value for name, value in environ.items() if name != CHILD_MARK}
    return base | {**added, "PATH": ranks_path(environ.get("PATH", os.defpath)), "PYTHONUNBUFFERED": "1"}


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Of ``environ`` what goes over to another host: all but what describes this host, user or session."""
    return {name: value for name, value in environ.items() if not _STAYS.fullmatch(name)}


def own_environments(hosts: Sequence[int], places: Sequence[HostPlace], port: int | str) -> list[dict[str, str]]:
    """What is each rank's own. ``hosts`` is the host index of each, ``places`` tells of each host, ``port`` is MASTER_PORT.

    RANK and its kin are what torchrun sets, TF_CONFIG is what multi-worker strategies read.
    """
    workers = _workers(hosts, places, port)
    made = []
    for rank, host in enumerate(hosts):
        placement = Placement(rank, tuple(hosts))
        tf_config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        made.append(
            {
                **Environment(
                    placement,
                    places[host].job_file,
                    places[host].address,
                    places[host].launcher,
                    places[host].timeline_dir,
                ).variables(),
                "RANK": str(rank),
                "WORLD_SIZE": str(placement.size),
                "LOCAL_RANK": str(placement.local_rank),
                "LOCAL_WORLD_SIZE": str(placement.local_size),
                "GROUP_RANK": str(host),
                "MASTER_ADDR": places[hosts[0]].address or LOOPBACK,
                "MASTER_PORT": str(port),
                "TF_CONFIG": json.dumps(tf_config),
            }
        )
    return made


def _workers(hosts: Sequence[int], places: Sequence[HostPlace], port: int | str) -> list[str]:
    """An address for each rank that another library may listen at."""
    missing = sum(not places[host].ports for host in hosts)
    found = iter(free_ports(missing, avoid=(port,) if isinstance(port, int) else ()))
    ports = [iter(place.ports) for place in places]
    workers = []
    for host in hosts:
        address = places[host].address or LOOPBACK
        free = next(ports[host]) if places[host].ports else next(found)
        workers.append(f"[{address}]:{free}" if ":" in address else f"{address}:{free}")
    return workers


def rank_environments(
    environ: Mapping[str, str],
    hosts: Sequence[int],
    job_file: str,
    added: Mapping[str, str],
    port: int,
) -> list[dict[str, str]]:
    """One whole environment a rank, where all are on this host."""
    shared = shared_environment(environ, added)
    return [{**shared, **own} for own in own_environments(hosts, (HostPlace(job_file),), port)]
