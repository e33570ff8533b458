"""Who am I, by what launchers set: one table for each of them, read in the order of the providers' priorities.

Where the names of a launch come from is said beside each: two launches that run at the same time
must never have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ddlcore.contracts.allocation import in_step, tasks_per_node
from ddlcore.contracts.cluster import Cluster, RankInfo, Surroundings

__all__ = [
    "Flux",
    "Horovod",
    "Hydra",
    "Jsrun",
    "Mvapich",
    "OpenMpi",
    "Pals",
    "Plain",
    "Pmix",
    "Slurm",
    "SlurmShell",
    "Torchrun",
]

_Names = tuple[str, ...]  # of one thing, the first that is set counts


class _ByVariables(Cluster):
    """A launcher that says everything by variables."""

    word = ""  # for messages
    signs: _Names = ()  # that it has started this process, if one of them is set; the rest must be there then
    rank: _Names = ()
    size: _Names = ()
    local_rank: _Names = ()
    local_size: _Names = ()
    host: _Names = ()

    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """As ``Cluster.rank_info``."""
        variables = around.variables
        if not self._started(variables):
            return None
        rank_name, rank = self._required(variables, self.rank)
        size_name, size = self._required(variables, self.size)
        _below(rank_name, rank, size_name, size)
        local_rank_name, local_rank = self._optional(variables, self.local_rank)
        local_size_name, local_size = self._optional(variables, self.local_size)
        if local_rank is not None and local_size is not None:
            _below(local_rank_name, local_rank, local_size_name, local_size)
        if local_size is not None and local_size > size:
            raise ValueError(
                f"{local_size_name}={local_size} is more than {size_name}={size}; both are {self.word}'s: "
                f"start the script by one {self.word} alone"
            )
        return RankInfo(rank, size, local_rank, local_size, _first(variables, self.host), self.launch(around))

    def launch(self, around: Surroundings) -> str:
        """The name of this launch."""
        return ""

    def _started(self, variables: Mapping[str, str]) -> bool:
        return any(name in variables for name in self.signs)

    def _required(self, variables: Mapping[str, str], names: _Names) -> tuple[str, int]:
        name, value = self._optional(variables, names)
        if value is None:
            sign = next(sign for sign in self.signs if sign in variables)
            raise ValueError(
                f"{names[0]} is not set although {sign} is; {self.word} sets both: "
                f"start the script by {self.word}, or unset {sign}"
            )
        return name, value

    def _optional(self, variables: Mapping[str, str], names: _Names) -> tuple[str, int | None]:
        for name in names:
            if name in variables:
                text = variables[name].strip()
                if not (text.isascii() and text.isdecimal()):
                    raise ValueError(
                        f"{name}={variables[name]!r} is no whole number; {self.word} sets it: leave it alone, "
                        "or unset what it set"
                    )
                return name, int(text)
        return "", None


def _below(name: str, value: int, bound_name: str, bound: int) -> None:
    if value >= bound:
        raise ValueError(
            f"{name}={value} is not below {bound_name}={bound}; one of them is not of this launch: unset the wrong one"
        )


def _first(variables: Mapping[str, str], names: _Names) -> str:
    return next((variables[name] for name in names if variables.get(name)), "")


def _joined(variables: Mapping[str, str], names: Sequence[str]) -> str:
    """The values of those of ``names`` that are set, with a mark where one is not; "" where none is."""
    values = [variables.get(name, "") for name in names]
    return ":".join(values) if any(values) else ""


def _store_of_rank_0(around: Surroundings) -> str:
    """MASTER_ADDR and MASTER_PORT; an address that means another machine on each host goes with the host's name."""
    address = around.variables.get("MASTER_ADDR", "")
    inner = address == "localhost" or address.startswith("127.") or address == "::1"
    where = _joined(around.variables, ("MASTER_ADDR", "MASTER_PORT"))
    return f"{around.host}:{where}" if inner else where


class Horovod(_ByVariables):
    """Its own launcher; a job has one rendezvous server, and its port is nobody else's."""

    word = "horovodrun"
    signs = rank = ("HOROVOD_RANK",)
    size = ("HOROVOD_SIZE",)
    local_rank = ("HOROVOD_LOCAL_RANK",)
    local_size = ("HOROVOD_LOCAL_SIZE",)
    host = ("HOROVOD_HOSTNAME",)

    def launch(self, around: Surroundings) -> str:
        """By the address of its rendezvous server."""
        return _joined(around.variables, ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"))


class Torchrun(_ByVariables):
    """A run id is a name of the user's choice, "none" where there is none: the address of rank 0's store goes with it."""

    word = "torchrun"
    signs = ("TORCHELASTIC_RUN_ID",)
    rank = ("RANK",)
    size = ("WORLD_SIZE",)
    local_rank = ("LOCAL_RANK",)
    local_size = ("LOCAL_WORLD_SIZE",)
    host = ("GROUP_RANK",)

    def launch(self, around: Surroundings) -> str:
        """By run id, store and how often it was restarted."""
        run, restarts = (
            around.variables.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        )
        return f"{run}:{_store_of_rank_0(around)}:{restarts}"


class OpenMpi(_ByVariables):
    """From release 5 on a PMIx namespace names the launch; before, a job id in a variable of its run-time layer."""

    word = "mpirun"
    signs = rank = ("OMPI_COMM_WORLD_RANK",)
    size = ("OMPI_COMM_WORLD_SIZE",)
    local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    host = ("PMIX_HOSTNAME",)

    def launch(self, around: Surroundings) -> str:
        """By namespace, else by job id."""
        return _first(around.variables, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"))


class Pmix(_ByVariables):
    """Bare PMIx says the rank only; the size is told by whom it serves."""

    word = "the PMIx launcher"
    signs = rank = ("PMIX_RANK",)
    size = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PRTE_NUM_PROCS", "WORLD_SIZE")
    local_rank = ("SLURM_LOCALID", "LOCAL_RANK")
    host = ("SLURM_NODEID", "PMIX_HOSTNAME")

    def launch(self, around: Surroundings) -> str:
        """By namespace."""
        return _first(around.variables, ("PMIX_NAMESPACE",))


class Hydra(_ByVariables):
    """mpiexec of MPICH and of those made from it. It sets no name: the proxy that started us was told one."""

    word = "mpiexec"
    signs = rank = ("PMI_RANK",)
    size = ("PMI_SIZE",)
    local_rank = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID", "FLUX_TASK_LOCAL_ID")
    local_size = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    host = ("PMI_HOSTNAME", "SLURM_NODEID")

    def launch(self, around: Surroundings) -> str:
        """By where mpiexec listens to its proxies, which is in their command line; under srun by its step."""
        for command in around.lineage():
            if command and "proxy" in command[0].rpartition("/")[2]:
                told = dict(pairwise(command))
                where = told.get("--control-port") or _joined(told, ("--upstream-host", "--upstream-port"))
                if where:
                    return where
        # Not from an mpiexec, then: others serve the same protocol.
        return _slurm_step(around.variables) or _first(around.variables, ("PALS_APID", "FLUX_JOB_ID", "PMI_JOBID"))


class Mvapich(_ByVariables):
    """mpirun_rsh of MVAPICH2."""

    word = "mpirun_rsh"
    signs = rank = ("MV2_COMM_WORLD_RANK",)
    size = ("MV2_COMM_WORLD_SIZE",)
    local_rank = ("MV2_COMM_WORLD_LOCAL_RANK",)
    local_size = ("MV2_COMM_WORLD_LOCAL_SIZE",)

    def launch(self, around: Surroundings) -> str:
        """By the process that it spawned us from."""
        names = ("MPISPAWN_MPIRUN_HOST", "MPISPAWN_MPIRUN_PORT", "MPISPAWN_MPIRUN_ID")
        return _joined(around.variables, names) or _slurm_step(around.variables)


class Flux(_ByVariables):
    """flux run. Its ids are those of one instance, which a URI names."""

    word = "flux run"
    signs = rank = ("FLUX_TASK_RANK",)
    size = ("FLUX_JOB_SIZE",)
    local_rank = ("FLUX_TASK_LOCAL_ID",)

    def launch(self, around: Surroundings) -> str:
        """By job id."""
        return _joined(around.variables, ("FLUX_JOB_ID", "FLUX_KVS_NAMESPACE"))


class Pals(_ByVariables):
    """mpiexec and aprun of HPE Cray's PALS."""

    word = "PALS"
    signs = rank = ("PALS_RANKID",)
    size = ("PALS_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    local_rank = ("PALS_LOCAL_RANKID",)
    local_size = ("PALS_LOCAL_SIZE",)
    host = ("PALS_NODEID",)

    def launch(self, around: Surroundings) -> str:
        """By application id."""
        return _first(around.variables, ("PALS_APID",))


class Jsrun(_ByVariables):
    """jsrun of LSF."""

    word = "jsrun"
    signs = rank = ("JSM_NAMESPACE_RANK",)
    size = ("JSM_NAMESPACE_SIZE",)
    local_rank = ("JSM_NAMESPACE_LOCAL_RANK",)
    local_size = ("JSM_NAMESPACE_LOCAL_SIZE",)

    def launch(self, around: Surroundings) -> str:
        """By job, and by the step of it where there are several."""
        step = _first(around.variables, ("PMIX_NAMESPACE", "JSM_SMPI_PORT", "LS_JOBPID"))
        job = _first(around.variables, ("LSB_JOBID",))
        return f"{job}:{step}" if job or step else ""


class Slurm(_ByVariables):
    """A task of a job step. The shell of a batch script has most of its variables, and is none: see SlurmShell."""

    word = "srun"
    signs = ("SLURM_STEP_ID", "SLURM_STEPID")
    rank = ("SLURM_PROCID",)
    size = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank = ("SLURM_LOCALID",)
    host = ("SLURM_NODEID",)

    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """As ``Cluster.rank_info``."""
        rank_info = super().rank_info(around)
        return None if rank_info is None else replace(rank_info, local_size=_tasks_here(around.variables))

    def launch(self, around: Surroundings) -> str:
        """By job, step and how often the job was requeued."""
        return _slurm_step(around.variables)

    def _started(self, variables: Mapping[str, str]) -> bool:
        return in_step(variables)


class SlurmShell(Cluster):
    """The shell of a batch script, of an allocation, or of srun --pty: one process, whatever was asked for."""

    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """A world of one, with a warning where more tasks were asked for."""
        variables = around.variables
        tasks = variables.get("SLURM_NTASKS", "")
        if "SLURM_JOB_ID" not in variables or in_step(variables) or not tasks.isdecimal() or int(tasks) < 2:
            return None
        return RankInfo(
            0,
            1,
            warning=f"SLURM_NTASKS={tasks}, but this process is no task of a job step: it is a world of one; "
            f"start {tasks} ranks by `srun python …` or `ddl run python …`",
        )


def _tasks_here(variables: Mapping[str, str]) -> int | None:
    """This node's tasks of the step; None where that is not said."""
    text, node = variables.get("SLURM_STEP_TASKS_PER_NODE", ""), variables.get("SLURM_NODEID", "")
    if not text or not node.isdecimal():
        return None
    try:
        return tasks_per_node(text)[int(node)]
    except (ValueError, IndexError):
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={text} has no entry for SLURM_NODEID={node}; srun sets both: "
            "start the script by one srun alone"
        ) from None


def _slurm_step(variables: Mapping[str, str]) -> str:
    """Job, step and requeues; "" outside of a step."""
    if not in_step(variables):
        return ""
    step = f"{_first(variables, ('SLURM_JOB_ID', 'SLURM_JOBID'))}.{_first(variables, Slurm.signs)}"
    cluster = variables.get("SLURM_CLUSTER_NAME", "")
    return f"{cluster}{'-' if cluster else ''}{step}-r{variables.get('SLURM_RESTART_COUNT', '0')}"


class Plain(_ByVariables):
    """RANK and WORLD_SIZE, as many scripts and schedulers set them; rank 0's store names the launch."""

    word = "whoever sets RANK"
    signs = rank = ("RANK",)
    size = ("WORLD_SIZE",)
    local_rank = ("LOCAL_RANK",)
    local_size = ("LOCAL_WORLD_SIZE",)
    host = ("GROUP_RANK", "NODE_RANK")

    def launch(self, around: Surroundings) -> str:
        """By MASTER_ADDR and MASTER_PORT."""
        return _store_of_rank_0(around)
