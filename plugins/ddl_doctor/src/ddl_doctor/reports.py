"""Define what ranks report to the watches of a job: their load, their progress, and where they spend their time."""

from __future__ import annotations

import logging

import msgspec

from ddlcore.messages.observing import Observation

log = logging.getLogger("ddl")
_KIND = "ddl-doctor"


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """The traffic of one network interface of a host: the bytes of all programs since the host was started."""

    name: str
    received_bytes: int
    sent_bytes: int
    bits_per_s: float = 0.0  # speed of the link; 0: unknown


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """The part of a Pulse that describes a rank's present operations and how the rank spends its time.

    A rank sends this part only if the launcher serves a live page. Counts and times are totals since ``init``.
    """

    doing: str  # a sentence that says what the rank is doing
    waits_s: float = 0.0  # for at least so long no operation has ended although some are in flight; 0: none in flight
    in_flight: tuple[tuple[str, tuple[int, ...]], ...] = ()  # the first operations by name: name, ranks; (): all ranks
    pending: int = 0  # how many operations are in flight
    input_s: float = 0.0  # time for which the main thread has waited for input
    sampled_s: float = 0.0  # time for which it is known whether the main thread waited for input
    transport_s: float = 0.0
    nbytes: int = 0  # bytes of this rank's tensors in delivered buckets
    route: str = ""  # the transport of process set 0
    traffic: tuple[Traffic, ...] = ()  # only from the first rank of each host, if there are several hosts


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """The load and progress of a rank.

    A rank sends this report every ``pulse_s`` seconds if that setting is not 0. Counts and times are totals since
    ``init``.
    """

    at_s: float  # time by the rank's own monotonic clock
    steps: int
    user_s: float  # time that the user's threads have spent in ``wait``
    cpu_s: float
    resident_bytes: int
    gpu_share: float = -1.0  # utilization of the rank's GPU when it was last used, 0 … 1; below 0: there is no GPU
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0
    activity: Activity | None = None


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """A record of the lines of code where a rank's main thread spends its time.

    A rank sends this report only if the launcher asks for it.
    """

    steps: int  # number of steps that were sampled
    seconds: float  # duration of these steps
    input_s: float  # part of ``seconds``: time spent waiting for the next item of the loop's iterable
    loop: str  # the training loop that the sampler has found
    lines: tuple[tuple[str, str, float, float], ...]  # file and line, text, seconds, input part of these


def to_send(report: Pulse | Profile) -> Observation:
    """Return ``report`` in the form in which a rank sends it."""
    return Observation(_KIND, msgspec.msgpack.encode(report))


def report_in(observation: Observation) -> Pulse | Profile | None:
    """Return the report that ``to_send`` has packed, or None if another observer has sent ``observation``.

    The result is also None if the report has another form, as one of another state of this package may have.
    """
    if observation.kind != _KIND:
        return None
    try:
        return msgspec.msgpack.decode(observation.data, type=Pulse | Profile)
    except msgspec.DecodeError as error:
        log.debug("a report of a rank cannot be read: %s", error)
        return None
