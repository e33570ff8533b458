"""The transport over MPI: it opens one MPI communicator for each group of ranks, uses it, and ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ddl_mpi import meeting, process
from ddl_mpi.collectives import MpiCollectives
from ddl_mpi.waiting import Step, Steps
from ddlcore.contracts.transport import Capabilities, Context, Transport, Work, dense
from ddlcore.errors import DdlInternalError, TransportError
from ddlcore.types import Buffer, ReduceOp

log = logging.getLogger("ddl")


class MpiTransport(Transport):
    """A transport for ranks that were all started by one mpiexec (or srun, …).

    After ``open``, only the thread that calls a method of this object calls MPI.
    """

    capabilities = Capabilities(thread_bound=True)

    def __init__(self) -> None:
        self._comm: Any = None
        self._collectives = MpiCollectives()
        self._aborted = False
        self._attends = False
        self._under_way: object = None  # the memory to which MPI may write now
        self._lock = threading.Lock()  # abort() may come from any thread during close()

    def open(self, context: Context) -> None:
        super().open(context)
        mpi, self._comm = meeting.meet(context, self._check)
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self._collectives.open(mpi, self._comm, context, self.allocate)
        devices = frozenset({"cpu", "cuda"}) if process.cuda_aware() else frozenset({"cpu"})
        log.debug("mpi: %s by %s, memory of %s", self._name(), process.library_version(), " and ".join(sorted(devices)))
        bound = mpi.Query_thread() < mpi.THREAD_SERIALIZED
        self.capabilities = replace(self.capabilities, devices=devices, thread_bound=bound)

    def attend(self, context: Context, check: Callable[[], None]) -> None:
        super().open(context)
        self._attends = True  # MPI_Finalize would wait for the other processes, as MPI_Init does
        meeting.begin(context, check)

    def close(self) -> None:
        with self._lock:
            comm, self._comm = self._comm, None
            self._attends = False
        if comm is None:
            return
        if self._aborted or self._under_way is not None:
            process.forsake(comm, self._collectives, self._under_way)
            return
        self._collectives.free()
        comm.Free()

    def abort(self) -> None:
        self._aborted = True
        with self._lock:
            if self._comm is not None or self._attends:
                process.forsake()  # from now on this process ends without MPI_Finalize

    # --- the collectives

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        return self._begin(self._collectives.allreduce(source, target, op), source, target)

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        return self._begin(self._collectives.allgather(source, target, counts), source, target)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        return self._begin(self._collectives.broadcast(buffer, root), buffer)

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        return self._begin(self._collectives.reducescatter(source, target, counts, op), source, target)

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        return self._begin(self._collectives.alltoall(source, target, counts), source, target)

    def barrier(self) -> Work:
        return self._begin(self._collectives.barrier())

    def _begin(self, steps: Iterator[Step], *memory: Buffer) -> Work:
        dense(*memory)
        self._check()
        if self._comm is None:
            raise TransportError(f"mpi: {self._name()} is not open")
        self._under_way = memory or steps
        return Steps(steps, self._check, self._failure, self._ended)

    def _ended(self) -> None:
        self._under_way = None

    # --- what goes wrong

    def _check(self) -> None:
        if self._aborted:
            raise TransportError(f"mpi: {self._name()} was aborted")

    def _failure(self, error: Exception) -> Exception:
        """Convert an error of MPI to an error of ddl. No other function does so."""
        if isinstance(error, DdlInternalError):
            return error
        return TransportError(f"mpi: {self._name()}: {error}")

    def _name(self) -> str:
        context = getattr(self, "context", None)
        return f"communicator {context.name or '(unnamed)'}" if context else "the communicator"
