"""Agents started by srun, one a node of the allocation that `ddl run` stands in."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from ddlcore.contracts.allocation import granted_hosts, slurm_nodes
from ddlcore.contracts.launcher import HostSlots, Launcher, StartCommand, StartPlan

__all__ = ["SrunLauncher"]

_OWN = (
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


class SrunLauncher(Launcher):
    """``srun … PYTHON …``, one command for all nodes; it gives each of its tasks all of its standard input."""

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """The allocation's nodes."""
        return granted_hosts(environ)

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        # srun numbers its tasks in the allocation's order of nodes, whatever the order of --nodelist.
        order = {node: place for place, node in enumerate(slurm_nodes(plan.environ))}
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
        return [StartCommand(command, tuple(place.index for place in agents), number=("SLURM_PROCID",), own=_OWN)]
