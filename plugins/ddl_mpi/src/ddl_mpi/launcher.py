"""Ranks started by the mpiexec of the very MPI that mpi4py loads: one agent a rank, since a rank must descend from its proxy.

Within an allocation of Slurm's srun does it, where that MPI speaks PMI-2 with it; else mpiexec, which knows
allocations itself.
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

__all__ = ["MpiLauncher"]

log = logging.getLogger("ddl")
_TASK = "DDL_AGENT"  # see StartCommand.task
_OWN = (  # what an MPI tells its ranks; PMI_ and MPI_ are MPICH's and its kin's, the rest Open MPI's
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
    """mpiexec, or srun in its place."""

    def __init__(self) -> None:
        self._name = "mpiexec"

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """Those of the batch job that `ddl run` stands in."""
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
        """What the command wrote last that is not a line of its own drawing."""
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
    """Agents in the order of ranks, each of which finds its own by a variable of its MPI's."""
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
    """MPICH's mpiexec and its kin."""
    argv = [
        library.mpiexec,
        "-hosts",
        _host_list(hosts),
        "-np",
        str(len(plan.agents)),
        "-disable-auto-cleanup",  # who is lost, and when the others end, is for `ddl run` to say
        *shlex.split(str(plan.settings["launcher_args"])),
    ]
    remote = _ssh_options(plan)
    return _command(plan, argv, ("PMI_RANK",), {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(remote)} if remote else {})


def _by_prte(plan: StartPlan, library: MpiLibrary, hosts: Sequence[tuple[str, int]]) -> StartCommand:
    """Open MPI's mpirun."""
    argv = [
        library.mpiexec,
        "--host",
        _host_list(hosts),
        "-np",
        str(len(plan.agents)),
        "--map-by",
        ":OVERSUBSCRIBE",
        "--bind-to",
        "none",  # ranks have threads of their own
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
    if len(str(plan.settings["ssh_identity_file"]).split()) > 1:  # both MPIs split what is for ssh at every space
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
    """Whether srun can place these ranks: it numbers them by the allocation's order of nodes, equally many on each."""
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
