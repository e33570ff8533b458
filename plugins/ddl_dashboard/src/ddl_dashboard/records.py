"""Define the records that the launcher sends to the process that serves the live page, as lines of JSON."""

from __future__ import annotations

import msgspec
from ddl_doctor.reports import Pulse

# The states of a rank as the launcher knows them. ``_present_state`` in history.py adds states that follow from pulses.
STARTING = "starting"  # its process runs, and has not called init
INIT = "init"  # it has called init, and waits for the other ranks
RUNNING = "running"
LEFT = "left"  # it has called shutdown, or its script has ended
ENDED = "ended"  # its process has ended with exit code 0
STOPPED = "stopped"  # the launcher has ended its process
FAILED = "failed"


class JobBegin(msgspec.Struct, frozen=True, tag="begin"):
    """The first record: a description of the job, and the token that browsers need."""

    title: str  # the command
    hosts: tuple[str, ...]  # (size,) the host of each rank
    version: str
    begun_s: float  # time of day
    token: str  # the token that a browser must send; "": no token is needed
    interval_s: float  # time between two pulses of a rank


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """A pulse that has arrived from ``rank``."""

    rank: int
    pulse: Pulse


class RankState(msgspec.Struct, frozen=True, tag="state"):
    """The new state of ``rank``. ``host``: where it runs now; "": where it was."""

    rank: int
    state: str
    text: str = ""
    host: str = ""


class WorldState(msgspec.Struct, frozen=True, tag="world"):
    """The present world of an elastic job, and what has happened to the job so far."""

    generation: int
    size: int
    ranks_lost: int
    ranks_joined: int
    seconds_lost: float


class JobEvent(msgspec.Struct, frozen=True, tag="event"):
    """An event of the job, for the page's list of events."""

    at_s: float  # time of day
    kind: str  # "info", "warning" or "error"
    text: str


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The last record: the job has ended."""

    code: int
    text: str


Record = JobBegin | Heard | RankState | WorldState | JobEvent | Over
_decoder = msgspec.json.Decoder(Record)


def encoded(record: Record) -> bytes:
    """Return ``record`` as one line of JSON, with the newline at the end."""
    return msgspec.json.encode(record) + b"\n"


def decoded(line: bytes) -> Record:
    """Return the record in ``line``. Raises msgspec.DecodeError if ``line`` is not a record."""
    record: Record = _decoder.decode(line)
    return record
