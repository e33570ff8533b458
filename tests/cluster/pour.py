"""Pours bytes through one TCP connection for a while and prints how many arrived, in Mbit/s of payload.

Run: python pour.py receive | python pour.py send ADDRESS SECONDS
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 5001
CHUNK = 1 << 18  # bytes


def receive() -> None:
    """One connection to its end. The first tenth is left out: a window opens there."""
    with socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    arrived, begun_s, buffer = 0, time.monotonic(), bytearray(CHUNK)
    measured_from_s, measured_from = begun_s, 0
    with connection:
        while received := connection.recv_into(buffer):
            arrived += received
            if measured_from == 0 and time.monotonic() > begun_s + 0.1:
                measured_from_s, measured_from = time.monotonic(), arrived
    mbit = (arrived - measured_from) * 8 / 1e6 / (time.monotonic() - measured_from_s)
    print(f"{mbit:.1f}", flush=True)


def send(address: str, seconds: float) -> None:
    """As fast as it goes."""
    deadline_s = time.monotonic() + seconds
    with socket.create_connection((address, PORT)) as connection:
        while time.monotonic() < deadline_s:
            connection.sendall(bytes(CHUNK))


if __name__ == "__main__":
    receive() if sys.argv[1] == "receive" else send(sys.argv[2], float(sys.argv[3]))
