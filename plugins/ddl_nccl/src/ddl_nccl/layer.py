"""The functions of NCCL that the transport calls. nccl4py implements them; in tests, a stand-in does."""

from __future__ import annotations

from typing import Any, Protocol

Comm = Any  # an ncclComm_t, in the type of the layer that made it


class Raw(Protocol):
    """The functions of NCCL that the transport needs.

    Addresses are addresses of device memory, and counts are numbers of elements. Types and operations are NCCL's codes.
    The functions raise the exceptions of nccl4py; ``errors.explained`` converts them into ddl errors.
    """

    def version(self) -> int:
        """Return the version code of the loaded NCCL, such as 23203 for 2.32.3."""
        ...

    def unique_id(self) -> bytes:
        """Return a new unique id. One rank makes the id for all ranks of a communicator."""
        ...

    def init(self, size: int, unique_id: bytes, rank: int, device: int, name: str) -> Comm:
        """Create the communicator of ``size`` ranks, and return it when all ranks have called this function.

        ``unique_id`` is NCCL's id of the communicator. ``device`` is the index of the calling thread's current device,
        which the communicator uses. ``name`` is the communicator's name in NCCL's messages. Later calls on the
        communicator block the host as this call does.
        """
        ...

    def state(self, comm: Comm) -> int:
        """Return the communicator's current result code, which covers its work on the device and NCCL's own threads.

        Any thread may call this function.
        """
        ...

    def last_error(self, comm: Comm | None) -> str:
        """Return NCCL's description of the last error on ``comm``.

        If ``comm`` is None, return the description of the last error that occurred while a communicator was opened.
        """
        ...

    def abort(self, comm: Comm) -> object:
        """End all operations of the communicator, and free the communicator.

        Any thread may call this function, also while another thread calls NCCL on the communicator.
        """
        ...

    def destroy(self, comm: Comm) -> object:
        """Free the communicator. No operation may be in progress on the communicator."""
        ...

    def group_start(self) -> object:
        """Begin a group.

        The calls that this thread makes until ``group_end`` are executed together by ``group_end``.
        """
        ...

    def group_end(self) -> object:
        """Execute the calls of the group that ``group_start`` has begun."""
        ...

    def all_reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /
    ) -> object:
        """Reduce the sources of all ranks by the operation ``op`` into the target of every rank."""
        ...

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, comm: Comm, stream: int, /
    ) -> object:
        """Reduce the sources of all ranks by the operation ``op`` into the target of the rank ``root`` only."""
        ...

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /
    ) -> object:
        """Reduce the sources of all ranks by the operation ``op``, and write this rank's part to ``target``.

        ``count`` is the number of elements of each rank's part.
        """
        ...

    def all_gather(self, source: int, target: int, count: int, dtype: int, comm: Comm, stream: int, /) -> object:
        """Write the ``count`` elements of every rank, in rank order, to the target of every rank."""
        ...

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: Comm, stream: int, /
    ) -> object:
        """Copy the source of the rank ``root`` into the target of every rank.

        The sources of other ranks are ignored.
        """
        ...

    def send(self, source: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> object:
        """Send ``count`` elements to the rank ``peer``, which must receive the same number of elements."""
        ...

    def recv(self, target: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> object:
        """Receive ``count`` elements from the rank ``peer``."""
        ...
