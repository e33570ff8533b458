"""Define the messages between ``ddl run`` and its agents, and the credit that limits how much is sent ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from ddlcore.errors import DdlInternalError
from ddlcore.messages import Opened, Process, encodable

CHUNK_BYTES = 1 << 16  # largest piece of a stream in one message
_CREDIT_BYTES = 1 << 20  # limit for stream bytes sent in one direction and not yet acknowledged by the other end


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """A piece of a stream of ``rank``. An empty ``data`` is the end of the stream.

    The streams "stdout", "stderr", "result" and "timeline" are sent by the agent; "stdin" and "task" are sent to it.
    """

    rank: int
    stream: str
    data: bytes


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """An acknowledgement that ``nbytes`` bytes of streams were processed. The sender may send as many more."""

    nbytes: int


# --- to an agent


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """The request to report on a host. It is sent before any rank is started."""

    directory: str
    files: tuple[str, ...]  # files that must exist
    program: str  # a program that must be executable
    packages: tuple[str, ...]  # distributions whose versions to report
    network_interface: str  # the setting of this name
    ports: int  # how many free ports to find
    port: int  # a port that must be free; 0: none


class RankTask(msgspec.Struct, frozen=True, array_like=True):
    """One rank that an agent is to start, with those variables of its environment that differ between ranks."""

    rank: int
    environ: dict[str, str]
    start: int = 0  # how many processes of this rank there were before, on any host


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The request to an agent to start its ranks."""

    command: tuple[str, ...]  # (): call the function that was sent as the stream "task"
    environ: dict[str, str]  # for all ranks; takes precedence over the agent's own environment
    own: tuple[str, ...]  # prefixes of variables for which the agent's own value takes precedence
    descriptors: tuple[str, ...]  # variables of the agent that hold a file descriptor for its ranks to inherit
    ranks: tuple[RankTask, ...]
    stdin_rank: int = -1  # the rank that reads the stream "stdin"; -1: none
    kernels: bool = False  # compile missing CPU kernels first: otherwise each rank would compile them
    cache_dir: str = ""  # the setting of this name
    stays: bool = False  # when all ranks have ended, wait for Again, until Release
    succession: bool = False  # another coordinator may take the place of the launcher: open a port for that
    timeline: bool = False  # send the ranks' parts of a timeline, as the streams "timeline", "timeline.1", …


class Signal(msgspec.Struct, frozen=True, array_like=True, tag="signal"):
    """The request to send a signal to one rank and, if ``group`` is true, also to all processes that it started."""

    rank: int
    number: int
    group: bool


class Again(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """The request to start one more process, as ``task`` says. No process of that rank runs on the agent's host.

    There is no answer if that succeeds. Otherwise Ended is the answer.
    """

    task: RankTask


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """The news for an agent that ``stays`` that no rank will be started again."""


class Heir(msgspec.Struct, frozen=True, array_like=True):
    """An agent on whose host a successor of the launcher may run, and how other agents reach that successor."""

    agent: int
    host: str
    endpoint: str
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
    """The request to an agent to kill its ranks and to end."""


ToAgent = Look | Begin | Signal | Again | Release | Opened | Handover | Adopted | Data | Ack | Quit


# --- from an agent


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """The first message of an agent. It says that the agent runs and is connected to the launcher."""

    pid: int


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The answer to Look. ``problems`` has one line for each thing that is missing."""

    host: str  # the host's own name
    python: str  # version
    ddl: str  # version of ddlcore
    packages: dict[str, str]  # version by distribution; "": not installed
    address: str  # the host's address on the route to the launcher
    cores: int
    ports: tuple[int, ...]
    problems: tuple[str, ...] = ()


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """The answer to Begin: the process ids of all ranks or, if the ranks could not be started, an ``error``."""

    pids: tuple[int, ...]
    error: str = ""
    endpoint: str = ""  # where a successor of the launcher would listen on this host; "": none can run there
    server_public: str = ""  # its public key


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The report that a rank's process has ended. Its last output may arrive later."""

    rank: int
    returncode: int
    lost: str = ""  # why there is no process, if it could not be started again


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """A line of text that the launcher is to show to the user."""

    text: str


class Leaves(msgspec.Struct, frozen=True, array_like=True, tag="leaves"):
    """The news that the agent has got SIGTERM: its host is to leave an elastic job."""


class Adopt(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """The first message of an agent to a successor of the launcher: what is on its host, and what it knows."""

    pid: int
    running: tuple[tuple[Process, int], ...]  # with the id of each process
    ended: tuple[Process, ...]
    worlds: tuple[Opened, ...]  # those that may live, as far as it was told


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The last message of an agent: its ranks and what they left behind have ended, and all their output was sent."""


FromAgent = Here | Report | Begun | Ended | Data | Ack | Said | Leaves | Adopt | Finished

_encoder = msgspec.msgpack.Encoder()
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)


def encode(record: ToAgent | FromAgent) -> bytes:
    """Return ``record``, a message of this file, as bytes."""
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        if not isinstance(record, (Said, Begun)):  # commands and paths must not be altered
            raise
        return _encoder.encode(encodable(record))


def decode_to_agent(data: bytes) -> ToAgent:
    """Return the message that the launcher sent as ``data``.

    Raises DdlInternalError, with a message of one line, if it cannot be read.
    """
    try:
        return _to_agent.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DdlInternalError(f"the launcher sent what this agent cannot read ({error})") from None


def decode_from_agent(data: bytes) -> FromAgent:
    """Return the message that an agent sent as ``data``.

    Raises DdlInternalError, with a message of one line, if it cannot be read.
    """
    try:
        return _from_agent.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DdlInternalError(f"an agent sent what this launcher cannot read ({error})") from None


class Credit:
    """The sending end of all streams in one direction. Sent bytes use up credit; acknowledgements restore it.

    Any thread may use it. A rank that writes faster than its output is shown must wait, as it would at a full pipe. So
    the memory that the output takes is bounded.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._left = _CREDIT_BYTES
        self._closed = False
        self._changed = threading.Condition()

    def send(self, rank: int, stream: str, data: bytes) -> bool:
        """Send all of ``data`` in pieces, and wait for credit where needed. An empty ``data`` ends the stream.

        Returns False if the credit is closed. A part may have been sent then.
        """
        at = 0
        while True:
            piece = data[at : at + CHUNK_BYTES]
            with self._changed:
                # A piece must be smaller than the whole credit: for a larger one, no acknowledgement could end this
                # wait.
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
        """Restore ``nbytes`` of credit, because the other end has processed as many bytes."""
        with self._changed:
            self._left += nbytes
            self._changed.notify_all()

    def renew(self) -> None:
        """Restore all credit, because another receiver has taken the place of the one that has it not acknowledged."""
        with self._changed:
            self._left = _CREDIT_BYTES
            self._changed.notify_all()

    def close(self) -> None:
        """Let every call of ``send`` return False, because nobody receives any more.

        This holds for calls that wait now and for later ones.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
