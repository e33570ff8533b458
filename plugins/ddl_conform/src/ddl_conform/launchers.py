"""The conformance suite of launchers. To test a launcher, write a subclass that overrides ``make``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pytest

from ddl_conform.standard import StandardSuite
from ddlcore.contracts.launcher import AgentPlace, HostSlots, Launcher, StartCommand, StartPlan
from ddlcore.hooks import LauncherProvider

__all__ = ["LauncherSuite"]

Settings = Mapping[str, str | int | float | bool]
SECRETS = {"DDL_AGENT": "key-4711", "HOROVOD_SECRET_KEY": "key-4712", "AWS_SECRET_ACCESS_KEY": "key-4713"}
PROGRAM = ("/opt/my env/bin/python", "-c", "import sys; print('it''s an agent', \"$HOME\")", "--flag=a b")
PUBLIC = ("tcp://10.0.0.1:7", "public-key-4714")
RUN_S = 60.0
_AGENT = """
import os, pathlib, sys, uuid
variables = sys.argv[2].split(",") if sys.argv[2] else []
number = next((os.environ[name] for name in variables if name in os.environ), "0")
task = sys.stdin.readline().strip() if sys.argv[3] == "stdin" else os.environ.get("DDL_AGENT", "")
pathlib.Path(sys.argv[1], uuid.uuid4().hex).write_text(f"{number} {task}")
"""


class LauncherSuite(StandardSuite):
    """The tests that every launcher must pass. A subclass overrides ``make``, which creates the launcher.

    If the launcher works only within an allocation of a batch system, the subclass also overrides ``surroundings``,
    which returns the environment of such an allocation.

    >>> class TestMine(LauncherSuite):
    ...     def make(self):
    ...         return MyLauncher()
    """

    provider: ClassVar[LauncherProvider | None] = None  # its variables are set to nonsense in one test
    hosts: ClassVar[Sequence[str]] = (
        "node1",
        "node2",
        "node3",
    )  # hosts of the plans; ``surroundings`` must grant them if it grants any
    runs_here: ClassVar[bool] = False  # whether the commands can be executed on this machine, with ``surroundings``

    def make(self) -> Launcher:
        """Return a new object of the launcher to test."""
        raise NotImplementedError(f"{type(self).__name__}.make() must return the launcher to test")

    def settings(self) -> Settings:
        """Return the value of ``StartPlan.settings``: the default settings of the core and of all plugins."""
        from ddlcore.plug.settings import settings_of

        return settings_of({})[0]

    def surroundings(self, folder: Path) -> Mapping[str, str]:
        """Return the environment variables with which the launcher works.

        An override may write scripts into ``folder`` that replace the programs of the launcher's commands, such as
        srun. PATH in the returned environment must then contain the directory of these scripts.
        """
        return {"PATH": _path(os.environ)}

    # --- used by the standard tests

    def plan(self, folder: Path, agents: int, program: Sequence[str] = PROGRAM) -> StartPlan:
        """Return a plan for ``agents`` agents on as many hosts. Each agent starts two ranks.

        If the launcher starts one agent for each rank, the plan has twice as many agents, and each starts one rank.
        ``program`` is the command line of an agent.
        """
        each = 2 if self.provider is not None and self.provider.per_rank else 1
        places = [self.hosts[i // each % len(self.hosts)] for i in range(agents * each)]
        ranks = [(i,) if each > 1 else (2 * i, 2 * i + 1) for i in range(agents * each)]
        return StartPlan(
            agents=tuple(AgentPlace(i, host, own) for i, (host, own) in enumerate(zip(places, ranks))),
            program=tuple(program),
            public=PUBLIC,
            directory="/work/my project",
            environ=MappingProxyType({**self.surroundings(folder), **SECRETS}),
            settings=self.settings(),
        )

    def commands(self, plan: StartPlan) -> list[StartCommand]:
        """Return the commands that a new object of the launcher returns for ``plan``."""
        return list(self.make().commands(plan))

    # --- the standard tests

    def test_every_agent_is_started_once(self, tmp_path: Path) -> None:
        """Every agent is started by exactly one command, and each command has arguments to execute."""
        for agents in range(1, len(self.hosts) + 1):
            plan = self.plan(tmp_path, agents)
            commands = self.commands(plan)
            started = sorted(index for command in commands for index in command.agents)
            assert started == list(range(len(plan.agents))), f"{len(plan.agents)} agents, and started are {started}"
            for command in commands:
                assert command.argv and all(isinstance(word, str) for word in command.argv), f"argv {command.argv}"

    def test_commands_carry_the_program(self, tmp_path: Path) -> None:
        """Each command contains the agent's command line ``plan.program``.

        The words of the command line are separate arguments, or one argument that is quoted for a shell. If the
        command's task is "public", the words of ``plan.public`` and the agent's index follow these words.
        """
        plan = self.plan(tmp_path, len(self.hosts))
        for command in self.commands(plan):
            words = plan.program
            if command.task == "public":
                words = (*words, *plan.public, str(command.agents[0]))
            whole = any(command.argv[i : i + len(words)] == words for i in range(len(command.argv)))
            assert whole or any(shlex.join(words) in word for word in command.argv), (
                f"the program does not stand in {shlex.join(command.argv)}; where a shell reads it, quote it by shlex.join"
            )

    def test_nothing_secret_stands_in_arguments(self, tmp_path: Path) -> None:
        """The arguments of a command do not contain secrets, because all users of a machine can list the arguments.

        The test looks for the values of variables such as DDL_AGENT.
        """
        for command in self.commands(self.plan(tmp_path, len(self.hosts))):
            shown = [name for name, value in SECRETS.items() if any(value in word for word in command.argv)]
            assert not shown, f"the value of {', '.join(shown)} stands in {shlex.join(command.argv)}"

    def test_several_agents_of_a_command_are_told_apart(self, tmp_path: Path) -> None:
        """If a command starts several agents, its ``number`` names a variable from which each agent reads its number.

        The ``task`` of such a command is not "public", because each agent would need arguments of its own.
        """
        for command in self.commands(self.plan(tmp_path, len(self.hosts))):
            if len(command.agents) > 1:
                assert command.number, f"{len(command.agents)} agents of one command, and `number` names no variable"
                assert command.task != "public", "a command that starts several agents cannot give a public task"

    def test_the_same_plan_gives_the_same_commands(self, tmp_path: Path) -> None:
        """The same plan gives the same commands, also in a second call and from another object of the launcher.

        ``commands`` does not change the plan.
        """
        plan = self.plan(tmp_path, len(self.hosts))
        launcher = self.make()
        first = list(launcher.commands(plan))
        assert list(launcher.commands(plan)) == first, "asked again, the launcher gives other commands"
        assert self.commands(plan) == first, "another object of the launcher gives other commands"
        assert plan == self.plan(tmp_path, len(self.hosts)), "the plan was changed"

    def test_granted_hosts_have_slots(self, tmp_path: Path) -> None:
        """``hosts`` returns each host once and with at least one slot, inside and outside an allocation.

        A slot is the place of one rank.
        """
        for environ in ({}, self.surroundings(tmp_path)):
            granted = self._granted(environ)
            assert len({one.host for one in granted}) == len(granted), f"a host twice: {granted}"
            assert all(isinstance(one, HostSlots) and one.host and one.slots > 0 for one in granted), f"{granted}"

    def test_addresses_are_names(self, tmp_path: Path) -> None:
        """``address`` returns only the name or the address of a host, without ``USER@`` and without brackets."""
        launcher, environ = self.make(), self.surroundings(tmp_path)
        assert launcher.address("127.0.0.1", environ) == "127.0.0.1"
        for host in ("me@127.0.0.1", "[::1]"):
            address = launcher.address(host, environ)
            assert address and not set(address) & set("@[] "), f"address({host!r}) is {address!r}"

    def test_commands_run(self, tmp_path: Path) -> None:
        """If the commands are executed on this machine, every agent starts once, with its number and its task.

        The task is the text that an agent gets by standard input or by DDL_AGENT.
        """
        if not self.runs_here:
            pytest.skip("the suite does not say how its commands can be executed here (runs_here, surroundings)")
        found = tmp_path / "agents"
        found.mkdir()
        program = (sys.executable, "-c", _AGENT, str(found))
        plan = self.plan(tmp_path, len(self.hosts), (*program, "", "stdin"))
        kinds = {(",".join(command.number), command.task) for command in self.commands(plan)}
        assert len(kinds) == 1, f"commands of one plan differ in `number` or `task`: {kinds}"
        ((number, task),) = kinds
        commands = self.commands(self.plan(tmp_path, len(self.hosts), (*program, number, task)))
        environ = self.surroundings(tmp_path)  # called once, because it may write programs that the commands then read
        processes = [_begin(command, environ) for command in commands]
        for command, process in zip(commands, processes):
            given = "the task\n" if command.task == "stdin" else None
            _, errors = process.communicate(given, timeout=RUN_S)
            assert process.returncode == 0, f"{shlex.join(command.argv)} ended with {process.returncode}: {errors}"
        agents = sorted(file.read_text() for file in found.iterdir())
        wanted = sorted(
            f"{place} {'' if command.task == 'public' else 'the task'}"
            for command in commands
            for place in range(len(command.agents))
        )
        assert agents == wanted, f"agents that ran, by number and task: {agents}"

    def test_a_failure_is_explained_in_one_line(self) -> None:
        """``explain`` returns one line that names the host, for every output and every exit code of a command."""
        launcher = self.make()
        texts = ("", "\n\n", "one line", "first\nsecond\n", "\x00\ufffd binary\r\n", "no\n" * 10_000)
        for code in (None, 0, 1, 126, 127, 255, -9):
            for text in texts:
                line = launcher.explain("node7", code, text)
                assert "node7" in line, f"explain({code}, {text[:20]!r}) does not name the host: {line[:200]!r}"
                assert "\n" not in line and len(line) < 1000, (
                    f"explain({code}, {text[:20]!r}) is no line: {line[:200]!r}"
                )

    def test_an_allocation_that_is_not_there_is_refused(self) -> None:
        """If the launcher's environment variables contain nonsense, ``hosts`` raises no error other than ValueError.

        The message of a ValueError is one line. ``hosts`` may also return hosts.
        """
        names = self.provider.variables if self.provider is not None else ()
        for value in ("", "nonsense", "/no/such/file", "n[1-", "7"):
            self._granted({"PATH": _path(os.environ), **dict.fromkeys(names, value)})

    def _granted(self, environ: Mapping[str, str]) -> list[HostSlots]:
        refusal = "nothing is wrong"
        granted: list[HostSlots] = []
        try:
            granted = list(self.make().hosts(environ))
        except ValueError as error:
            refusal = str(error)
        assert refusal and "\n" not in refusal, f"hosts() refuses in more than one line: {refusal!r}"
        return granted


def _path(environ: Mapping[str, str]) -> str:
    return environ.get("PATH", os.defpath)


def _begin(command: StartCommand, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    task = {"DDL_AGENT": "the task"} if command.task == "environment" else {}
    return subprocess.Popen(
        command.argv,
        env={**environ, **command.environ, **task},
        stdin=subprocess.PIPE if command.task == "stdin" else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
