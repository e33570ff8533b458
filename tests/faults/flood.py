"""A stranger: as another user of this host, opens connections to a socket of ddl's for as long as it is told.

Run as ``flood.py USER_ID SECONDS ENDPOINT...``; it prints how many connections came about, and how many were refused.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections import deque

IDLE = 2000  # connections held at a time that say nothing
LARGE = 16  # that announce a large frame, and send it
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE".ljust(64, b"\0")
FRAME = b"\x06" + (60 << 20).to_bytes(8, "big")  # a command of 60 MiB
PIECE = b"x" * (1 << 16)


def main() -> None:
    """Gives up its rights first."""
    user, seconds = int(sys.argv[1]), float(sys.argv[2])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard > 0 else 8192, hard))
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    said = {"connected": 0, "refused": 0}
    end_s = time.monotonic() + seconds
    held: deque[socket.socket] = deque()
    large: list[socket.socket] = []
    while time.monotonic() < end_s:
        for endpoint in sys.argv[3:]:
            made = connect(endpoint)
            if made is None:
                said["refused"] += 1
                continue
            said["connected"] += 1
            if len(large) < LARGE:
                send(made, GREETING + FRAME)
                large.append(made)
            else:
                held.append(made)
                if len(held) > IDLE:
                    held.popleft().close()
        large = [one for one in large if send(one, PIECE)]
    print(json.dumps(said))


def connect(endpoint: str) -> socket.socket | None:
    scheme, _, place = endpoint.partition("://")
    made = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
    made.settimeout(0.2)
    try:
        if scheme == "ipc":
            made.connect("\0" + place[1:] if place.startswith("@") else place)
        else:
            host, _, port = place.rpartition(":")
            made.connect((host, int(port)))
    except OSError:
        made.close()
        return None
    made.setblocking(False)
    return made


def send(made: socket.socket, data: bytes) -> bool:
    """Whether it is still of use."""
    try:
        made.send(data)
    except BlockingIOError:
        return True
    except OSError:
        made.close()
        return False
    return True


if __name__ == "__main__":
    main()
