"""Agents started by srun, one a node of the allocation that `ddl run` stands in; the nodes and their slots come from it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from ddlcore.builtin.clusters import in_step
from ddlcore.builtin.slurm_text import node_names, tasks_per_node
from ddlcore.contracts.launcher import HostSlots, Launcher, StartCommand, StartPlan

__all__ = ["SrunLauncher", "allocated_nodes", "refuse_misuse"]

OWN = (
    "SLURM",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)
_OPTIONS = (
    "--ntasks-per-node=1",
    "--overlap",  # the batch script's own step, or a shell's, may hold what the job has
    "--overcommit",
    "--cpu-bind=none",  # the agent's ranks are to have all of the job's cores, not a task's
    "--mpi=none",
    "--export=ALL",  # also where the job was submitted with none
    "--kill-on-bad-exit=0",  # who is lost, and when the others end, is for `ddl run` to say
    "--no-kill",
)
_SCONTROL_S = 10.0


class SrunLauncher(Launcher):
    """``srun … PYTHON …``, one command for all nodes; it gives each of its tasks all of its standard input."""

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """The allocation's nodes, each with as many slots as tasks were asked for, or else cores."""
        refuse_misuse(environ)
        nodes = allocated_nodes(environ)
        by_tasks = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
        names = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
        name = next((name for name in (names if by_tasks else names[::-1]) if name in environ), "")
        counts = tasks_per_node(environ[name]) if name else [1] * len(nodes)
        if len(counts) != len(nodes):
            raise ValueError(
                f"{name}={environ[name]} does not fit the {len(nodes)} nodes of SLURM_JOB_NODELIST="
                f"{environ['SLURM_JOB_NODELIST']}; unset what is not of this job, or say by -H where to run"
            )
        return [HostSlots(node, count) for node, count in zip(nodes, counts)]

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        refuse_misuse(plan.environ)
        # srun numbers its tasks in the allocation's order of nodes, whatever the order of --nodelist.
        order = {node: place for place, node in enumerate(allocated_nodes(plan.environ))}
        strange = [place.host for place in plan.agents if place.host not in order]
        if strange:
            raise ValueError(
                f"{', '.join(strange)} is no node of this allocation ({', '.join(order)}); "
                "name its nodes by -H, or add --launcher ssh"
            )
        agents = sorted(plan.agents, key=lambda place: order[place.host])
        names = ",".join(place.host for place in agents)
        count = len(agents)
        argv = ["srun", f"--nodes={count}", f"--ntasks={count}", f"--nodelist={names}", *_OPTIONS]
        argv += shlex.split(str(plan.settings["launcher_args"]))
        command = (*argv, *plan.program)
        return [StartCommand(command, tuple(place.index for place in agents), number=("SLURM_PROCID",), own=OWN)]


def refuse_misuse(environ: Mapping[str, str]) -> None:
    """Raises ValueError where srun has started `ddl run` itself several times, and where there is no srun."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    if in_step(environ) and tasks.isdigit() and int(tasks) > 1:
        raise ValueError(
            f"srun has started `ddl run` itself, {tasks} times; call it once, from the batch script without srun, "
            "or start the ranks by `srun python …` without it"
        )
    if shutil.which("srun", path=environ.get("PATH")) is None:
        raise ValueError(
            "SLURM_JOB_ID is set but no srun is on PATH; unset it where there is no allocation, or add --launcher ssh"
        )


def allocated_nodes(environ: Mapping[str, str]) -> list[str]:
    """Names of the allocation's nodes, in its order. Raises ValueError in one line where there is no list of them."""
    text = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if not text:
        raise ValueError("SLURM_JOB_ID is set but SLURM_JOB_NODELIST is not; unset it where there is no allocation")
    try:
        return node_names(text)
    except ValueError:
        scontrol = shutil.which("scontrol")
        if scontrol is None:
            raise
        shown = subprocess.run(
            [scontrol, "show", "hostnames", text], capture_output=True, text=True, timeout=_SCONTROL_S
        ).stdout.split()
        if not shown:
            raise
        return shown
