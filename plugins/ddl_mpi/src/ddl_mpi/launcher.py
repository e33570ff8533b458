"""Start ranks with the mpiexec that belongs to the MPI library that mpi4py loads.

One agent is started for each rank, because MPI requires that each rank is a descendant of a process that mpiexec has
started for this rank. In an allocation of Slurm, srun starts the agents if MPI and srun both support PMI-2. In all
other cases mpiexec starts the agents, and mpiexec itself detects allocations.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import groupby

from ddl_mpi.library import MpiLibrary, find_library
from ddlcore.contracts.allocation import granted_hosts, slurm_nodes
from ddlcore.contracts.launcher import HostSlots, Launcher, StartCommand, StartPlan
from ddlcore.errors import PluginError

log = logging.getLogger("ddl")
_TASK = "DDL_AGENT"  # the variable with the agent's task, see StartCommand.task
_OWN = (  # prefixes of the variables that MPI sets for its ranks: PMI and MPI by MPICH's family, the rest by Open MPI
    "PMI_",
    "PMI2_",
    "MPI_LOCAL",
    "MPIR_",
    "HYDI_",
    "I_MPI_",
    "PMIX_",
    "OMPI_",
    "PRTE_",
    "SLURM",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
_LIST_S = 10.0


class MpiLauncher(Launcher):
    """The launcher that starts agents with mpiexec, or with srun."""

    def __init__(self) -> None:
        self._name = "mpiexec"

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """Return the hosts and slots of the batch system's allocation in which `ddl run` runs."""
        return granted_hosts(environ)

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        try:
            library = find_library()
        except PluginError as error:
            raise ValueError(f"--backend mpi: {error}") from None
        hosts = [(host, len(list(places))) for host, places in groupby(plan.agents, key=lambda place: place.host)]
        if library.name != "openmpi" and _srun_serves(plan.environ, hosts):
            self._name = "srun"
            return [self._by_srun(plan, hosts)]
        self._name = library.mpiexec
        return [_by_prte(plan, library, hosts) if library.name == "openmpi" else _by_hydra(plan, library, hosts)]

    def explain(self, host: str, code: int | None, text: str) -> str:
        """Return a message about an agent that did not start, with the last line that the command has written.

        Lines that contain only drawing characters, such as "-----", do not count. ``code`` is the command's exit code,
        or None if the agent does not answer.
        """
        lines = [line.strip() for line in text.splitlines() if line.strip(" -=|")]
        how = "does not answer" if code is None else f"ended with code {code}"
        return f"{host}: {self._name} {how}: {lines[-1] if lines else 'it wrote nothing'}"

    def _by_srun(self, plan: StartPlan, hosts: Sequence[tuple[str, int]]) -> StartCommand:
        argv = [
            "srun",
            "--mpi=pmi2",
            f"--nodes={len(hosts)}",
            f"--ntasks={len(plan.agents)}",
            f"--ntasks-per-node={hosts[0][1]}",
            f"--nodelist={','.join(host for host, _ in hosts)}",
            "--distribution=block",
            "--overlap",
            "--overcommit",
            "--cpu-bind=none",
            "--export=ALL",
            "--kill-on-bad-exit=0",
            *shlex.split(str(plan.settings["launcher_args"])),
        ]
        return _command(plan, argv, ("PMI_RANK", "SLURM_PROCID"), {})


def _command(plan: StartPlan, argv: Sequence[str], number: tuple[str, ...], environ: Mapping[str, str]) -> StartCommand:
    """Return a command that starts all agents in the order of their ranks.

    Each agent reads its number from an environment variable that MPI sets. ``number`` lists the names that this
    variable may have. ``argv`` is the first part of the command; the program of the agents is added to it. ``environ``
    holds further environment variables for the command.
    """
    return StartCommand(
        argv=(*argv, *plan.program),
        agents=tuple(place.index for place in sorted(plan.agents, key=lambda place: place.ranks)),
        task="environment",
        number=number,
        environ=environ,
        own=_OWN,
        descriptors=("PMI_FD", "HYDI_CONTROL_FD"),
    )


def _host_list(hosts: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{host.strip('[]')}:{count}" for host, count in hosts)


def _by_hydra(plan: StartPlan, library: MpiLibrary, hosts: Sequence[tuple[str, int]]) -> StartCommand:
    """Return the start command for the mpiexec of MPICH, and of MPI libraries that are derived from MPICH."""
    argv = [
        library.mpiexec,
        "-hosts",
        _host_list(hosts),
        "-np",
        str(len(plan.agents)),
        "-disable-auto-cleanup",  # `ddl run` decides when the other ranks end after a loss
        *shlex.split(str(plan.settings["launcher_args"])),
    ]
    remote = _ssh_options(plan)
    return _command(plan, argv, ("PMI_RANK",), {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(remote)} if remote else {})


def _by_prte(plan: StartPlan, library: MpiLibrary, hosts: Sequence[tuple[str, int]]) -> StartCommand:
    """Return the start command for the mpirun of Open MPI."""
    argv = [
        library.mpiexec,
        "--host",
        _host_list(hosts),
        "-np",
        str(len(plan.agents)),
        "--map-by",
        ":OVERSUBSCRIBE",
        "--bind-to",
        "none",  # ranks have several threads
        "-x",
        _TASK,
    ]
    if os.geteuid() == 0:
        argv.append("--allow-run-as-root")
        log.info("mpirun refuses to run as root unless it is told to: added --allow-run-as-root")
    remote = _ssh_options(plan)
    if remote:
        argv += ["--prtemca", "plm_ssh_args", " ".join(remote)]
    argv += shlex.split(str(plan.settings["launcher_args"]))
    return _command(plan, argv, ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), {})


def _ssh_options(plan: StartPlan) -> list[str]:
    if len(str(plan.settings["ssh_identity_file"]).split()) > 1:  # both MPIs split ssh's arguments at every space
        raise ValueError(
            f"--ssh-identity-file {plan.settings['ssh_identity_file']}: MPI takes no path with a space; "
            "name the key in ssh's own configuration"
        )
    options = []
    if plan.settings["ssh_port"]:
        options += ["-p", str(plan.settings["ssh_port"])]
    if plan.settings["ssh_identity_file"]:
        options += ["-i", str(plan.settings["ssh_identity_file"])]
    return options


def _srun_serves(environ: Mapping[str, str], hosts: Sequence[tuple[str, int]]) -> bool:
    """Return whether srun can start these ranks.

    ``hosts`` holds pairs of host and number of ranks. srun numbers the ranks in the order of the allocation's nodes,
    and starts equally many ranks on each node. So ``hosts`` must have the same order, and all numbers must be equal.
    srun must also support PMI-2.
    """
    if "SLURM_JOB_ID" not in environ or len({count for _, count in hosts}) != 1:
        return False
    try:
        order = slurm_nodes(environ)
    except ValueError:
        return False
    named = [host for host, _ in hosts]
    if [node for node in order if node in named] != named:
        return False
    srun = shutil.which("srun", path=environ.get("PATH")) or "srun"
    try:
        done = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=_LIST_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "pmi2" in (done.stdout + done.stderr).split()
