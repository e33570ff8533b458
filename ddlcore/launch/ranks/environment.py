"""Decide the environment of each rank: our own variables, and those that scripts for other libraries expect."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.config import CHILD_MARK, TORCHRUN_VARIABLES, Environment, Settings
from ddlcore.control.ports import LOOPBACK, free_ports, is_free
from ddlcore.launch.ranks.command import ranks_path
from ddlcore.types import Placement

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# These describe this host, user, session or process. All others are passed on to other hosts, as in Horovod.
_STAYS = re.compile(
    r"HOME|USER|LOGNAME|SHELL|MAIL|HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_|TERM_SESSION_ID|WINDOWID"
    r"|SSH_\w+|XDG_\w+|DBUS_\w+|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|KRB5CCNAME|INVOCATION_ID|JOURNAL_STREAM"
    r"|BASH_FUNC_.*|.*\W.*"
    r"|SLURM_(PROCID|NODEID|LOCALID|TASK_PID|GTIDS|CPU_BIND\w*|LAUNCH_NODE_IPADDR|SRUN_COMM_\w+|TOPOLOGY_ADDR\w*)"
    r"|PMI_\w+|PMIX_\w+|DDL_(RANK|HOST_INDEXES|JOB_FILE|ADDRESS|LAUNCHED_BY|TIMELINE_DIR|AGENT|INIT_PID)"
)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_variables(environ: Mapping[str, str], cores: int, local_size: int) -> dict[str, str]:
    """Return the variables for thread counts that the user has not set, as shares of the host's ``cores``.

    The share is the same for each of the ``local_size`` ranks of the host, and at least one.
    """
    share = str(max(1, cores // local_size))
    return {name: share for name in THREAD_VARIABLES if name not in environ}


def setting_variables(settings: Settings) -> dict[str, str]:
    """Return the settings that were given by flag or config file, as environment variables for the ranks.

    So a flag takes precedence over the variable that the user has set.
    """
    given: dict[str, str] = {}
    for name, value in settings.items():
        if settings.source(name) in ("flag", "file"):
            given["DDL_" + name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
    return given


def wanted_port(environ: Mapping[str, str]) -> int:
    """Return MASTER_PORT if the user set it, otherwise 0. Raises ValueError if it is no port number."""
    wanted = environ.get("MASTER_PORT", "1")
    if not wanted.isdecimal() or not 0 < int(wanted) < 65536:
        raise ValueError(f"MASTER_PORT={wanted} is no port; unset it, or set it to one between 1 and 65535")
    return int(environ.get("MASTER_PORT", "0"))


def master_port(environ: Mapping[str, str]) -> int:
    """Return MASTER_PORT if the user set it, otherwise a free port.

    Raises ValueError if the user's value is no port number or the port is in use.
    """
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
    """The facts about one host that decide the environment of its ranks."""

    job_file: str = ""  # "": the agent of the host fills it in
    address: str = ""  # address at which other hosts reach it; "": there are no other hosts
    ports: tuple[int | str, ...] = ()  # free ports of that host, one for each of its ranks; (): find them here
    cores: int = 1
    launcher: str = ""  # name of the launcher that starts its ranks; "": `ddl run` itself
    timeline_dir: str = ""  # as in Environment; agents use directories of their own


def shared_environment(environ: Mapping[str, str], added: Mapping[str, str], torch_env: bool = True) -> dict[str, str]:
    """Return the variables that all ranks share: those of ``environ``, and those of ``added``, which take precedence.

    ``environ`` is the environment of the launching process. PATH is extended as ``ranks_path`` says, and
    PYTHONUNBUFFERED is set. Without ``torch_env``, torchrun's variables in ``environ`` are left out.
    """
    out = {CHILD_MARK, *(() if torch_env else TORCHRUN_VARIABLES)}
    base = {name: value for name, value in environ.items() if name not in out}
    return base | {**added, "PATH": ranks_path(environ.get("PATH", os.defpath)), "PYTHONUNBUFFERED": "1"}


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that other hosts get: all that do not describe this host, user or session."""
    return {name: value for name, value in environ.items() if not _STAYS.fullmatch(name)}


def own_environments(
    hosts: Sequence[int],
    places: Sequence[HostPlace],
    port: int | str,
    torch_env: bool = True,
    elastic: bool = False,
) -> list[dict[str, str]]:
    """Return, for each rank, the variables that differ between ranks.

    ``hosts`` holds the host index of each rank, ``places`` describes each host, and ``port`` is MASTER_PORT. RANK and
    the related variables are those that torchrun sets, and are left out without ``torch_env``; TF_CONFIG is what
    multi-worker strategies read. ``elastic``: the job goes on without ranks that are lost.
    """
    workers = _workers(hosts, places, port)
    made = []
    for rank, host in enumerate(hosts):
        placement = Placement(rank, tuple(hosts))
        tf_config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        place = places[host]
        ours = Environment(placement, place.job_file, place.address, place.launcher, place.timeline_dir, elastic)
        values = (
            rank,
            placement.size,
            placement.local_rank,
            placement.local_size,
            host,
            places[hosts[0]].address or LOOPBACK,
            port,
        )
        theirs = dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True)) if torch_env else {}
        made.append({**ours.variables(), **theirs, "TF_CONFIG": json.dumps(tf_config)})
    return made


def late_environment(
    placement: Placement, place: HostPlace, master: str, port: int | str, torch_env: bool = True
) -> dict[str, str]:
    """Return the variables that only one process gets, which is started while the other ranks of an elastic job train.

    ``placement`` has the ranks that there were so far, and ``place`` is the new one's place on its host. ``master`` and
    ``port`` are MASTER_ADDR and MASTER_PORT. TF_CONFIG is not set, because its readers cannot take in another worker.
    """
    ours = Environment(placement, place.job_file, place.address, place.launcher, place.timeline_dir, True)
    rank, host = placement.rank, placement.hosts[placement.rank]
    values = (rank, placement.size, placement.local_rank, placement.local_size, host, master or LOOPBACK, port)
    theirs = dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True)) if torch_env else {}
    return {**ours.variables(), **theirs}


def _workers(hosts: Sequence[int], places: Sequence[HostPlace], port: int | str) -> list[str]:
    """Return for each rank an "address:port" at which a library of the training script may listen; the port is free."""
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
    """Return the complete environment of each rank of a job whose ranks are all on this host."""
    shared = shared_environment(environ, added)
    return [{**shared, **own} for own in own_environments(hosts, (HostPlace(job_file),), port)]
