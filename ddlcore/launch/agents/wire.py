"""Define the messages between the launcher and its agents, and the credit that limits the unacknowledged data."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from ddlcore.errors import DdlInternalError
from ddlcore.messages.coding import encodable
from ddlcore.messages.elastic import Opened, Process
from ddlcore.messages.ranks import FIRST_START, LaunchedRank, StartNumber

CHUNK_BYTES = 1 << 16  # largest piece of a stream in one message
_CREDIT_BYTES = 1 << 20  # limit for the stream bytes that one end has sent and the other has not yet acknowledged


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """A piece of a stream of ``rank``. If ``data`` is empty, the stream has ended.

    The agent sends the streams "stdout", "stderr", "result" and "timeline". The launcher sends the streams "stdin" and
    "task".
    """

    rank: int
    stream: str
    data: bytes


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Says that ``nbytes`` bytes of streams were processed. The receiver of this message may send as many more."""

    nbytes: int


# --- to an agent


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """The request to an agent to report on its host. The launcher sends it before the agent starts any rank."""

    directory: str
    files: tuple[str, ...]  # files that must exist
    program: str  # a program that must be executable
    packages: tuple[str, ...]  # distributions whose versions to report
    network_interface: str  # the setting of this name
    ports: int  # how many free ports to find
    port: int  # a port that must be free; 0: none


class RankTask(msgspec.Struct, frozen=True, array_like=True):
    """One rank that an agent must start, with the environment variables that differ between ranks."""

    rank: LaunchedRank
    environ: dict[str, str]
    start: StartNumber = FIRST_START  # how many processes of this rank there were before, on any host


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The request to an agent to start its ranks."""

    command: tuple[str, ...]  # (): call the function that was sent as the stream "task"
    environ: dict[str, str]  # for all ranks; takes precedence over the agent's own environment
    own: tuple[str, ...]  # prefixes of variables for which the agent's own value takes precedence
    descriptors: tuple[str, ...]  # variables of the agent whose value is a file descriptor that its ranks must inherit
    ranks: tuple[RankTask, ...]
    stdin_rank: int = -1  # the rank that reads the stream "stdin"; -1: none
    machine_code: tuple[str, ...] = ()  # compiled first, if it is missing: otherwise the ranks would compile it
    cache_dir: str = ""  # the setting of this name
    stays: bool = False  # when all ranks have ended, wait for Again, until Release
    succession: bool = False  # another coordinator may take the place of the launcher: open a port for that
    timeline: bool = False  # send the ranks' parts of a timeline, as the streams "timeline", "timeline.1", …


class Signal(msgspec.Struct, frozen=True, array_like=True, tag="signal"):
    """The request to send the signal ``number`` to one rank.

    If ``group`` is true, the agent also sends the signal to all processes that the rank has started.
    """

    rank: LaunchedRank
    number: int
    group: bool


class Again(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """The request to start a new process for the rank in ``task``, of which no process runs on the agent's host.

    The agent sends no answer if the process was started. If it could not be started, the agent sends Ended.
    """

    task: RankTask


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """A message to an agent whose Begin has ``stays`` set: no rank will be started again."""


class Heir(msgspec.Struct, frozen=True, array_like=True):
    """An agent on whose host a successor of the launcher may run, and how other agents reach that successor."""

    agent: int
    host: str
    endpoint: str  # ""; no successor can be started there, but the agent is in the job
    server_public: str
    ports: tuple[int, ...]  # free ports there
    address: str
    cores: int


class Handover(msgspec.Struct, frozen=True, array_like=True, tag="handover"):
    """What a successor of the launcher needs to go on with the job, sent to all agents. The last one counts."""

    heirs: tuple[Heir, ...]  # in the order in which they are to be tried
    client_public: str  # the keys with which agents connect to a successor
    client_secret: str
    variables: dict[str, str]  # the settings, as environment variables
    hosts: tuple[tuple[str, int], ...]  # by host index: name, slots
    places: int  # how many numbers of ranks there may be
    most: int  # ranks at the same time
    launcher: str  # the name of the launcher that has started the agents
    master: tuple[str, int]  # MASTER_ADDR and MASTER_PORT
    directory: str  # where the successor writes the output


class Adopted(msgspec.Struct, frozen=True, array_like=True, tag="adopted"):
    """The answer to Adopt: the agent belongs to the successor of the launcher now."""


class Quit(msgspec.Struct, frozen=True, array_like=True, tag="quit"):
    """The request to an agent to kill its ranks and then to end."""


ToAgent = Look | Begin | Signal | Again | Release | Opened | Handover | Adopted | Data | Ack | Quit


# --- from an agent


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """The first message of an agent, which says that the agent runs and is connected to the launcher."""

    pid: int


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The answer to Look. ``problems`` has one line of text for each thing that the job needs and the host lacks."""

    host: str  # the host's own name
    python: str  # version
    ddl: str  # version of ddlcore
    packages: dict[str, str]  # version by distribution; "": not installed
    address: str  # the host's address on the route to the launcher
    cores: int
    ports: tuple[int, ...]
    problems: tuple[str, ...] = ()


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """The answer to Begin: the process ids of all ranks, or the reason (``error``) why the ranks were not started."""

    pids: tuple[int, ...]
    error: str = ""
    endpoint: str = ""  # where a successor of the launcher would listen on this host; "": none can run there
    server_public: str = ""  # its public key


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """Says that a rank's process has ended. The last output of the process may arrive after this message."""

    rank: LaunchedRank
    returncode: int
    lost: str = ""  # if a new process of the rank could not be started: the reason
    start: StartNumber = FIRST_START  # how many processes ran at this place before the one that has ended


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """A line of text that the launcher must show to the user."""

    text: str


class Leaves(msgspec.Struct, frozen=True, array_like=True, tag="leaves"):
    """Says that the agent has received SIGTERM. This means that its host must leave the elastic job."""


class Adopt(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """The first message of an agent to a successor of the launcher: what is on its host, and what it knows."""

    pid: int
    running: tuple[tuple[Process, int], ...]  # with the id of each process
    ended: tuple[tuple[Process, int], ...]  # with the return code of each process
    worlds: tuple[Opened, ...]  # those that may live, as far as it was told
    leaves: bool = False  # its host is to leave the job


class AgentFinished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The last message of an agent.

    The agent's ranks and all processes that the ranks have started have ended, and all their output was sent.
    """


FromAgent = Here | Report | Begun | Ended | Data | Ack | Said | Leaves | Adopt | AgentFinished

_encoder = msgspec.msgpack.Encoder()
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)


def encode(record: ToAgent | FromAgent) -> bytes:
    """Return ``record``, one of the messages defined in this file, as bytes."""
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        if not isinstance(record, (Said, Begun)):  # commands and paths must not be altered
            raise
        return _encoder.encode(encodable(record))


def decode_to_agent(data: bytes) -> ToAgent:
    """Return the message that the launcher has sent as the bytes ``data``.

    Raises DdlInternalError, with a message of one line, if ``data`` is malformed.
    """
    try:
        return _to_agent.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DdlInternalError(f"the launcher sent what this agent cannot read ({error})") from None


def decode_from_agent(data: bytes) -> FromAgent:
    """Return the message that an agent has sent as the bytes ``data``.

    Raises DdlInternalError, with a message of one line, if ``data`` is malformed.
    """
    try:
        return _from_agent.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DdlInternalError(f"an agent sent what this launcher cannot read ({error})") from None


class Credit:
    """The sending end of all streams between one agent and the launcher, in one direction.

    Sent bytes use up credit, and acknowledgements from the other end restore the credit. If no credit is left, the
    sender must wait. So a rank that writes faster than its output is shown must wait, as if a pipe were full, and the
    output uses a limited amount of memory. Any thread may use this object.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._left = _CREDIT_BYTES
        self._closed = False
        self._changed = threading.Condition()

    def send(self, rank: int, stream: str, data: bytes) -> bool:
        """Send ``data`` in pieces, and wait for credit before a piece if too little is left. Return True.

        If ``data`` is empty, the stream ends. Return False if ``close`` was called; a part of ``data`` may have been
        sent in this case.
        """
        at = 0
        while True:
            piece = data[at : at + CHUNK_BYTES]
            with self._changed:
                # A piece must be smaller than the whole credit, because otherwise this wait would never end.
                while self._left < len(piece) and not self._closed:
                    self._changed.wait(1.0)
                if self._closed:
                    return False
                self._left -= len(piece)
            self._send(encode(Data(rank, stream, piece)))
            at += len(piece)
            if at >= len(data):
                return True

    def give(self, nbytes: int) -> None:
        """Restore ``nbytes`` bytes of credit, because the other end has acknowledged ``nbytes`` bytes."""
        with self._changed:
            self._left += nbytes
            self._changed.notify_all()

    def renew(self) -> None:
        """Restore all credit, because another receiver has taken the place of the one that has it not acknowledged."""
        with self._changed:
            self._left = _CREDIT_BYTES
            self._changed.notify_all()

    def close(self) -> None:
        """Make every call of ``send`` return False, because the other end receives nothing any more.

        This applies to calls that are waiting now and to later calls.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
