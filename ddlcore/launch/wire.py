"""What `ddl run` and its agents say to each other: plain records, and the credit that bounds what is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from ddlcore.errors import DdlInternalError
from ddlcore.messages import encodable

__all__ = [
    "CHUNK_BYTES",
    "Ack",
    "Begin",
    "Begun",
    "Credit",
    "Data",
    "Ended",
    "Finished",
    "FromAgent",
    "Here",
    "Look",
    "Quit",
    "RankTask",
    "Report",
    "Said",
    "Signal",
    "ToAgent",
    "decode_from_agent",
    "decode_to_agent",
    "encode",
]

CHUNK_BYTES = 1 << 16  # largest piece of a stream in one message
_CREDIT_BYTES = 1 << 20  # of streams, sent one way between launcher and agent and not yet used up at the other end


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """A piece of a stream of ``rank``: "stdout", "stderr", "result", "timeline" from the agent, "stdin", "task" to it; b"" is its end."""

    rank: int
    stream: str
    data: bytes


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """So many bytes of streams were used up: as many more may be sent."""

    nbytes: int


# --- to an agent


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """What to find out about the host, before anything is started."""

    directory: str
    files: tuple[str, ...]  # that must be there
    program: str  # that must be executable
    packages: tuple[str, ...]  # distributions whose versions to tell
    network_interface: str  # setting of that name
    ports: int  # how many free ones to find
    port: int  # that must be free; 0: none


class RankTask(msgspec.Struct, frozen=True, array_like=True):
    """One rank: what is its own in its environment."""

    rank: int
    environ: dict[str, str]


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Start the ranks."""

    command: tuple[str, ...]  # () for the function that came as the stream "task"
    environ: dict[str, str]  # for all of them, over the agent's own
    own: tuple[str, ...]  # prefixes of variables where the agent's own win
    descriptors: tuple[str, ...]  # variables of the agent that name an open file for its ranks
    ranks: tuple[RankTask, ...]
    stdin_rank: int = -1  # which of them reads the stream "stdin"
    kernels: bool = False  # compile the CPU kernels first, where they are not: else each rank would
    cache_dir: str = ""  # setting of that name
    timeline: bool = False  # send what the ranks leave of a timeline, as streams "timeline", "timeline.1", …


class Signal(msgspec.Struct, frozen=True, array_like=True, tag="signal"):
    """For one rank, or for all that it has started too."""

    rank: int
    number: int
    group: bool


class Quit(msgspec.Struct, frozen=True, array_like=True, tag="quit"):
    """Kill what runs, and end."""


ToAgent = Look | Begin | Signal | Data | Ack | Quit


# --- from an agent


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """The first word."""

    pid: int


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The answer to Look. ``problems``: one line each about what is missing."""

    host: str  # as it calls itself
    python: str  # version
    ddl: str  # version of ddlcore
    packages: dict[str, str]  # version by distribution, "" where it is not installed
    address: str  # its own, on the route to the launcher
    cores: int
    ports: tuple[int, ...]
    problems: tuple[str, ...] = ()


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """All ranks run, as these processes; or, with an ``error``, none."""

    pids: tuple[int, ...]
    error: str = ""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A rank's process is gone; its output may still come."""

    rank: int
    returncode: int


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """A line for the user."""

    text: str


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The last word: all ranks have ended, what they left behind too, and everything they wrote was sent."""


FromAgent = Here | Report | Begun | Ended | Data | Ack | Said | Finished

_encoder = msgspec.msgpack.Encoder()
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)


def encode(record: ToAgent | FromAgent) -> bytes:
    """The bytes of any record of this file."""
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        if not isinstance(record, (Said, Begun)):  # commands and paths must not change
            raise
        return _encoder.encode(encodable(record))


def decode_to_agent(data: bytes) -> ToAgent:
    """What the launcher sends. Raises DdlInternalError in one line for what cannot be read."""
    try:
        return _to_agent.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DdlInternalError(f"the launcher sent what this agent cannot read ({error})") from None


def decode_from_agent(data: bytes) -> FromAgent:
    """What an agent sends. Raises DdlInternalError in one line for what cannot be read."""
    try:
        return _from_agent.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DdlInternalError(f"an agent sent what this launcher cannot read ({error})") from None


class Credit:
    """The sending end of all streams one way: pieces are spent, acknowledgements give back. Any threads.

    So a rank that writes faster than its output is shown is held up, as by a pipe, and fills no memory.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._left = _CREDIT_BYTES
        self._closed = False
        self._changed = threading.Condition()

    def send(self, rank: int, stream: str, data: bytes) -> bool:
        """Sends all of ``data`` (b"": the stream's end) in pieces, waiting for credit; False once it is closed."""
        at = 0
        while True:
            piece = data[at : at + CHUNK_BYTES]
            with self._changed:
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
        """The other end has used up so many bytes."""
        with self._changed:
            self._left += nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits is let go: nobody listens any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
