"""The launcher contract: by which commands the agents of a job get started on their hosts; it starts nothing itself.

An agent is one process of ours that begins its ranks, watches over them, moves what they write, and
speaks with `ddl run` over the control network. How it was started changes nothing about output, exit
codes or the summary of a failure: a launcher only says what is to be executed. The rules, said once:

* ``commands`` decides; it runs nothing and imports no framework. What it returns is what `--dry-run` prints.
* Nothing secret stands in ``argv``. How an agent gets the job's key is ``StartCommand.task``.
* ``plan.program`` runs one agent, in whatever directory and environment: the rest it is told. Where it
  passes through a shell, the launcher quotes it (shlex.join).
* Where one command starts several agents, each tells by a variable of its own environment which it is
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
    """A host, by the name that the launcher reaches it by, and how many ranks it takes."""

    host: str
    slots: int


@dataclass(frozen=True)
class AgentPlace:
    """One agent, and the ranks that it is to start."""

    index: int  # its place in StartPlan.agents
    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StartPlan:
    """What is to be started. Agents are in the order of hosts, and of ranks where each rank has its own."""

    agents: tuple[AgentPlace, ...]
    program: tuple[str, ...]  # the command that is one agent; holds no secret
    public: tuple[str, ...]  # what goes behind it, and behind that the agent's index, where task is "public"
    directory: str  # the ranks' working directory; agents change to it themselves
    environ: Mapping[str, str]  # the launching process's own
    settings: Mapping[str, str | int | float | bool]  # the provider's own rows and the core's


@dataclass(frozen=True)
class StartCommand:
    """One command, executed on the launching process's host, and the agents that come of it.

    ``task`` is how they get the job's key:

    * ``stdin``: as a line of their standard input, whose end then says that the command is gone. A
      command that starts several must give each of them all of its own standard input.
    * ``environment``: in the variable DDL_AGENT of the command's environment, which it must carry to
      them without its value showing in any argument list.
    * ``public``: what they need stands in their arguments, being no secret (an address, a public key);
      each answers with a public key of its own by a line on stdout. For a remote shell that passes no
      standard input on. Such a command starts one agent.
    """

    argv: tuple[str, ...]
    agents: tuple[int, ...]  # indexes into StartPlan.agents
    task: Literal["stdin", "environment", "public"] = "stdin"
    number: tuple[str, ...] = ()  # variables, the first that an agent has says which of ``agents`` it is, from 0
    environ: Mapping[str, str] = field(default_factory=dict)  # added to the command's environment
    own: tuple[str, ...] = ()  # prefixes of variables that ranks get from their agent, not from `ddl run`
    descriptors: tuple[str, ...] = ()  # variables that name an open file which ranks inherit, such as PMI_FD


class Launcher(ABC):
    """A way to start agents. Built without arguments, used by one thread, before anything runs."""

    @abstractmethod
    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        """What to execute so that every agent of ``plan`` runs once.

        Raises ValueError, in one line, where that cannot be.
        """

    def hosts(self, environ: Mapping[str, str]) -> Sequence[HostSlots]:
        """The hosts that the surroundings grant, for a user who named none; () where they grant none.

        Raises ValueError, in one line, where ``environ`` speaks of an allocation that is not there.
        """
        return ()

    def address(self, host: str, environ: Mapping[str, str]) -> str:
        """The name or address by which the network knows what the launcher calls ``host``."""
        return host.rpartition("@")[2].strip("[]")

    def explain(self, host: str, code: int | None, text: str) -> str:
        """Why an agent never came, in one line that says what next.

        ``host``: its host; ``code``: the exit code of its command, None where that still runs;
        ``text``: what the command wrote, stderr last.
        """
        last = text.strip().splitlines()[-1:] or ["it wrote nothing"]
        how = "does not answer" if code is None else f"ended with code {code}"
        return f"{host}: its agent {how}: {last[0].strip()}"
