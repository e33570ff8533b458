"""Find TCP ports that are free at the moment, without reserving them."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"
_LOWEST, _HIGHEST = 20000, 32767  # below the range that systems use for outgoing connections
_TRIES = 2000


def is_free(port: int) -> bool:
    """Return whether a server could listen at TCP port ``port`` of this host now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_ports(count: int, avoid: tuple[int, ...] = ()) -> list[int]:
    """Return ``count`` different free TCP ports. None of them is in ``avoid``.

    The ports are chosen at random, so that two jobs seldom choose the same port. A port that the system chooses (by
    binding to port 0) is not safe: before a rank listens at this port, the system could give the same port to an
    outgoing connection. Raises OSError if fewer than ``count`` free ports are found.
    """
    found: list[int] = []
    chance = random.SystemRandom()
    for _ in range(_TRIES + count):
        if len(found) == count:
            return found
        port = chance.randint(_LOWEST, _HIGHEST)
        if port not in found and port not in avoid and is_free(port):
            found.append(port)
    raise OSError(f"no {count} free TCP ports between {_LOWEST} and {_HIGHEST}")
