"""One of several processes whose group is reconfigured again and again. They tell each other their handles by a store.

Arguments: the port of a TCPStore, the number of this process, and how many there are. With a fourth argument, the process
of this number falls silent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace

import ddl_torch as ddl
import torch
import torch.distributed as dist
from ddl_torch.distributed.reconfigurable import ReconfigurableGroup

from ddlcore.errors import DeadlineExceeded, PeerLost

TIMEOUT = timedelta(seconds=60)
MIDDLE = 3.0 * float(os.environ.get("DDL_TEST_PATIENCE", "1"))


class Peers:
    """This process's group, and the store by which it and its peers exchange their handles."""

    def __init__(self, port: int, number: int, count: int) -> None:
        self.store = dist.TCPStore("localhost", port, is_master=False, timeout=TIMEOUT)
        self.number = number
        self.group = ReconfigurableGroup(self.store, number, count, TIMEOUT)

    def reconfigure(self, uuid: int, members: Sequence[int], as_set: bool = False) -> float:
        """Make the group that of ``members``, and check that all of its calls have these peers. Return the seconds."""
        self.store.set(f"{uuid}/{self.number}", self.group.get_reconfigure_handle())
        handles = [self.store.get(f"{uuid}/{member}").decode() for member in members]
        since_s = time.monotonic()
        opts = SimpleNamespace(uuid=uuid, handles=set(handles) if as_set else handles, timeout=TIMEOUT, hints={})
        self.group.reconfigure(opts).wait()
        seconds = time.monotonic() - since_s
        if not as_set:
            assert self.group.getRank() == members.index(self.number)
        assert self.group.getSize() == len(members) == ddl.size()
        assert ddl.rank() == self.group.getRank()
        for step in range(20):
            assert self.sum() == sum(1 + member for member in members), step
        gathered = [torch.zeros(1) for _ in members]
        self.group.allgather([gathered], [torch.full((1,), float(self.number))]).wait()
        assert as_set or [int(one) for one in gathered] == list(members)
        self.group.barrier().wait()
        self.group.monitored_barrier()
        return seconds

    def sum(self) -> float:
        """Return the sum of the numbers of the members, each plus 1."""
        tensor = torch.full((3,), 1.0 + self.number)
        self.group.allreduce([tensor]).wait()
        return tensor[0].item()


def fall_silent(peers: Peers, silent: int, count: int) -> None:
    """Stop the process ``silent`` in the middle of repeating steps; it goes on when the others have new peers."""
    peers.reconfigure(0, list(range(count)))
    others = [number for number in range(count) if number != silent]
    if peers.number == silent:
        peers.store.set("process", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            while True:
                peers.sum()
        except PeerLost as error:
            print(f"PeerLost: {error}", flush=True)
        return
    with contextlib.suppress(DeadlineExceeded):
        peers.group.allreduce([torch.ones(3)]).wait(timedelta(seconds=1))
        raise AssertionError("nobody has fallen silent")
    assert peers.reconfigure(1, others) < 2 * MIDDLE
    if peers.number == others[0]:
        os.kill(int(peers.store.get("process")), signal.SIGCONT)
    peers.reconfigure(2, others[::-1])
    peers.group.shutdown()


def main(port: int, number: int, count: int, silent: int | None = None) -> None:
    peers = Peers(port, number, count)
    if silent is not None:
        fall_silent(peers, silent, count)
        return
    everyone = list(range(count))
    seconds = [peers.reconfigure(0, everyone)]
    seconds.append(peers.reconfigure(1, everyone[::-1]))  # nobody has died; the last one becomes rank 0
    peers.reconfigure(2, everyone, as_set=True)
    for uuid, lost in ((3, count - 1), (4, 0)):  # the one who dies is the last, and then the first rank
        if number == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        since_s = time.monotonic()
        with contextlib.suppress(PeerLost):
            while True:
                peers.sum()
        assert time.monotonic() - since_s < MIDDLE
        assert str(peers.group.get_error()).endswith("COMM_ERROR")
        everyone.remove(lost)
        seconds.append(peers.reconfigure(uuid, everyone))
    peers.group.abort()
    if number == everyone[0]:
        peers.reconfigure(5, [number])  # a world of one
    seconds.append(peers.reconfigure(6, everyone))
    peers.group.shutdown()
    assert "WORLD_SIZE" not in os.environ
    print(f"process {number} has ended; longest reconfigure {max(seconds):.2f} s", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
