"""Decide the environment of each rank: ddl's own variables, and variables that scripts for other libraries expect."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddlcore.config.loading import Settings
from ddlcore.config.table import CHILD_MARK
from ddlcore.control.ports import LOOPBACK, free_ports, is_free
from ddlcore.launch.ranks.command import ranks_path
from ddlcore.process.environment import TORCHRUN_VARIABLES, Environment
from ddlcore.types import Placement

# What the setting rank_variables can tell a rank, and where it is found.
FACTS: Mapping[str, Callable[[Placement, str], object]] = {
    "rank": lambda placement, _: placement.rank,
    "size": lambda placement, _: placement.size,
    "local_rank": lambda placement, _: placement.local_rank,
    "local_size": lambda placement, _: placement.local_size,
    "cross_rank": lambda placement, _: placement.cross_rank,
    "cross_size": lambda placement, _: placement.cross_size,
    "address": lambda _, address: address,
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# Variables that describe this host, user, session or process. All others are passed on to other hosts, as in Horovod.
_STAYS = re.compile(
    r"HOME|USER|LOGNAME|SHELL|MAIL|HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_|TERM_SESSION_ID|WINDOWID"
    r"|SSH_\w+|XDG_\w+|DBUS_\w+|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|KRB5CCNAME|INVOCATION_ID|JOURNAL_STREAM"
    r"|BASH_FUNC_.*|.*\W.*"
    r"|SLURM_(PROCID|NODEID|LOCALID|TASK_PID|GTIDS|CPU_BIND\w*|LAUNCH_NODE_IPADDR|SRUN_COMM_\w+|TOPOLOGY_ADDR\w*)"
    r"|PMI_\w+|PMIX_\w+|DDL_(RANK|HOST_INDEXES|JOB_FILE|ADDRESS|LAUNCHED_BY|TIMELINE_DIR|AGENT|INIT_PID)"
)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_variables(environ: Mapping[str, str], cores: int, local_size: int) -> dict[str, str]:
    """Return values for the variables of thread counts that are not set in ``environ``.

    Each value is ``cores``, the number of the host's CPU cores, divided by ``local_size``, the number of the host's
    ranks. Each value is at least 1.
    """
    share = str(max(1, cores // local_size))
    return {name: share for name in THREAD_VARIABLES if name not in environ}


def setting_variables(settings: Settings) -> dict[str, str]:
    """Return the settings that were given by a flag or in a config file, as environment variables for the ranks.

    In the ranks, these values replace the variables that the user has set, so a flag takes precedence over a variable.
    """
    given: dict[str, str] = {}
    for name, value in settings.items():
        if settings.source(name) in ("flag", "file"):
            given["DDL_" + name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
    return given


def wanted_port(environ: Mapping[str, str]) -> int:
    """Return the value of MASTER_PORT, or 0 if the user has not set this variable.

    Raises ValueError if the value is not a port number.
    """
    wanted = environ.get("MASTER_PORT", "1")
    if not wanted.isdecimal() or not 0 < int(wanted) < 65536:
        raise ValueError(f"MASTER_PORT={wanted} is no port; unset it, or set it to one between 1 and 65535")
    return int(environ.get("MASTER_PORT", "0"))


def master_port(environ: Mapping[str, str]) -> int:
    """Return the value of MASTER_PORT, or a free port if the user has not set this variable.

    Raises ValueError if the value is not a port number or if the port is in use.
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
class RankVariables:
    """Which variables of other libraries tell a rank its place: those of torchrun, and those that the user has named.

    ``named`` has pairs of a variable and a key of ``FACTS``.
    """

    torchrun: bool = True
    named: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> RankVariables:
        """Return what ``settings`` ask for. Raises ValueError for a value of ``rank_variables`` that is malformed."""
        named = []
        for part in settings.names("rank_variables"):
            name, _, fact = (word.strip() for word in part.partition("="))
            if fact not in FACTS or not name.isidentifier() or name.startswith("DDL_"):
                raise ValueError(f"rank_variables: {part!r} is not of the form NAME=FACT; FACT: {', '.join(FACTS)}")
            named.append((name, fact))
        return cls(bool(settings["torch_env"]), tuple(named))

    def values(self, placement: Placement, address: str, master: str, port: int | str) -> dict[str, str]:
        """Return the variables of the rank that ``placement`` describes, which runs on the host at ``address``.

        ``master`` and ``port`` are the values of MASTER_ADDR and MASTER_PORT.
        """
        host = placement.hosts[placement.rank]
        torchrun = (
            placement.rank,
            placement.size,
            placement.local_rank,
            placement.local_size,
            host,
            master or LOOPBACK,
            port,
        )
        theirs = dict(zip(TORCHRUN_VARIABLES, map(str, torchrun), strict=True)) if self.torchrun else {}
        return theirs | {name: str(FACTS[fact](placement, address or LOOPBACK)) for name, fact in self.named}


@dataclass(frozen=True)
class HostFacts:
    """The data about one host that the environment of its ranks depends on."""

    job_file: str = ""  # path of the job file; "": the agent of the host adds it
    address: str = ""  # address at which other hosts reach the host; "": there are no other hosts
    ports: tuple[int | str, ...] = ()  # free ports of the host, one for each of its ranks; (): find them on this host
    cores: int = 1
    launcher: str = ""  # name of the launcher that starts the ranks of the host; "": `ddl run` itself
    timeline_dir: str = ""  # directory for parts of a timeline; "": no timeline, or the agent adds a directory


def shared_environment(environ: Mapping[str, str], added: Mapping[str, str], torch_env: bool = True) -> dict[str, str]:
    """Return the variables that are the same for all ranks.

    These are the variables in ``environ``, the environment of the launching process, and the variables in ``added``,
    which take precedence. PATH is the result of ``ranks_path``, and PYTHONUNBUFFERED is set. If ``torch_env`` is false,
    torchrun's variables in ``environ`` are left out.
    """
    out = {CHILD_MARK, *(() if torch_env else TORCHRUN_VARIABLES)}
    base = {name: value for name, value in environ.items() if name not in out}
    return base | {**added, "PATH": ranks_path(environ.get("PATH", os.defpath)), "PYTHONUNBUFFERED": "1"}


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in ``environ`` that the ranks on other hosts get.

    Variables that describe this host, user, session or process are left out.
    """
    return {name: value for name, value in environ.items() if not _STAYS.fullmatch(name)}


def own_environments(
    hosts: Sequence[int],
    facts: Sequence[HostFacts],
    port: int | str,
    told: RankVariables = RankVariables(),
    elastic: bool = False,
) -> list[dict[str, str]]:
    """Return, for each rank, the environment variables that differ between ranks.

    ``hosts`` has the host index of each rank, ``facts`` describes each host, and ``port`` is the value of MASTER_PORT.
    The result contains ddl's own variables, those of ``told`` (RANK and the other variables that torchrun sets, for
    example), and TF_CONFIG, which multi-worker strategies read. ``elastic`` means that the job continues if ranks are
    lost.
    """
    workers = _workers(hosts, facts, port)
    made = []
    for rank, host in enumerate(hosts):
        placement = Placement(rank, tuple(hosts))
        tf_config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        host_facts = facts[host]
        ours = Environment(
            placement, host_facts.job_file, host_facts.address, host_facts.launcher, host_facts.timeline_dir, elastic
        )
        theirs = told.values(placement, host_facts.address, facts[hosts[0]].address, port)
        made.append({**ours.variables(), **theirs, "TF_CONFIG": json.dumps(tf_config)})
    return made


def late_environment(
    placement: Placement, host_facts: HostFacts, master: str, port: int | str, told: RankVariables = RankVariables()
) -> dict[str, str]:
    """Return the variables of one process that is started while the other ranks of an elastic job already train.

    The result has only the variables that differ between ranks. ``placement`` has the rank of the process, and the host
    index of each rank (-1 if it was not started yet). ``host_facts`` describes the host of the process. ``master`` and
    ``port`` are the values of MASTER_ADDR and MASTER_PORT; if ``master`` is "", the loopback address is used. TF_CONFIG
    is not set, because the strategies that read TF_CONFIG cannot add a worker later. ``told`` says which variables of
    other libraries are set.
    """
    ours = Environment(
        placement, host_facts.job_file, host_facts.address, host_facts.launcher, host_facts.timeline_dir, True
    )
    return {**ours.variables(), **told.values(placement, host_facts.address, master, port)}


def _workers(hosts: Sequence[int], facts: Sequence[HostFacts], port: int | str) -> list[str]:
    """Return, for each rank, an "address:port" with a free port, at which a library of the script may listen."""
    missing = sum(not facts[host].ports for host in hosts)
    found = iter(free_ports(missing, avoid=(port,) if isinstance(port, int) else ()))
    ports = [iter(one.ports) for one in facts]
    workers = []
    for host in hosts:
        address = facts[host].address or LOOPBACK
        free = next(ports[host]) if facts[host].ports else next(found)
        workers.append(f"[{address}]:{free}" if ":" in address else f"{address}:{free}")
    return workers
