"""Runs the commands that start the agents of one job."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from ddlcore.contracts.launcher import Launcher, StartCommand
from ddlcore.control.credentials import Access
from ddlcore.launch.agents.bootstrap import AgentTask, task_text
from ddlcore.launch.agents.started import Started

_LET_GO_S = 2.0  # time from Quit to the end of the command that started the agent


class AgentCommands:
    """The commands that have started the agents of one job. Only the main thread may start commands.

    ``environ`` is the environment of the commands. An agent ends if it hears nothing for ``silence_s`` seconds.
    ``access_of(host)`` returns how an agent on that host reaches the control server. ``answered`` is called with each
    public key that an agent prints.
    """

    def __init__(
        self,
        launcher: Launcher,
        environ: Mapping[str, str],
        silence_s: float,
        access_of: Callable[[str], Access],
        answered: Callable[[str], None],
    ) -> None:
        self._launcher = launcher
        self._environ = environ
        self._silence_s = silence_s
        self._access_of = access_of
        self._answered = answered
        self._started: list[Started] = []

    def start(self, command: StartCommand, host: str, ended: Callable[[Started, int], None]) -> None:
        """Run ``command``, which starts agents on ``host`` and maybe on other hosts. Raises OSError if it cannot be run.

        ``ended`` is called with the exit code when the command has ended, in a thread of its own.
        """
        task = task_text(AgentTask(self._access_of(host), self._silence_s, command.agents, command.number))
        self._started.append(Started(command, task, self._environ, ended=ended, answered=self._answered))

    def of(self, agent: int) -> Started:
        """Return the command that has started agent number ``agent``."""
        return next(started for started in self._started if agent in started.command.agents)

    def explain(self, started: Started, host: str, was_here: bool, code: int | None) -> str:
        """Return why the agent of ``host`` is gone, in words for the user.

        ``was_here``: the agent had reported. ``code``: the exit code of the command; None: it still runs.
        """
        if was_here:
            last = started.text.strip().splitlines()[-1:]
            return f"its agent ended{f': {last[0]}' if last else ''}"
        return self._launcher.explain(host, code, started.text)

    def close(self, here: Collection[int]) -> None:
        """End the commands. Those whose agents are ``here`` have two seconds in which to end by themselves."""
        until_s = time.monotonic() + _LET_GO_S
        for started in self._started:
            is_called = any(agent in here for agent in started.command.agents)
            started.close(max(0.0, until_s - time.monotonic()) if is_called else 0.0)
