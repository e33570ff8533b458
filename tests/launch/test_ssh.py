"""What ssh is called with, and its words in plainer ones."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from ddlcore.builtin.ssh import SshLauncher
from ddlcore.contracts.launcher import AgentPlace, StartPlan

PROGRAM = ("/venv/bin/python", "-c", 'import sys; print("a b")', "/paths", "1.0")


def plan(environ: dict[str, str] | None = None, **settings: str | int) -> StartPlan:
    places = tuple(AgentPlace(i, host, (i,)) for i, host in enumerate(("h1", "me@h2", "[fe80::2]")))
    chosen = {"ssh_port": 0, "ssh_identity_file": "", "launcher_args": "", **settings}
    return StartPlan(places, PROGRAM, ("public", "tcp://1.2.3.4:5", "KEY"), "/dir", environ or {}, chosen)


def test_one_command_a_host() -> None:
    """No terminal, no question, a new host's key accepted and a changed one not, a limit to the wait."""
    commands = SshLauncher().commands(plan())
    assert [command.agents for command in commands] == [(0,), (1,), (2,)]
    assert [command.task for command in commands] == ["stdin"] * 3
    for command, host in zip(commands, ("h1", "me@h2", "fe80::2")):
        *options, name, remote = command.argv
        assert name == host
        assert {"-T", "-oBatchMode=yes", "-oStrictHostKeyChecking=accept-new", "-oConnectTimeout=10"} <= set(options)
        assert shlex.split(remote) == ["exec", *PROGRAM]


def test_an_address_of_another_user() -> None:
    """ssh takes no brackets."""
    place = AgentPlace(0, "me@[fe80::2]", (0,))
    (command,) = SshLauncher().commands(dataclasses.replace(plan(), agents=(place,)))
    assert command.argv[-2] == "me@fe80::2"


def test_settings_become_options() -> None:
    """Port, key, and whatever else the user gives."""
    (command, *_) = SshLauncher().commands(plan(ssh_port=2222, ssh_identity_file="/k y", launcher_args="-J 'a b' -v"))
    assert command.argv[:1] == ("ssh",)
    assert command.argv[-9:-2] == ("-p", "2222", "-i", "/k y", "-J", "a b", "-v")


def test_another_remote_shell() -> None:
    """It may pass no standard input on: what the agent is told is no secret, and it answers with a key of its own."""
    commands = SshLauncher().commands(plan({"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh -n ns"}))
    assert [command.task for command in commands] == ["public"] * 3
    assert commands[1].argv[:4] == ("/etc/mpi/kubexec.sh", "-n", "ns", "me@h2")
    assert shlex.split(commands[1].argv[4])[1:] == [*PROGRAM, "public", "tcp://1.2.3.4:5", "KEY", "1"]


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (255, "u@h: Permission denied (publickey,password).", "h: it does not accept our key; try `ssh -p 7 h true`"),
        (255, "Host key verification failed.", "h: its host key is not the known one; see `ssh-keygen -R h`"),
        (255, "ssh: Could not resolve hostname h: Name or service not known", "h: no such host"),
        (255, "ssh: connect to host h port 22: Connection refused", "h: nothing listens for ssh there"),
        (255, "ssh: connect to host h port 22: Connection timed out", "h: it does not answer"),
        (255, "ssh: connect to host h port 22: No route to host", "h: no route leads to it"),
        (127, "bash: line 1: /v/bin/python: No such file or directory", "h: there is no /v/bin/python to run"),
        (126, "bash: line 1: /v/bin/python: Permission denied", "h: there is no /v/bin/python to run"),
        (127, "sh: not found", "h: there is no Python of this environment to run"),
        (1, "x\nModuleNotFoundError: No module named 'ddlcore'", "h: ddlcore is not installed there"),
        (1, "first\nPython 3.9 runs there and 3.11 here\n", "h: its agent ended with code 1: Python 3.9 runs there"),
        (None, "", "h: its agent does not answer: it wrote nothing"),
    ],
)
def test_why_an_agent_never_came(code: int | None, text: str, reason: str) -> None:
    """One line, which begins with the host."""
    launcher = SshLauncher()
    launcher.commands(plan(ssh_port=7))
    explained = launcher.explain("h", code, text)
    assert explained.startswith(reason)
    assert "\n" not in explained


def test_which_codes_prove_that_an_agent_has_ended() -> None:
    """ssh passes the agent's code on, unless it has lost the connection, or a signal has ended it on this host."""
    launcher = SshLauncher()
    launcher.commands(plan(ssh_port=7))
    assert [code for code in (-15, -9, 0, 1, 127, 137, 255) if launcher.proves_end(code)] == [0, 1, 127, 137]
    launcher.commands(plan({"OMPI_MCA_plm_rsh_agent": "kubexec.sh"}))
    assert not any(launcher.proves_end(code) for code in (0, 1, 137)), "kubectl exec ends with 1 if its stream breaks"


@pytest.mark.parametrize(
    ("host", "known"), [("me@localhost", "localhost"), ("[::1]", "::1"), ("127.0.0.1", "127.0.0.1")]
)
def test_what_the_network_calls_a_host(host: str, known: str) -> None:
    """Without the user, without brackets."""
    assert SshLauncher().address(host, {}) == known
