"""The functions of NCCL that the transport calls; nccl4py or, in tests, a stand-in implements them."""

from __future__ import annotations

from typing import Any, Protocol

Comm = Any  # an ncclComm_t, in the type of the layer that made it


class Raw(Protocol):
    """The functions of NCCL that the transport needs.

    Addresses are of device memory, counts are in elements, types and ops are NCCL's codes. The functions raise whatever
    nccl4py raises; ``errors.explained`` translates that.
    """

    def version(self) -> int:
        """Return the version code of the loaded NCCL."""
        ...

    def unique_id(self) -> bytes:
        """Return a new unique id. One rank makes it for all ranks of a communicator."""
        ...

    def init(self, size: int, unique_id: bytes, rank: int, device: int, name: str) -> Comm:
        """Create the communicator of ``size`` ranks, and return it when all ranks have called this.

        ``unique_id`` is NCCL's id of the communicator. ``device`` is the index of the calling thread's current device,
        which the communicator uses. The communicator's later calls block the host, too.
        """
        ...

    def state(self, comm: Comm) -> int:
        """Return the communicator's result code so far, of its work on the device and of NCCL's threads.

        Any thread may call this.
        """
        ...

    def last_error(self, comm: Comm | None) -> str:
        """Return NCCL's description of the last error. If ``comm`` is None, it is the last error while opening."""
        ...

    def abort(self, comm: Comm) -> object:
        """End everything that the communicator does, and free it. Any thread may call this, also during a call."""
        ...

    def destroy(self, comm: Comm) -> object:
        """Free the communicator. Nothing may be in progress on it."""
        ...

    def group_start(self) -> object:
        """Begin a group: ``group_end`` executes together all calls that this thread makes until then."""
        ...

    def group_end(self) -> object:
        """Execute the calls of the group that ``group_start`` has begun."""
        ...

    def all_reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /
    ) -> object:
        """Reduce the sources of all ranks by op into the target of every rank."""
        ...

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, comm: Comm, stream: int, /
    ) -> object:
        """Reduce the sources of all ranks by op into the target of ``root`` only."""
        ...

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /
    ) -> object:
        """Reduce the sources of all ranks by op, and write the ``count`` elements of this rank to its target."""
        ...

    def all_gather(self, source: int, target: int, count: int, dtype: int, comm: Comm, stream: int, /) -> object:
        """Write the ``count`` elements of every rank, in rank order, to the target of every rank."""
        ...

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: Comm, stream: int, /
    ) -> object:
        """Copy the source of ``root`` into every target; the other sources are ignored."""
        ...

    def send(self, source: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> object:
        """Send ``count`` elements to ``peer``, which must receive as many elements."""
        ...

    def recv(self, target: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> object:
        """Receive ``count`` elements from ``peer``."""
        ...
