"""Define what the launcher tells the process that serves the page, as lines of JSON."""

from __future__ import annotations

import msgspec

from ddlcore.messages import Pulse

# The states of a rank, as the launcher sees them. ``present_state`` in history.py adds those that follow from pulses.
STARTING = "starting"  # its process runs, and has not called init
INIT = "init"  # it has called init, and waits for others
RUNNING = "running"
LEFT = "left"  # it has called shutdown, or its script has ended
ENDED = "ended"  # its process has ended with exit code 0
STOPPED = "stopped"  # the launcher has ended its process
FAILED = "failed"


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first record: what the job is, and who may read the page."""

    title: str  # the command
    hosts: tuple[str, ...]  # (size,) the host of each rank
    version: str
    begun_s: float  # time of day
    token: str  # "": none is needed
    interval_s: float  # of pulses


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """A pulse that has arrived from ``rank``."""

    rank: int
    pulse: Pulse


class State(msgspec.Struct, frozen=True, tag="state"):
    """The new state of ``rank``. ``host``: where it runs now; "": where it was."""

    rank: int
    state: str
    text: str = ""
    host: str = ""


class World(msgspec.Struct, frozen=True, tag="world"):
    """The present world of an elastic job, and what has happened to the job so far."""

    generation: int
    size: int
    ranks_lost: int
    ranks_joined: int
    seconds_lost: float


class Event(msgspec.Struct, frozen=True, tag="event"):
    """An event of the job, for its list of events."""

    at_s: float  # time of day
    kind: str  # "info", "warning" or "error"
    text: str


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The last record: the job has ended."""

    code: int
    text: str


Record = Begin | Heard | State | World | Event | Over
_decoder = msgspec.json.Decoder(Record)


def encoded(record: Record) -> bytes:
    """Return ``record`` as a line, with the newline. JSON has no newline within a value."""
    return msgspec.json.encode(record) + b"\n"


def decoded(line: bytes) -> Record:
    """Return the record in ``line``. Raises msgspec.DecodeError for anything else."""
    record: Record = _decoder.decode(line)
    return record
