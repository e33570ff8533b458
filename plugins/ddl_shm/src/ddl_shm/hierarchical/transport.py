"""The transport that is composed of two other transports, one within each host and one across hosts.

This transport opens and closes both other transports, and runs each collective as a sequence of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ddl_shm.hierarchical import moving, reducing
from ddl_shm.hierarchical.crossing import Crossing
from ddl_shm.hierarchical.layout import HostGroups
from ddl_shm.hierarchical.pipeline import Pipeline
from ddlcore.contracts.solo import SoloTransport
from ddlcore.contracts.store import PrefixStore
from ddlcore.contracts.transport import DONE, Capabilities, Context, Transport, Work, dense
from ddlcore.errors import TransportError
from ddlcore.types import Buffer, ReduceOp

CHUNK_BYTES = 1 << 20
SHARES = 2


class HierarchicalTransport(Transport):
    """A transport for ranks on two or more hosts, with any number of ranks per host and in any order.

    ``local`` is the transport for the ranks of one host. On a host with a single rank, ``local`` is not used.
    ``make_cross`` returns a new instance of the transport across hosts. Only the ranks that exchange data with other
    hosts open such an instance. If ``attended`` is true, every rank makes one more instance, and calls
    ``Transport.attend`` of this instance while the transports are opened. Values are added first on each host in the
    order of its ranks, then in the order of the hosts. So values are not added in the order of all ranks.
    """

    def __init__(self, local: Transport, make_cross: Callable[[], Transport], attended: bool = False) -> None:
        self._local = local
        self._make_cross = make_cross
        self._attended = attended
        self._attending: Transport | None = None
        self._crossing: Crossing | None = None
        self._pipeline: Pipeline | None = None
        self._opened: Transport | None = None  # the transport of this host, set before its open() is called
        self._aborted = False
        able = local.capabilities
        self.capabilities = Capabilities(
            devices=able.devices,
            dtypes=able.dtypes,
            ops=able.ops,
            order_fixed=able.order_fixed,
            host_first=True,
            thread_bound=able.thread_bound,
            abort=able.abort,
        )

    def open(self, context: Context) -> None:
        super().open(context)
        shares = int(context.settings.get("hierarchical_shares", SHARES))
        layout = HostGroups.of(context.members, context.rank, shares)
        if layout.crosses:
            self._crossing = Crossing(self._make_cross)
        if self._attended:
            self._attending = self._make_cross()
        self._opened = self._local if len(layout.mates) > 1 else SoloTransport()
        self._check()  # an abort that comes later is passed on to both parts
        try:
            self._open_parts(layout, self._opened, self._crossing)
        except BaseException:
            self.abort()  # so that close() need not wait for a part that is still being opened
            raise
        chunk_bytes = int(context.settings.get("hierarchical_chunk_bytes", CHUNK_BYTES))
        self._pipeline = Pipeline(layout, self._opened, self._crossing, context.kernels, chunk_bytes, self._check)

    def _open_parts(self, layout: HostGroups, local: Transport, crossing: Crossing | None) -> None:
        """Open the transport within the host and the transport across hosts.

        Both transports are opened at the same time, so that their timeouts run in parallel. ``local`` is the transport
        within the host. ``crossing`` is None on a rank that exchanges no data with other hosts.
        """
        context = self.context
        if crossing is not None:
            name = f"{context.name} across hosts"
            crossing.begin(_part(context, layout.crossing, layout.host, f"share{layout.local}/", name))
        name = f"{context.name} on host {layout.host}"
        local.open(_part(context, layout.mates, layout.local, f"host{layout.host}/", name))
        if crossing is not None:
            crossing.opened(context.timeout_s)
        if self._attending is not None:
            self._attending.attend(context, self._check)

    def close(self) -> None:
        self._pipeline = None
        crossing, self._crossing = self._crossing, None
        opened, self._opened = self._opened, None
        attending, self._attending = self._attending, None
        if crossing is not None:
            crossing.close()
        if attending is not None:
            attending.close()
        if opened is not None:
            opened.close()

    def abort(self) -> None:
        self._aborted = True
        for part in (self._opened, self._crossing, self._attending):
            if part is not None:
                part.abort()

    def allreduce(self, source: Buffer, target: Buffer, op: ReduceOp) -> Work:
        reducing.allreduce(self._ready(source, target), source, target, op)
        return DONE

    def allgatherv(self, source: Buffer, target: Buffer, counts: Sequence[int]) -> Work:
        moving.allgatherv(self._ready(source, target), source, target, counts)
        return DONE

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        moving.broadcast(self._ready(buffer), buffer, root)
        return DONE

    def reducescatterv(self, source: Buffer, target: Buffer, counts: Sequence[int], op: ReduceOp) -> Work:
        reducing.reducescatterv(self._ready(source, target), source, target, counts, op)
        return DONE

    def alltoallv(self, source: Buffer, target: Buffer, counts: Sequence[Sequence[int]]) -> Work:
        moving.alltoallv(self._ready(source, target), source, target, counts)
        return DONE

    def barrier(self) -> Work:
        moving.barrier(self._ready())
        return DONE

    def _ready(self, *buffers: Buffer) -> Pipeline:
        """Check that a collective can run on ``buffers``, and return the communicator's pipeline.

        Raises TransportError if the communicator is not open or was aborted, and ValueError if a buffer is not dense.
        """
        dense(*buffers)
        if self._pipeline is None:
            raise TransportError("hierarchical: the communicator is not open")
        self._check()
        return self._pipeline

    def _check(self) -> None:
        if self._aborted:
            raise TransportError(f"hierarchical: {self.context.name} was aborted here")


def _part(context: Context, ranks: Sequence[int], rank: int, prefix: str, name: str) -> Context:
    members = tuple(context.members[r] for r in ranks)
    return replace(context, rank=rank, members=members, store=PrefixStore(prefix, context.store), name=name)
