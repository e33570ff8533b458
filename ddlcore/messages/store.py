"""The requests of ranks to the store, and its replies."""

from __future__ import annotations

import msgspec


class StoreSet(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    """Asks the store to store a value under a key."""

    serial: int
    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Asks the store for the value under a key.

    The reply comes as soon as the key exists, ``timeout_s`` seconds have passed, or a rank is lost.
    """

    serial: int
    key: str
    timeout_s: float


class StoreAdd(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Asks the store to add ``amount`` to the integer under a key."""

    serial: int
    key: str
    amount: int


class StoreDelete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Asks the store to delete all keys that begin with ``prefix``."""

    serial: int
    prefix: str


class StoreClock(msgspec.Struct, frozen=True, array_like=True, tag="clock"):
    """Asks what time it is on the clock of the process that runs the store. The reply comes at once."""

    serial: int


class StoreReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The store's reply to a request.

    ``error`` is "" if the request succeeded. Otherwise ``error`` is "timeout", "closed", or a text that begins with
    "lost: " or "value: ".
    """

    serial: int
    value: bytes
    error: str = ""


StoreRequest = StoreSet | StoreGet | StoreAdd | StoreDelete | StoreClock
