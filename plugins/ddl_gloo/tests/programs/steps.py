"""Runs repeated steps and counts control messages.

If a file is given, one rank then dies in the middle of more steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import ddlcore as ddl

STEPS = 30
VICTIM = 1
CLOSES_S = 10.0  # Gloo closes the connections of an aborted group in a thread of its own


def step() -> None:
    handles = [ddl.allreduce_async_(GRADIENTS[i], name=f"g{i}") for i in range(len(GRADIENTS))]
    for handle in handles:
        ddl.synchronize(handle)


GRADIENTS = [np.zeros(size, np.float32) for size in (10, 1000, 200_000, 3)]


def main(died: str) -> None:
    ddl.init()
    for _ in range(60):
        step()
    before = ddl.stats()
    for _ in range(STEPS):
        step()
    after = ddl.stats()
    keys = ("control_messages", "buckets_replayed", "buckets_negotiated")
    counts = {key: after[key] - before[key] for key in keys}  # type: ignore[literal-required]  # keys of a TypedDict
    print("found", json.dumps({**counts, "route": after["routes"][0]}), flush=True)
    if died:
        die(Path(died))
    ddl.shutdown()


def die(died: Path) -> None:
    """Kill rank 1 a moment later; the other ranks continue until they get an error."""

    def end() -> None:
        died.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if ddl.rank() == VICTIM:
        threading.Timer(0.3, end).start()
    try:
        while True:
            step()
    except ddl.PeerLost as lost:
        late_s = time.time() - float(died.read_text())
        print("lost", json.dumps({"ranks": lost.ranks, "late_s": late_s}), flush=True)
        ddl.shutdown()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ddl-")]
        until_s = time.monotonic() + CLOSES_S
        while connections() and time.monotonic() < until_s:
            time.sleep(0.01)
        print("left", json.dumps({"threads": threads, "sockets": connections()}), flush=True)
        raise


def connections() -> int:
    """Return the number of TCP sockets that this process has open."""
    lines = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    inodes = {line.split()[9] for path in lines if path.exists() for line in path.read_text().splitlines()[1:]}
    held = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(path)
        except OSError:  # the descriptor of the listing itself
            continue
        held += name.startswith("socket:[") and name[8:-1] in inodes
    return held


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
