"""What the transport calls of NCCL: by nccl4py, or by what stands in for it in tests."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Comm", "Raw"]

Comm = Any  # an ncclComm_t, in the words of whoever made it


class Raw(Protocol):
    """What the transport needs of NCCL. Addresses are the device's, counts elements, types and ops NCCL's codes.

    Raises whatever nccl4py raises; ``errors.explained`` knows it.
    """

    def version(self) -> int:
        """The code of the NCCL that is loaded."""
        ...

    def unique_id(self) -> bytes:
        """A new one, which one rank makes for all."""
        ...

    def init(self, size: int, unique_id: bytes, rank: int, device: int, name: str) -> Comm:
        """Meets the other ranks; blocks until all have come. Calls of the communicator block the host likewise.

        ``device`` is the index of the calling thread's current device, which the communicator is to serve.
        """
        ...

    def state(self, comm: Comm) -> int:
        """Its result so far, of what runs on the device and in NCCL's threads; from any thread."""
        ...

    def last_error(self, comm: Comm | None) -> str:
        """NCCL's own account of what went wrong last; None: in opening."""
        ...

    def abort(self, comm: Comm) -> object:
        """Ends whatever it does, and frees it; from any thread, also in the midst of a call."""
        ...

    def destroy(self, comm: Comm) -> object:
        """Frees it; nothing is under way."""
        ...

    def group_start(self) -> object:
        """Of this thread: calls from here on are carried out together, at the end."""
        ...

    def group_end(self) -> object:
        """Carries them out."""
        ...

    def all_reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /
    ) -> object:
        """target = all ranks' sources by op."""
        ...

    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, comm: Comm, stream: int, /
    ) -> object:
        """Likewise, at ``root`` alone."""
        ...

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: Comm, stream: int, /
    ) -> object:
        """target = this rank's ``count`` elements of it."""
        ...

    def all_gather(self, source: int, target: int, count: int, dtype: int, comm: Comm, stream: int, /) -> object:
        """target = every rank's ``count`` elements, one behind the other."""
        ...

    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: Comm, stream: int, /
    ) -> object:
        """target = that of ``root``, whose source alone counts."""
        ...

    def send(self, source: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> object:
        """To ``peer``, which receives as much."""
        ...

    def recv(self, target: int, count: int, dtype: int, peer: int, comm: Comm, stream: int, /) -> object:
        """From ``peer``."""
        ...
