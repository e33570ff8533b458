"""A stand-in for NCCL whose ranks are threads. It moves the bytes, and records every use that NCCL does not allow.

The stand-in replaces the functions of NCCL (the class Raw). Addresses are addresses of host memory. A stream is the
queue of a pretend device, whose thread executes the calls. The stand-in also has NCCL's weaknesses: it rounds 16-bit
sums at every hop, and loses NaNs.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from ddl_conform.pretend import PretendQueue

from ddl_nccl.layer import Raw
from ddl_nccl.standin_moves import AVG, SUM, TYPES, Asked
from ddl_nccl.standin_world import RECEIVES, SENDS, Comm, StandInWorld

VERSION = 23203
INVALID_ARGUMENT, INVALID_USAGE = 4, 5


class StandInError(Exception):
    """An error like nccl4py's NCCLError. ``status`` is NCCL's result code."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class StandIn(Raw):
    """The stand-in for NCCL, one object for all ranks. ``faults`` has a line for each use that NCCL does not allow."""

    def __init__(self, version: int = VERSION) -> None:
        self.faults: list[str] = []
        self.called: list[str] = []  # names of functions, in the order of the calls
        self.abort_s = 0.0  # how long an abort takes
        self.stuck = False  # whether init never returns
        self.deaf: set[int] = set()  # streams that never reach a collective, so that it never ends
        self._version = version
        self._lock = threading.Lock()
        self._worlds: dict[bytes, StandInWorld] = {}
        self._comms: list[Comm] = []
        self._queues: weakref.WeakValueDictionary[int, PretendQueue] = weakref.WeakValueDictionary()
        self._group = threading.local()
        self._last_error = threading.local()
        self._released = threading.Event()

    # --- for tests

    def know(self, queue: PretendQueue) -> None:
        """Allow calls on the stream of ``queue``."""
        self._queues[queue.handle] = queue

    def fail(self, rank: int, result: int, account: str = "") -> None:
        """Make the open communicators of ``rank`` report the result code ``result`` from now on.

        ``account`` is NCCL's description for this result.
        """
        for comm in self._comms:
            if comm.rank == rank and not comm.ended:
                comm.error, comm.account = result, account

    def release(self) -> None:
        """Release all threads that wait in ``init``."""
        self._released.set()

    def made(self) -> list[Comm]:
        """Return all communicators that were ever given to a rank."""
        return list(self._comms)

    def alive(self) -> list[Comm]:
        """Return the communicators that were neither destroyed nor aborted."""
        return [comm for comm in self._comms if not comm.ended]

    # --- life

    def version(self) -> int:
        return self._version

    def unique_id(self) -> bytes:
        made = os.urandom(128)
        with self._lock:
            self._worlds[made] = StandInWorld(self.faults, self.deaf)
        return made

    def init(self, size: int, unique_id: bytes, rank: int, device: int, name: str) -> Comm:
        with self._lock:
            world = self._worlds.get(unique_id)
        if world is None:
            self._raise(INVALID_ARGUMENT, "no rank has made this unique id")
        with world.changed:
            world.size = world.size or size
            if world.size != size or rank in world.comms or not 0 <= rank < size:
                self._raise(INVALID_ARGUMENT, f"rank {rank} of {size} does not fit")
            twin = next((comm for comm in world.comms.values() if comm.device == device), None)
            comm = world.comms[rank] = Comm(world, rank, device)
            world.changed.notify_all()
            while (len(world.comms) < size or self.stuck) and not self._released.is_set():
                world.changed.wait(0.05)
        devices = [other.device for other in world.comms.values()]
        if twin is not None or len(set(devices)) < len(devices):
            self._raise(INVALID_USAGE, f"Duplicate GPU detected : rank {rank} is on CUDA device {device} too")
        with self._lock:
            self._comms.append(comm)
        return comm

    def state(self, comm: Comm) -> int:
        if comm.ended:
            comm.fault(f"was asked for its state after its {comm.ended}")
        return comm.error

    def last_error(self, comm: Comm | None) -> str:
        return (comm.account if comm is not None else "") or getattr(self._last_error, "text", "")

    def abort(self, comm: Comm) -> None:
        self._end(comm, "abort")
        with comm.world.changed:
            comm.aborted = True
            comm.world.changed.notify_all()
        if self.abort_s:
            time.sleep(self.abort_s)

    def destroy(self, comm: Comm) -> None:
        if comm.queued:
            comm.fault(f"was destroyed with {comm.queued} calls queued")
        self._end(comm, "end")

    def _end(self, comm: Comm, how: str) -> None:
        if comm.ended:
            comm.fault(f"{how} after its {comm.ended}")
        comm.ended = how

    # --- calls

    def group_start(self) -> None:
        self._group.depth = getattr(self._group, "depth", 0) + 1
        if self._group.depth == 1:
            self._group.calls = []

    def group_end(self) -> None:
        depth = getattr(self._group, "depth", 0)
        if depth == 0:
            self.faults.append("a group ends that was never begun")
            self._raise(INVALID_USAGE, "group end without a start")
        self._group.depth = depth - 1
        if depth == 1:
            launches: dict[tuple[int, int], tuple[Comm, list[Asked]]] = {}
            for comm, stream, call in self._group.calls:
                launches.setdefault((id(comm), stream), (comm, []))[1].append(call)
            self._group.calls = []
            for (_, stream), (comm, calls) in launches.items():
                self._launch(comm, stream, calls)

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /) -> None:
        self._ask(Asked("all_reduce", source, target, count, dtype, op), comm, stream)

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, comm: Comm, stream: int, /
    ) -> None:
        mine = target if comm.rank == root else 0
        self._ask(Asked("reduce", source, mine, count, dtype, op, root), comm, stream)

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /
    ) -> None:
        self._ask(Asked("reduce_scatter", source, target, count, dtype, op), comm, stream)

    def all_gather(self, source: int, target: int, count: int, dtype: int, comm: Comm, stream: int, /) -> None:
        self._ask(Asked("all_gather", source, target, count, dtype), comm, stream)

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: Comm, stream: int, /
    ) -> None:
        mine = source if comm.rank == root else 0
        self._ask(Asked("broadcast", mine, target, count, dtype, SUM, root), comm, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> None:
        self._ask(Asked(SENDS, source, 0, count, dtype, SUM, peer), comm, stream)

    def recv(self, target: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> None:
        self._ask(Asked(RECEIVES, 0, target, count, dtype, SUM, peer), comm, stream)

    def _ask(self, call: Asked, comm: Any, stream: int) -> None:
        self.called.append(call.kind)
        if not isinstance(comm, Comm):
            self._raise(INVALID_ARGUMENT, "no communicator")
        if comm.ended:
            comm.fault(f"was called after its {comm.ended}")
            self._raise(INVALID_ARGUMENT, "the communicator is gone")
        if stream not in self._queues:
            comm.fault(f"was called on stream {stream}, which nobody knows")
        if call.count <= 0 or call.dtype not in TYPES or not SUM <= call.op <= AVG:
            comm.fault(f"was asked for {call.said}")
        if call.root >= comm.world.size:
            comm.fault(f"has no rank {call.root}")
        if getattr(self._group, "depth", 0):
            self._group.calls.append((comm, stream, call))
        else:
            self._launch(comm, stream, [call])

    def _launch(self, comm: Comm, stream: int, calls: Sequence[Asked]) -> None:
        comm.streams.add(stream)
        if len(comm.streams) > 1:
            comm.fault("was called on several streams")
        numbered = []
        for call in calls:
            number = -1
            if call.kind not in (SENDS, RECEIVES):
                number = comm.collectives
                comm.collectives += 1
            numbered.append((number, call))
        queue = self._queues[stream]
        comm.queued += 1
        queue.call(partial(comm.world.run, comm, queue, numbered))

    def _raise(self, status: int, text: str) -> NoReturn:
        self._last_error.text = text
        raise StandInError(status, f"result {status}")
