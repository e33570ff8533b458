"""Host discovery: what a script prints, and which nodes of a Slurm allocation are up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddlcore.builtin.discovery import ScriptDiscovery, SlurmDiscovery
from ddlcore.contracts.launcher import HostSlots


def script(text: str, slots: int = 1) -> ScriptDiscovery:
    one = ScriptDiscovery()
    one.begin({}, {"host_discovery_script": text, "slots_per_host": slots})
    return one


def test_what_a_script_prints() -> None:
    """With and without slots, blank lines, addresses, users."""
    found = script("printf 'node1:4\\n\\n node2 \\nme@10.0.0.3:2\\n[fe80::2]:3\\n'", 7).hosts()
    assert found == [
        HostSlots("node1", 4),
        HostSlots("node2", 7),
        HostSlots("me@10.0.0.3", 2),
        HostSlots("[fe80::2]", 3),
    ]
    assert script("true").hosts() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exit 2", "ended with code 2: it wrote nothing to stderr"),
        ("echo one >&2; echo two >&2; exit 1", "ended with code 1: two"),
        ("/no/such/script", "/no/such/script"),
        ("echo a:0", "'a:0' is not of the form HOST or HOST:SLOTS"),
        ("echo a:x", "'a:x' is not of the form HOST or HOST:SLOTS"),
        ("echo a b", "'a b' is not of the form HOST or HOST:SLOTS"),
        ("echo a:1; echo a:2", "'a:2' is listed twice"),
    ],
)
def test_a_script_that_fails(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="--host-discovery-script") as raised:
        script(text).hosts()
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_no_script() -> None:
    with pytest.raises(ValueError, match="say which one by --host-discovery-script FILE"):
        script("")


SHOWN = """NodeName=n1 Arch=x86_64 State=ALLOCATED ThreadsPerCore=1
NodeName=n2 Arch=x86_64 State=DOWN* ThreadsPerCore=1
NodeName=n3 Arch=x86_64 State=MIXED+DRAIN ThreadsPerCore=1
NodeName=n4 Arch=x86_64 State=IDLE ThreadsPerCore=1
"""


def test_the_nodes_of_an_allocation_that_are_up(tmp_path: Path) -> None:
    """A node that is down, drains, or is not listed is left out."""
    for name, text in (("srun", "#!/bin/sh\n"), ("scontrol", f"#!/bin/sh\ncat <<'END'\n{SHOWN}END\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-5]",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2(x5)",
        "SLURM_NTASKS": "10",
        "SLURM_JOB_NUM_NODES": "5",
    }
    one = SlurmDiscovery()
    one.begin(environ, {})
    assert one.hosts() == [HostSlots("n1", 2), HostSlots("n4", 2)]
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'slurm_load_node error' >&2\nexit 1\n")
    with pytest.raises(ValueError, match="scontrol show node: slurm_load_node error"):
        one.hosts()
    with pytest.raises(ValueError, match="this is no Slurm job"):
        SlurmDiscovery().begin({}, {})
