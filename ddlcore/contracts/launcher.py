"""The launcher contract: which commands start the agents of a job on their hosts. A launcher starts nothing itself.

An agent is a ddl process that starts its ranks, watches them, forwards their output, and communicates with ``ddl run``
over the control network. A launcher only returns the commands to execute. So output, exit codes and the summary of a
failure do not depend on the launcher. The rules:

* ``commands`` runs no command and imports no framework. ``--dry-run`` prints the commands that it returns.
* ``argv`` contains no secret. ``StartCommand.task`` says how an agent gets the job's key.
* ``plan.program`` runs one agent, in any directory and environment: the agent receives all other data later. If a shell
  interprets the command, the launcher must quote ``plan.program`` (shlex.join).
* If one command starts several agents, each agent finds its number in a variable of its own environment
  (``StartCommand.number``).
* An agent writes nothing to its stdout and stderr, unless it fails before it has connected to ``ddl run``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["AgentPlace", "HostSlots", "Launcher", "StartCommand", "StartPlan"]


@dataclass(frozen=True)
class HostSlots:
    """A host, and how many ranks may run on the host (slots).

    ``host`` is the name by which the launcher reaches the host.
    """

    host: str
    slots: int


@dataclass(frozen=True)
class AgentPlace:
    """One agent, with its host and the ranks that it must start."""

    index: int  # the agent's position in StartPlan.agents
    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StartPlan:
    """The agents that must be started, and the program that starts one agent.

    The agents are in the order of their hosts. If each rank has its own agent, they are in the order of their ranks.
    """

    agents: tuple[AgentPlace, ...]
    program: tuple[str, ...]  # the command line of one agent; contains no secret
    public: tuple[str, ...]  # for task "public": arguments to append to ``program``, before the agent's index
    directory: str  # the ranks' working directory; agents change to it themselves
    environ: Mapping[str, str]  # environment of the launching process
    settings: Mapping[str, str | int | float | bool]  # the launcher's own settings and the core's


@dataclass(frozen=True)
class StartCommand:
    """One command that is executed on the launching process's host, and the agents that the command starts.

    ``task`` says how these agents get the job's key:

    * ``stdin``: from a line of their standard input. The end of that input tells the agents that the command has ended.
      A command that starts several agents must pass its whole standard input to each agent.
    * ``environment``: from the variable DDL_AGENT in the command's environment. The command must pass this variable to
      the agents, and must not show its value in any argument list.
    * ``public``: the agent creates its own keys. Its arguments contain only public data (an address, a public key), and
      the agent answers with its own public key in a line on stdout. This is for a remote shell that does not forward
      standard input. Such a command starts one agent.
    """

    argv: tuple[str, ...]
    agents: tuple[int, ...]  # indexes into StartPlan.agents
    task: Literal["stdin", "environment", "public"] = "stdin"
    number: tuple[str, ...] = ()  # variables; the first one that is set is the agent's position in ``agents``
    environ: Mapping[str, str] = field(default_factory=dict)  # added to the command's environment
    own: tuple[str, ...] = ()  # prefixes of variables that ranks inherit from the agent, not from `ddl run`
    descriptors: tuple[str, ...] = ()  # variables with the number of an inherited file descriptor, such as PMI_FD


class Launcher(ABC):
    """A way to start agents. The class is built without arguments.

    One thread uses the object, before any agent runs.
    """

    @abstractmethod
    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        """Return commands that together start every agent of ``plan`` exactly once.

        Raises ValueError, with a message of one line, if that is impossible.
        """

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """Return the hosts that a batch system has granted to this job; () if there are none.

        This is called if the user has named no hosts. ``environ``: the environment of the launching process. Raises
        ValueError, with a message of one line, if ``environ`` refers to an allocation that does not exist.
        """
        return ()

    def address(self, host: str, environ: Mapping[str, str]) -> str:
        """Return the network name or address of the host that the launcher calls ``host``."""
        return host.rpartition("@")[2].strip("[]")

    def explain(self, host: str, code: int | None, text: str) -> str:
        """Return one line of text that says why an agent did not connect, and what the user should do.

        ``host``: the agent's host. ``code``: the exit code of the agent's command; None while the command still runs.
        ``text``: the output of the command, with stderr at the end.
        """
        last = text.strip().splitlines()[-1:] or ["it wrote nothing"]
        how = "does not answer" if code is None else f"ended with code {code}"
        return f"{host}: its agent {how}: {last[0].strip()}"

    def proves_end(self, code: int) -> bool:
        """Return whether ``code``, with which a command has ended that started one agent, proves that the agent has ended.

        An elastic job may then go on at once, also without half of its ranks. If the command may end because it has lost
        the connection, as every remote shell does, the agent may still run, and another part of the job go on with it.
        """
        return False
