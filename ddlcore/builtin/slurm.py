"""Builds the command that starts agents by srun, one on each node of the allocation in which `ddl run` runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from ddlcore.contracts.allocation import granted_hosts, slurm_nodes
from ddlcore.contracts.launcher import HostSlots, Launcher, StartCommand, StartPlan

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
    "--overlap",  # the step of the batch script, or of a shell, may hold all resources of the job
    "--overcommit",
    "--cpu-bind=none",  # the ranks of an agent may use all of the job's cores on the node, not only those of one task
    "--mpi=none",
    "--export=ALL",  # even if the job was submitted with --export=NONE
    "--kill-on-bad-exit=0",  # `ddl run` decides which rank is lost, and when the others end
    "--no-kill",
)


class SrunLauncher(Launcher):
    """A launcher that starts the agents of all nodes by one command, ``srun … PYTHON …``.

    An agent gets the job's key by standard input: srun copies its own standard input to each agent.
    """

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """Return the nodes of the Slurm allocation, each with the number of ranks that may run on it.

        ``environ`` is the environment in which `ddl run` runs.
        """
        return granted_hosts(environ)

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        # srun numbers its tasks in the allocation's order of nodes, not in the order of --nodelist.
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
