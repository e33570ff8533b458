"""Define the command that starts an agent, and how the launcher passes a task to the agent.

The task tells the agent how to reach the launcher, among other things.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ddlcore.control.credentials import Access, KeyPair
from ddlcore.errors import DdlInternalError
from ddlcore.version import VERSION

VARIABLE = "DDL_AGENT"  # environment variable with the task, if the task is passed by the environment
ANSWER = "ddl-agent-key "  # first word of the line in which an agent that got no secret prints its public key
_PUBLIC = "public"
_LARGEST_BYTES = 1 << 16
_PROGRAM = (
    "import sys; sys.version_info[:2] == ({major}, {minor}) or "
    'sys.exit("Python %d.%d runs there and {major}.{minor} here" % sys.version_info[:2]); '
    'sys.path[:1] = sys.argv.pop(1).split(":"); sys.path.append(sys.argv.pop(1)); '
    "from ddlcore.launch.agents.agent import main; sys.exit(main(sys.argv[1:]))"
)


class AgentTask(msgspec.Struct, frozen=True):
    """The information that an agent needs to begin.

    One command may start several agents with the same task. Each of them then reads its own position in ``agents`` from
    an environment variable: the first of the variables in ``number`` that is set.
    """

    access: Access
    silence_s: float
    agents: tuple[int, ...]  # indexes of all agents that the same command starts
    number: tuple[str, ...] = ()  # variables; the first that is set has this agent's position in `agents` as its value
    answers: bool = False  # the agent has made its own keys and must print its public key for the launcher

    def index(self, environ: Mapping[str, str]) -> int:
        """Return the index of the agent that runs with the environment ``environ``.

        Raises DdlInternalError, with a message of one line, if the environment does not contain the index.
        """
        if len(self.agents) == 1:
            return self.agents[0]
        value = next((environ[name] for name in self.number if name in environ), "")
        if not value.isdecimal() or int(value) >= len(self.agents):
            names = " or ".join(self.number)
            raise DdlInternalError(f"{names} does not say which of {len(self.agents)} agents this is ({value!r})")
        return self.agents[int(value)]


def agent_program(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that runs one agent, without the agent's own arguments.

    The agent uses the Python interpreter and the ddlcore at the same paths as this process. It also gets the PYTHONPATH
    of ``environ``.
    """
    root = str(Path(__file__).resolve().parents[3])
    text = _PROGRAM.format(major=sys.version_info[0], minor=sys.version_info[1])
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return (sys.executable, "-c", text, os.pathsep.join(paths) or root, root, VERSION)


def public_arguments(access: Access, silence_s: float) -> tuple[str, ...]:
    """Return the arguments of the command of ``agent_program`` if the agent gets no secret from the launcher.

    The arguments contain the launcher's endpoint and public key from ``access``. The agent counts the launcher as lost
    after ``silence_s`` seconds without a message. The caller must add the index of the agent as the last argument.
    """
    return (_PUBLIC, access.endpoint, access.server_public, str(silence_s))


def task_text(task: AgentTask) -> bytes:
    """Return ``task`` as one line of text. The line contains secret keys."""
    return msgspec.json.encode(task) + b"\n"


def read_task(arguments: Sequence[str], environ: Mapping[str, str]) -> AgentTask:
    """Return this agent's task, from the command line ``arguments``, from ``environ`` or from standard input.

    Raises DdlInternalError, with a message of one line, if there is no task, or if the versions of ddlcore on the
    launcher's host and here differ.
    """
    version, *rest = arguments
    if version != VERSION:
        raise DdlInternalError(f"ddlcore {VERSION} is installed there and {version} here")
    if rest and rest[0] == _PUBLIC:
        _, endpoint, server_public, silence_s, index = rest
        keys = KeyPair()
        access = Access(endpoint, 0, server_public, keys.public, keys.secret)
        return AgentTask(access, float(silence_s), (int(index),), answers=True)
    text = environ[VARIABLE].encode() if VARIABLE in environ else _line(0)
    try:
        return msgspec.json.decode(text, type=AgentTask)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # raise below instead: a traceback with the decoding error could show parts of keys
    raise DdlInternalError("the agent was told nothing: its standard input did not come through")


def _line(fd: int) -> bytes:
    """Return the first line of the file with the descriptor ``fd``, without the newline.

    Reads one byte at a time, because other code reads the rest of the file.
    """
    line = bytearray()
    while len(line) < _LARGEST_BYTES and (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)
