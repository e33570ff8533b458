"""The launcher contract: which commands start the agents of a job on their hosts. A launcher starts nothing itself.

An agent is a ddl process that starts its ranks, watches them, forwards their output, and talks to `ddl run` over the
control network. The way it was started does not affect output, exit codes or the summary of a failure: a launcher only
says which commands to execute. The rules:

* ``commands`` decides; it runs nothing and imports no framework. `--dry-run` prints what it returns.
* ``argv`` contains no secret. ``StartCommand.task`` says how an agent gets the job's key.
* ``plan.program`` runs one agent, in any directory and environment: the agent receives everything else later. If the
  command passes through a shell, the launcher quotes it (shlex.join).
* If one command starts several agents, each agent finds its number in a variable of its own environment
  (``StartCommand.number``).
* An agent writes nothing to its stdout and stderr unless it fails before it has reached `ddl run`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["AgentPlace", "HostSlots", "Launcher", "StartCommand", "StartPlan"]


@dataclass(frozen=True)
class HostSlots:
    """A host, with the name under which the launcher reaches it, and the number of ranks that it takes."""

    host: str
    slots: int


@dataclass(frozen=True)
class AgentPlace:
    """One agent, and the ranks that it is to start."""

    index: int  # its position in StartPlan.agents
    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StartPlan:
    """What is to be started.

    Agents are in the order of their hosts, and of their ranks if each rank has its own agent.
    """

    agents: tuple[AgentPlace, ...]
    program: tuple[str, ...]  # the command line of one agent; contains no secret
    public: tuple[str, ...]  # if task is "public": arguments to append to ``program``; the agent's index follows
    directory: str  # the ranks' working directory; agents change to it themselves
    environ: Mapping[str, str]  # of the launching process
    settings: Mapping[str, str | int | float | bool]  # the launcher's own settings and the core's


@dataclass(frozen=True)
class StartCommand:
    """One command, executed on the launching process's host, and the agents that it starts.

    ``task`` is how they get the job's key:

    * ``stdin``: as a line of their standard input. The end of that input tells them that the command is gone. A command
      that starts several agents must pass the whole of its own standard input to each of them.
    * ``environment``: in the variable DDL_AGENT of the command's environment. The command must pass it to the agents
      without showing its value in any argument list.
    * ``public``: what they need is in their arguments and is no secret (an address, a public key); each agent answers
      with its own public key in a line on stdout. This is for a remote shell that does not forward standard input. Such
      a command starts one agent.
    """

    argv: tuple[str, ...]
    agents: tuple[int, ...]  # indexes into StartPlan.agents
    task: Literal["stdin", "environment", "public"] = "stdin"
    number: tuple[str, ...] = ()  # variables; the first that an agent has is its position in ``agents``, from 0
    environ: Mapping[str, str] = field(default_factory=dict)  # added to the command's environment
    own: tuple[str, ...] = ()  # prefixes of variables that ranks inherit from their agent, not from `ddl run`
    descriptors: tuple[str, ...] = ()  # variables that hold a file descriptor that ranks inherit, such as PMI_FD


class Launcher(ABC):
    """A way to start agents. It is constructed without arguments, and used by one thread, before anything runs."""

    @abstractmethod
    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        """Return the commands that together start every agent of ``plan`` once.

        Raises ValueError, in one line, if that is impossible.
        """

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """Return the hosts that the surroundings grant, for a user who named none; () if they grant none.

        Raises ValueError, in one line, if ``environ`` refers to an allocation that does not exist.
        """
        return ()

    def address(self, host: str, environ: Mapping[str, str]) -> str:
        """Return the network name or address of the host that the launcher calls ``host``."""
        return host.rpartition("@")[2].strip("[]")

    def explain(self, host: str, code: int | None, text: str) -> str:
        """Return one line that says why an agent did not connect, and what to do.

        ``host``: the agent's host; ``code``: the exit code of its command, None while that still runs; ``text``: what
        the command wrote, stderr last.
        """
        last = text.strip().splitlines()[-1:] or ["it wrote nothing"]
        how = "does not answer" if code is None else f"ended with code {code}"
        return f"{host}: its agent {how}: {last[0].strip()}"
