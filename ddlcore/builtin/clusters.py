"""Reads a process's rank from the environment variables that other launchers set: one class per launcher.

The classes are tried in the order of their priority. Each class also finds a name for the launch, where a launch is one
start of all ranks. The name is the same on all ranks of one launch. Two launches that run at the same time must never
have the same name. The docstring of each class or of its method ``launch`` says which variables the name consists of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ddlcore.contracts.allocation import in_step, tasks_per_node
from ddlcore.contracts.cluster import Cluster, RankInfo, Surroundings

_Names = tuple[str, ...]  # environment variables that hold the same value; the first one that is set is used


class _ByVariables(Cluster):
    """The base class for launchers that set the rank and the size in environment variables of each process.

    A subclass names these variables.
    """

    word = ""  # the launcher's name in messages
    # If at least one variable of ``signs`` is set, this launcher has started the process, and must have set the rank
    # and the size, too.
    signs: _Names = ()
    rank: _Names = ()
    size: _Names = ()
    local_rank: _Names = ()
    local_size: _Names = ()
    host: _Names = ()

    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """Return the rank info of this process, or None if this launcher has not started the process.

        Raises ValueError if the variables are incomplete or contradict each other.
        """
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
        """Return the name of this launch, see ``RankInfo.launch``. The name is "" if the launcher gives none."""
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
    """Return the values of the environment variables ``names``, joined with colons.

    A variable that is not set counts as empty. The result is "" if all variables are empty.
    """
    values = [variables.get(name, "") for name in names]
    return ":".join(values) if any(values) else ""


def _store_of_rank_0(around: Surroundings) -> str:
    """Return the address of rank 0's store: the values of MASTER_ADDR and MASTER_PORT, joined with a colon.

    If MASTER_ADDR is a loopback address, the result begins with this host's name and a colon, because every host has
    the same loopback address. The result is "" if neither variable is set.
    """
    address = around.variables.get("MASTER_ADDR", "")
    inner = address == "localhost" or address.startswith("127.") or address == "::1"
    where = _joined(around.variables, ("MASTER_ADDR", "MASTER_PORT"))
    return f"{around.host}:{where}" if inner else where


class Horovod(_ByVariables):
    """Horovod's own launcher, recognised by the environment variables of its ranks.

    The address of a launch's rendezvous server serves as the name of the launch. This name is unique, because each
    launch has its own server, and two servers on one host cannot use the same port.
    """

    word = "horovodrun"
    signs = rank = ("HOROVOD_RANK",)
    size = ("HOROVOD_SIZE",)
    local_rank = ("HOROVOD_LOCAL_RANK",)
    local_size = ("HOROVOD_LOCAL_SIZE",)
    host = ("HOROVOD_HOSTNAME",)

    def launch(self, around: Surroundings) -> str:
        """Return the address and the port of this launch's rendezvous server, joined with a colon."""
        return _joined(around.variables, ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"))


class Torchrun(_ByVariables):
    """The launcher torchrun, recognised by the environment variables of its ranks.

    The run id alone cannot be the name of a launch: the user chooses the run id, and its default is "none", so two
    launches may have the same run id. Therefore the name also contains the address of rank 0's store.
    """

    word = "torchrun"
    signs = ("TORCHELASTIC_RUN_ID",)
    rank = ("RANK",)
    size = ("WORLD_SIZE",)
    local_rank = ("LOCAL_RANK",)
    local_size = ("LOCAL_WORLD_SIZE",)
    host = ("GROUP_RANK",)

    def launch(self, around: Surroundings) -> str:
        """Return the run id, the address of rank 0's store, and the number of restarts, joined with colons."""
        run, restarts = (
            around.variables.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        )
        return f"{run}:{_store_of_rank_0(around)}:{restarts}"


class OpenMpi(_ByVariables):
    """The launcher mpirun, recognised by the environment variables of its ranks.

    The name of a launch is the PMIx namespace from release 5 on. In earlier releases, the name is the job id of
    mpirun's run-time layer.
    """

    word = "mpirun"
    signs = rank = ("OMPI_COMM_WORLD_RANK",)
    size = ("OMPI_COMM_WORLD_SIZE",)
    local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    host = ("PMIX_HOSTNAME",)

    def launch(self, around: Surroundings) -> str:
        """Return the PMIx namespace if it is set, otherwise the job id of mpirun's run-time layer."""
        return _first(around.variables, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"))


class Pmix(_ByVariables):
    """Any launcher that uses the PMIx protocol, recognised by the environment variables of its ranks.

    PMIx itself gives a process only its rank. The size is read from the launcher's own variables.
    """

    word = "the PMIx launcher"
    signs = rank = ("PMIX_RANK",)
    size = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PRTE_NUM_PROCS", "WORLD_SIZE")
    local_rank = ("SLURM_LOCALID", "LOCAL_RANK")
    host = ("SLURM_NODEID", "PMIX_HOSTNAME")

    def launch(self, around: Surroundings) -> str:
        """Return the PMIx namespace; "" if it is not set."""
        return _first(around.variables, ("PMIX_NAMESPACE",))


class Hydra(_ByVariables):
    """The launcher mpiexec of MPICH or of a derivative of MPICH, recognised by the environment variables of its ranks.

    mpiexec sets no variable that could be the name of a launch. So the name is read from the command line of the
    proxy, which is the process that mpiexec starts on each host to start the ranks.
    """

    word = "mpiexec"
    signs = rank = ("PMI_RANK",)
    size = ("PMI_SIZE",)
    local_rank = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID", "FLUX_TASK_LOCAL_ID")
    local_size = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    host = ("PMI_HOSTNAME", "SLURM_NODEID")

    def launch(self, around: Surroundings) -> str:
        """Return the address at which mpiexec listens to its proxies. The proxy's command line contains this address.

        If no ancestor of this process is such a proxy, return the job step of srun. If there is no job step either,
        return the job id that another launcher has set, or "" if there is none.
        """
        for command in around.lineage():
            if command and "proxy" in command[0].rpartition("/")[2]:
                told = dict(pairwise(command))
                where = told.get("--control-port") or _joined(told, ("--upstream-host", "--upstream-port"))
                if where:
                    return where
        # No mpiexec has started this process. Other launchers use the same protocol, and so set the same variables.
        return _slurm_step(around.variables) or _first(around.variables, ("PALS_APID", "FLUX_JOB_ID", "PMI_JOBID"))


class Mvapich(_ByVariables):
    """The launcher mpirun_rsh of MVAPICH2, recognised by the environment variables of its ranks.

    ``launch`` says which variables the name of a launch consists of.
    """

    word = "mpirun_rsh"
    signs = rank = ("MV2_COMM_WORLD_RANK",)
    size = ("MV2_COMM_WORLD_SIZE",)
    local_rank = ("MV2_COMM_WORLD_LOCAL_RANK",)
    local_size = ("MV2_COMM_WORLD_LOCAL_SIZE",)

    def launch(self, around: Surroundings) -> str:
        """Return the host, port and id of the mpirun_rsh that has started this process, joined with colons.

        If these three variables are not set, return the job step of srun.
        """
        names = ("MPISPAWN_MPIRUN_HOST", "MPISPAWN_MPIRUN_PORT", "MPISPAWN_MPIRUN_ID")
        return _joined(around.variables, names) or _slurm_step(around.variables)


class Flux(_ByVariables):
    """The launcher flux run, recognised by the environment variables of its ranks.

    A job id is unique only within one Flux instance. So the name of a launch contains not only the job id, but also the
    job's namespace in Flux's key-value store.
    """

    word = "flux run"
    signs = rank = ("FLUX_TASK_RANK",)
    size = ("FLUX_JOB_SIZE",)
    local_rank = ("FLUX_TASK_LOCAL_ID",)

    def launch(self, around: Surroundings) -> str:
        """Return the job id and the job's namespace in Flux's key-value store, joined with a colon."""
        return _joined(around.variables, ("FLUX_JOB_ID", "FLUX_KVS_NAMESPACE"))


class Pals(_ByVariables):
    """The launchers mpiexec and aprun of HPE Cray's PALS, recognised by the environment variables of their ranks."""

    word = "PALS"
    signs = rank = ("PALS_RANKID",)
    size = ("PALS_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    local_rank = ("PALS_LOCAL_RANKID",)
    local_size = ("PALS_LOCAL_SIZE",)
    host = ("PALS_NODEID",)

    def launch(self, around: Surroundings) -> str:
        """Return the application id of PALS; "" if it is not set."""
        return _first(around.variables, ("PALS_APID",))


class Jsrun(_ByVariables):
    """The launcher jsrun of LSF, recognised by the environment variables of its ranks."""

    word = "jsrun"
    signs = rank = ("JSM_NAMESPACE_RANK",)
    size = ("JSM_NAMESPACE_SIZE",)
    local_rank = ("JSM_NAMESPACE_LOCAL_RANK",)
    local_size = ("JSM_NAMESPACE_LOCAL_SIZE",)

    def launch(self, around: Surroundings) -> str:
        """Return the job id of LSF and an id of the job step, joined with a colon.

        The id of the step is needed because one job may have several steps.
        """
        step = _first(around.variables, ("PMIX_NAMESPACE", "JSM_SMPI_PORT", "LS_JOBPID"))
        job = _first(around.variables, ("LSB_JOBID",))
        return f"{job}:{step}" if job or step else ""


class Slurm(_ByVariables):
    """The launcher srun, recognised by the environment variables of its ranks, which are the tasks of a job step.

    The shell that runs a batch script has most of the variables of a task, but this shell is not a task: see
    SlurmShell.
    """

    word = "srun"
    signs = ("SLURM_STEP_ID", "SLURM_STEPID")
    rank = ("SLURM_PROCID",)
    size = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank = ("SLURM_LOCALID",)
    host = ("SLURM_NODEID",)

    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """Return the rank info of this process, with the number of tasks on this node as ``local_size``.

        Return None if this process is not a task of a job step.
        """
        rank_info = super().rank_info(around)
        return None if rank_info is None else replace(rank_info, local_size=_tasks_here(around.variables))

    def launch(self, around: Surroundings) -> str:
        """Return one text with the job id, the step id and the number of times that Slurm has requeued the job."""
        return _slurm_step(around.variables)

    def _started(self, variables: Mapping[str, str]) -> bool:
        return in_step(variables)


class SlurmShell(Cluster):
    """The shell of a Slurm batch script, of an allocation, or of srun --pty, recognised by its environment variables.

    Such a shell is one process, even if the user requested several tasks. So the shell is a world of one rank.
    """

    def rank_info(self, around: Surroundings) -> RankInfo | None:
        """Return rank 0 of a world of one rank if this process is a shell as described in the docstring of this class.

        The result has a warning, which says how to start several ranks. Return None if this process is no such shell,
        or if the user has not requested several tasks.
        """
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
    """Return how many tasks of the job step run on this node. Return None if Slurm has not set the variables.

    Raises ValueError if the variables contradict each other.
    """
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
    """Return one text with the cluster's name, the job id, the step id and the number of requeues of the job.

    The text is empty if this process is not in a job step.
    """
    if not in_step(variables):
        return ""
    step = f"{_first(variables, ('SLURM_JOB_ID', 'SLURM_JOBID'))}.{_first(variables, Slurm.signs)}"
    cluster = variables.get("SLURM_CLUSTER_NAME", "")
    return f"{cluster}{'-' if cluster else ''}{step}-r{variables.get('SLURM_RESTART_COUNT', '0')}"


class Plain(_ByVariables):
    """Any launcher or script that sets RANK and WORLD_SIZE.

    The name of a launch is the address of rank 0's store.
    """

    word = "the launcher that sets RANK"
    signs = rank = ("RANK",)
    size = ("WORLD_SIZE",)
    local_rank = ("LOCAL_RANK",)
    local_size = ("LOCAL_WORLD_SIZE",)
    host = ("GROUP_RANK", "NODE_RANK")

    def launch(self, around: Surroundings) -> str:
        """Return the address of rank 0's store, in the form that ``_store_of_rank_0`` describes."""
        return _store_of_rank_0(around)
