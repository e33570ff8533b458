"""The ranks of a process group meet by torch's store, which may hold what earlier meetings have left there.

torchrun keeps one store when it starts the ranks again, and a program may destroy its groups and make new ones. So no
rank believes a key that an earlier meeting can have written:

1. Each rank but 0 writes a random word under its rank, in the place of an older word, and waits for an answer to it.
2. Rank 0 reads the words of the ranks again and again, and answers each new one with the name of this meeting, which is
   random, too. An older word gets an answer that nobody reads.
3. A rank that has the name writes under this name where it runs. Only now rank 0 counts it as arrived.
4. When all have arrived, rank 0 writes under the name whether all of them are on one host.
5. Each rank writes that it has read this. Only now rank 0 goes on: the store may end with its process.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ddlcore.errors import DeadlineExceeded

_PAUSES_S = 0.001, 0.05  # between two looks into the store: the first pause, and the longest
_ONE_HOST, _SEVERAL = "one host", "several hosts"


@dataclass(frozen=True)
class StoreMeeting:
    """What the ranks have agreed on. No other meeting has this ``name``."""

    name: str
    on_one_host: bool


# A rank's side of a meeting: yields the ranks for which it waits, and looks into the store again when it is resumed.
Steps = Generator[list[int], None, StoreMeeting]


def meet(store: Any, rank: int, size: int, timeout: timedelta) -> StoreMeeting:
    """Wait until all ranks of a world have called this function, and return what all of them return.

    Raises DeadlineExceeded after ``timeout``; the message names the ranks that have not come.
    """
    deadline_s, pause_s = time.monotonic() + timeout.total_seconds(), _PAUSES_S[0]
    steps = leading(store, size, this_host()) if rank == 0 else following(store, rank, this_host())
    while True:
        try:
            missing = next(steps)
        except StopIteration as ended:
            met: StoreMeeting = ended.value
            return met
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(
                f"init_process_group: {named(missing)} did not come to the meeting within {timeout.total_seconds():g} s "
                "(its timeout); start all ranks, with one store and one world size"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])


def named(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def leading(store: Any, size: int, host: str) -> Steps:
    """Return the steps of rank 0 in a meeting. ``host``: a text that names the host on which it runs."""
    name = secrets.token_hex(8)
    answered: dict[int, str] = {}
    hosts = {0: host}
    while True:
        missing = [rank for rank in range(size) if rank not in hosts]
        for rank in missing:
            arrived = _read(store, f"{name}/{rank}")
            word = _read(store, f"asks/{rank}")
            if arrived:
                hosts[rank] = arrived
            elif word and answered.get(rank) != word:
                answered[rank] = word
                _write(store, word, name)
        if len(hosts) == size:
            break
        yield missing
    where = _ONE_HOST if len(set(hosts.values())) == 1 else _SEVERAL
    _write(store, f"{name}/where", where)
    while missing := [rank for rank in range(1, size) if not _read(store, f"{name}/{rank}/knows")]:
        yield missing
    return StoreMeeting(name, where == _ONE_HOST)


def following(store: Any, rank: int, host: str) -> Steps:
    """Return the steps of ``rank``, which is not 0, in a meeting. ``host``: as for ``leading``."""
    word = secrets.token_hex(8)
    _write(store, f"asks/{rank}", word)
    while not (name := _read(store, word)):
        yield [0]
    _write(store, f"{name}/{rank}", host)
    while not (where := _read(store, f"{name}/where")):
        yield [0]
    _write(store, f"{name}/{rank}/knows", "yes")
    return StoreMeeting(name, where == _ONE_HOST)


def _read(store: Any, key: str) -> str:
    """Return the text under ``key``, or an empty one if there is none."""
    return str(store.get(f"ddl/{key}").decode()) if store.check([f"ddl/{key}"]) else ""


def _write(store: Any, key: str, text: str) -> None:
    store.set(f"ddl/{key}", text)


def this_host() -> str:
    """Return a text that is equal for processes that can reach each other's sockets on this host."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
