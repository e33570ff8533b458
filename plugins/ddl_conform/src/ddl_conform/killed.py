"""Tests that the other ranks of a transport do not hang after one rank was killed by SIGKILL.

Each rank is a process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import ClassVar

import pytest

from ddl_conform import oracle
from ddl_conform.group import Area, TransportGroup, finish
from ddl_conform.processes import ProcessSuite, RankProcesses
from ddl_conform.standard import StandardSuite
from ddlcore.contracts.transport import Transport
from ddlcore.errors import TransportError
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import DType, Member, ReduceOp

__all__ = ["KilledSuite"]

SIZE = 3
ABORT_S = 10.0  # the contract allows 1 s; a busy machine needs more
CLOSE_S = 40.0  # for the close of all survivors, on a busy machine


class KilledSuite(StandardSuite):
    """The suite that kills one rank of a transport, and checks that the other ranks do not hang.

    A subclass sets ``target``, which names the class of the transport, and ``settings``, the settings of the transport.
    """

    target: ClassVar[str] = ""  # "module:Class" of the transport
    why_not: ClassVar[str] = ""  # the reason why the test must be skipped; "" if the test can run
    settings: ClassVar[Mapping[str, str | int | float | bool]] = {}

    def test_survivors_of_a_killed_rank_are_released(self) -> None:
        """After one of three ranks was killed during an allreduce, the other two ranks do not hang.

        ``abort`` ends the pending call of each surviving rank, and ``close`` returns.
        """
        if self.why_not:
            pytest.skip(self.why_not)
        processes = RankProcesses(SIZE, self.target, ProcessSuite.command, ProcessSuite.environ())
        try:
            transports = processes.transports(SIZE)
            if not transports[0].capabilities.abort:
                pytest.skip("capabilities: abort is none, the job exits past a pending call")
            if "cpu" not in transports[0].capabilities.devices:
                pytest.skip("capabilities: moves no memory of the CPU")
            members = [Member(rank, 0) for rank in range(SIZE)]
            group = TransportGroup(transports, CpuKernels(), members=members, settings=self.settings, deadline_s=60.0)
            group.open()
            self._kill_one(group, processes.pids)
        finally:
            processes.close()

    def _kill_one(self, group: TransportGroup, pids: list[int]) -> None:
        ended = [threading.Event() for _ in range(SIZE)]
        late: list[str] = []

        def play(rank: int, transport: Transport) -> None:
            area = Area(oracle.values(DType.F32, 100_000, rank))
            try:
                while True:
                    finish(transport.allreduce(area.buffer, area.buffer, ReduceOp.Max))
            except (TransportError, EOFError, OSError):  # EOFError, OSError: from the process that was killed
                pass
            finally:
                ended[rank].set()

        def kill() -> None:
            time.sleep(0.1)
            os.kill(pids[0], signal.SIGKILL)
            for rank in range(1, SIZE):
                group.transports[rank].abort()
                if not ended[rank].wait(ABORT_S):
                    late.append(f"rank {rank}'s call went on {ABORT_S:g} s after its abort")

        thread = threading.Thread(target=kill, name="kill", daemon=True)
        thread.start()
        group.run(play)
        thread.join(CLOSE_S)
        assert not late, "; ".join(late)
        begun_s = time.monotonic()
        group.ranks.run(lambda rank: group.transports[rank].close() if rank else None, CLOSE_S)
        assert time.monotonic() - begun_s < CLOSE_S
        group.ranks.close()
