"""Defines the outcome: the result that running a bucket gives to one entry of the bucket."""

from __future__ import annotations

import msgspec

from ddlcore.contracts.device import Event
from ddlcore.contracts.memory import Memory


class Outcome(msgspec.Struct, frozen=True):
    """The result of a bucket for one of its entries. ``memory`` is None if the result is in the caller's memory."""

    memory: Memory | None = None  # the result of kinds whose size is known only after negotiation
    rows: tuple[tuple[int, ...], ...] = ()  # of each member, for ragged kinds; for a reducescatter: of this rank's part
    digests: tuple[bytes, ...] = ()
    result: int = -1  # ADD_SET: the set's id; JOIN: the last rank
    contributors: int = 0  # how many members took part with real data; 0: all of them
    event: Event | None = None  # on a device: the event after which the values are complete
