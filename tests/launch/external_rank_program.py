"""One rank of a job that another launcher has started: does what its argument says, and prints a line or two."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import ddlcore as ddl

__all__: list[str] = []


def say(*words: object) -> None:
    """In one write: launchers mix what ranks write by halves."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def step() -> float:
    return float(ddl.allreduce(np.ones(1000, dtype=np.float32), name="x", op=ddl.Sum)[0])


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Exit code 7 when a peer is lost, after a line that says which and when."""
    try:
        yield
    except ddl.PeerLost as error:
        say(f"rank {ddl.rank()} lost {error.ranks} at {time.time():.3f}: {error.reason}")
        sys.exit(7)


def where() -> None:
    """Who I am, and what a foreign library would be told."""
    total = step()
    routes = ddl.stats()["routes"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    say(
        f"rank {ddl.rank()} of {ddl.size()} local {ddl.local_rank()} of {ddl.local_size()} "
        f"cross {ddl.cross_rank()} of {ddl.cross_size()} {ddl.is_homogeneous()} sum {total:g} route {routes[0]} "
        f"told {' '.join(os.environ.get(name, '-') for name in names)}"
    )


def main() -> None:
    """By the first argument; the second is the rank that it concerns, the third where to show that work has begun."""
    what, who = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if what == "apart":
        launched = int(os.environ["RANK"])
        time.sleep(launched * 1.5)  # the world of rank 0 has ended long before the other's begins
        ddl.init(comm=[launched])
        say(f"launched {launched} rank {ddl.rank()} of {ddl.size()} sum {step():g}")
        return
    ddl.init()
    if what == "where":
        where()
        return
    with telling():  # who ends in the middle may be ahead
        for _ in range(30):
            step()
    if what == "again":
        for _ in range(3):
            ddl.shutdown()
            ddl.init()
            step()
        say("again", ddl.rank())
    elif what == "parts":
        mine = [rank for rank in range(ddl.size()) if rank % 2 == ddl.rank() % 2]
        launched = ddl.rank()
        ddl.shutdown()
        ddl.init(comm=mine)
        say(f"launched {launched} rank {ddl.rank()} of {ddl.size()} sum {step():g}")
        ddl.shutdown()
        ddl.init()
        step()
    elif what == "hold":
        if ddl.rank() == who:
            ctypes.PyDLL(None).sleep(7)  # with the interpreter lock, as while a large library is loaded
        # Meanwhile the others send the names of these tensors: more bytes than the kernel takes for who does not read.
        many = ddl.grouped_allreduce(
            [np.ones(1, dtype=np.float32)] * 4000, name="a tensor with a long name, as many have"
        )
        say("held", ddl.rank(), len(many), step())
    elif what == "leave":
        if ddl.rank() != who:
            time.sleep(0.6)  # outlives the other by as much; nothing waits for it
        say("left", ddl.rank())
    elif what == "child":
        done = subprocess.run(
            [sys.executable, "-c", "import ddlcore; ddlcore.init()"], capture_output=True, text=True, timeout=160
        )
        say(done.returncode, done.stderr.strip().splitlines()[-1])
        step()
    elif what == "fork":
        pid = os.fork()
        if pid == 0:
            sys.exit(5)  # by way of the handlers that are called at exit
        say("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        step()
    else:
        if len(sys.argv) > 3:
            (Path(sys.argv[3]) / f"rank.{ddl.rank()}").touch()
        if ddl.rank() == who:
            say(f"ends at {time.time():.3f}")
            if what == "raise":
                raise RuntimeError("boo")
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGTERM)
            time.sleep(60)
        with telling():
            while True:
                step()


if __name__ == "__main__":
    main()
