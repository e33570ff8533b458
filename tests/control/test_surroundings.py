"""What a process sees of where it runs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from ddlcore.control.probe import open_endpoints, split_endpoint
from ddlcore.control.surroundings import host_name, kin, lineage

CHILD = (
    "import json; from ddlcore.control.surroundings import host_name, kin, lineage; "
    "print(json.dumps([lineage(), host_name(), kin()]))"
)


@pytest.mark.skipif(sys.platform != "linux", reason="command lines of parents are read from /proc")
def test_a_child_sees_its_parents_and_the_same_host() -> None:
    """Nearest first, through a shell; host and process ids are one with its parent's."""
    command = ["sh", "-c", f"{sys.executable} -c '{CHILD}'; true", "as-a-launcher"]
    parents, host, family = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=160).stdout)
    assert parents[0] == command
    assert parents[1:] == [_own_command(), *lineage()]
    assert (host, family) == (host_name(), kin())
    assert host.startswith(socket.gethostname())


def _own_command() -> list[str]:
    with open("/proc/self/cmdline", encoding="utf-8") as file:
        return file.read().rstrip("\0").split("\0")


def test_open_endpoints_are_those_where_somebody_listens() -> None:
    """In the order they were given, with our own address; refused ones and those without a route are left out."""
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        second.listen()
        there = f"tcp://127.0.0.1:{second.getsockname()[1]}"
        closed = f"tcp://127.0.0.1:{first.getsockname()[1]}"
        assert open_endpoints([closed, "ipc://@ddl-nobody-is-here", there]) == [(there, "127.0.0.1")]
    assert split_endpoint("tcp://[fd00::1]:17") == ("fd00::1", 17)
