"""What batch systems grant: Slurm's lists unfolded without asking it, others' files, and what is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddlcore.contracts.allocation import granted_hosts, node_names, tasks_per_node
from ddlcore.contracts.launcher import HostSlots


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vm", ["vm"]),
        ("taurusi[1001-1003,1007]", ["taurusi1001", "taurusi1002", "taurusi1003", "taurusi1007"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[099-101],login,gpu-a", ["n099", "n100", "n101", "login", "gpu-a"]),
        ("r[1-2]n[1-2]x", ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
        ("a.b.c, d", ["a.b.c", "d"]),
    ],
)
def test_node_names(text: str, names: list[str]) -> None:
    """Ranges, leading zeros, several brackets, plain names."""
    assert node_names(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n1-3]", "n[3-1]", "n[]", "n[a-b]", "a,,b", "n[1[2]]", "n[1-999999999]"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    """One line that repeats it."""
    with pytest.raises(ValueError, match=r"list of nodes|more than") as caught:
        node_names(text)
    assert f"'{text}'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2]), ("72(x1)", [72])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    """One count a node."""
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "two", "2x3", "2(x)", "-1", "1,", "1(x999999999)"])
def test_what_is_no_list_of_tasks(text: str) -> None:
    """One line that repeats it."""
    with pytest.raises(ValueError, match="tasks per node"):
        tasks_per_node(text)


# --- what batch systems grant


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with an srun that does nothing."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    return str(srun.parent)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}, [2, 2, 1]),
        (
            {"SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_JOB_CPUS_PER_NODE": "8(x3)"},
            [2, 2, 2],
        ),
        ({"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_JOB_CPUS_PER_NODE": "8(x2),4"}, [8, 8, 4]),
        ({}, [1, 1, 1]),
    ],
)
def test_slots_of_slurm_nodes(variables: dict[str, str], slots: list[int], programs: str) -> None:
    """Tasks where some were asked for, else cores."""
    granted = granted_hosts({**JOB, **variables, "PATH": programs})
    assert granted == [HostSlots(f"n{number}", count) for number, count in zip((1, 2, 3), slots)]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not"),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, "does not fit the 3 nodes"),
        (
            {"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "1(x2)"},
            "does not fit the 3 nodes of SLURM_JOB_NODELIST=n[1-3];",
        ),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "two"}, "no list of tasks per node"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun has started `ddl run` itself, 4 times"),
        ({"PATH": "/nowhere"}, "no srun is on PATH"),
    ],
)
def test_what_is_no_allocation(variables: dict[str, str], text: str, programs: str) -> None:
    """One line that says what is wrong and what next."""
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        granted_hosts({**JOB, "PATH": programs, **variables})
    assert "\n" not in str(caught.value)


def test_one_task_may_call_ddl_run(programs: str) -> None:
    """srun -n 1 ddl run, and a shell by srun --pty, are as good as a batch script."""
    job = {**JOB, "PATH": programs, "SLURM_STEP_ID": "0"}
    assert len(granted_hosts({**job, "SLURM_STEP_NUM_TASKS": "1"})) == 3
    assert len(granted_hosts({**job, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PTY_PORT": "1"})) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LSB_DJOB_HOSTFILE", "a\na\nb\n"),
        ("PBS_NODEFILE", "a\nb\na\n"),
        ("COBALT_NODEFILE", "a\na\n\nb"),
        ("PE_HOSTFILE", "a 2 all.q@a UNDEFINED\nb 1 all.q@b UNDEFINED\n"),
    ],
)
def test_lists_in_files(name: str, text: str, tmp_path: Path) -> None:
    """Slots of a host add up; hosts keep their order."""
    (tmp_path / "hosts").write_text(text)
    assert granted_hosts({name: str(tmp_path / "hosts")}) == [HostSlots("a", 2), HostSlots("b", 1)]


def test_lists_in_variables() -> None:
    """LSF's pairs; and no list at all."""
    assert granted_hosts({"LSB_MCPU_HOSTS": "a 2 b 1"}) == [HostSlots("a", 2), HostSlots("b", 1)]
    assert list(granted_hosts({"LSB_JOBID": "3"})) == []


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"LSB_MCPU_HOSTS": "a 2 b"}, "LSB_MCPU_HOSTS=a 2 b is no list of hosts and slots"),
        ({"LSB_MCPU_HOSTS": "a ² b 1"}, "LSB_MCPU_HOSTS=a ² b 1 is no list of hosts and slots"),
        ({"PBS_NODEFILE": "/nowhere/at/all"}, "PBS_NODEFILE=/nowhere/at/all: No such file"),
        ({"PE_HOSTFILE": "{}"}, "is not HOST SLOTS"),
    ],
)
def test_lists_that_make_no_sense(variables: dict[str, str], text: str, tmp_path: Path) -> None:
    """One line that names the variable."""
    (tmp_path / "hosts").write_text("a\n")
    with pytest.raises(ValueError, match=re.escape(text)):
        granted_hosts({name: value.replace("{}", str(tmp_path / "hosts")) for name, value in variables.items()})
