"""The command by which srun starts agents, and who gets which ranks; nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddlcore.builtin.allocations import GrantedLauncher
from ddlcore.builtin.slurm import SrunLauncher
from ddlcore.config.loading import load_settings
from ddlcore.contracts.launcher import AgentPlace, HostSlots, StartPlan
from ddlcore.control.credentials import Access
from ddlcore.launch.agents.remote_plan import RemotePlan
from ddlcore.launch.ranks.hosts import Layout
from ddlcore.plug.loader import load_plugins
from ddlcore.plug.registry import Registry

ADDRESS = "tcp://127.0.0.1:4444"
SETTINGS: Mapping[str, str | int | float | bool] = {
    "launcher_args": "--qos=long --gres 'gpu:2'",
    "ssh_port": 0,
    "ssh_identity_file": "",
}


def plan(environ: Mapping[str, str], *hosts: str) -> StartPlan:
    agents = tuple(AgentPlace(index, host, (index,)) for index, host in enumerate(hosts))
    return StartPlan(agents, ("python", "agent"), ("public",), "/work", environ, SETTINGS)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A batch script's, on three nodes."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NTASKS": "6", "PATH": str(tmp_path)}


def test_one_command_for_all_nodes(environ: dict[str, str]) -> None:
    """One task a node, with all of its cores; the user's own arguments come after ours and before the program."""
    (command,) = SrunLauncher().commands(plan(environ, "n1", "n2", "n3"))
    assert command.argv[:4] == ("srun", "--nodes=3", "--ntasks=3", "--nodelist=n1,n2,n3")
    assert command.argv[-5:] == ("--qos=long", "--gres", "gpu:2", "python", "agent")
    assert {"--ntasks-per-node=1", "--cpu-bind=none", "--overlap", "--kill-on-bad-exit=0"} <= set(command.argv)
    assert command.task == "stdin"
    assert command.number == ("SLURM_PROCID",)
    assert "CUDA_VISIBLE_DEVICES" in command.own


def test_agents_are_numbered_as_srun_numbers_tasks(environ: dict[str, str]) -> None:
    """By the allocation's order of nodes, whatever order the user named them in."""
    (command,) = SrunLauncher().commands(plan(environ, "n3", "n1"))
    assert "--nodelist=n1,n3" in command.argv
    assert command.agents == (1, 0)


def test_a_strange_host_is_named(environ: dict[str, str]) -> None:
    """With the nodes there are."""
    with pytest.raises(ValueError, match=r"n9 is no node of this allocation \(n1, n2, n3\)"):
        SrunLauncher().commands(plan(environ, "n1", "n9"))


def test_an_agent_for_a_node_that_comes_back_is_started_alone(environ: dict[str, str]) -> None:
    """The command for it names its node only: agents of the other nodes, and an earlier one of its own, are left alone."""
    registry = load_plugins(load_settings({}))
    chosen = registry.named(Registry.launchers, "srun"), SrunLauncher
    layout = Layout(("n1", "n2", "n3"), (0, 1, 2), -1)
    remote_plan = RemotePlan.plan(
        layout, chosen, load_settings({}, flags={"control_address": ADDRESS}), environ, "/work"
    )
    access = Access(ADDRESS, 1, "s" * 40, "c" * 40, "k" * 40)
    command = remote_plan.late_command(AgentPlace(3, "n2", ()), remote_plan.places, access)
    assert command.argv[:4] == ("srun", "--nodes=1", "--ntasks=1", "--nodelist=n2")
    assert (command.agents, command.task) == ((3,), "stdin"), "the agent reads its number and its keys from stdin"
    assert command.own == remote_plan.commands()[0].own
    assert not any("k" * 40 in argument for argument in command.argv)


def test_other_batch_systems_go_by_ssh(tmp_path: Path) -> None:
    """Their hosts, and ssh's commands and words."""
    (tmp_path / "nodes").write_text("a\na\nb\n")
    environ = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    launcher = GrantedLauncher()
    assert launcher.hosts(environ) == [HostSlots("a", 2), HostSlots("b", 1)]
    commands = launcher.commands(plan(environ, "a", "b"))
    assert [command.argv[0] for command in commands] == ["ssh", "ssh"]
    assert "no such host" in launcher.explain("b", 255, "ssh: Could not resolve hostname b")
