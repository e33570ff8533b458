"""Finds TCP ports that nobody uses now; it keeps none of them open."""

from __future__ import annotations

import random
import socket

__all__ = ["LOOPBACK", "free_ports", "is_free"]

LOOPBACK = "127.0.0.1"
_LOWEST, _HIGHEST = 20000, 32767  # below the range from which systems serve outgoing connections
_TRIES = 2000


def is_free(port: int) -> bool:
    """Whether a server could listen at ``port`` of this host now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_ports(count: int, avoid: tuple[int, ...] = ()) -> list[int]:
    """``count`` different ports, chosen at random so that two jobs seldom meet. Raises OSError where there are too few.

    A port from the system's own choice (0) could be given to any outgoing connection between now and
    the moment a rank listens there; these are not.
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
