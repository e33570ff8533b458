"""The process group: each method is one of torch's collectives, made of calls of ddl.

ddl pairs the calls of different ranks by their order within the group, as torch asks for. A call whose shape, type or
operation differs between ranks raises MismatchError on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddl_torch.distributed.arguments import waits
from ddl_torch.distributed.monitored import wait_for_all
from ddl_torch.distributed.moving import MovingGroup
from ddl_torch.distributed.point_to_point import PointToPoint
from ddl_torch.distributed.reducing import ReducingGroup
from ddl_torch.distributed.uncompiled import uncompiled
from ddl_torch.distributed.work import DONE
from ddlcore.api import ProcessSet, shutdown
from ddlcore.api.framework_groups import barrier_async

BACKENDS_IN_PYTHON = hasattr(dist.ProcessGroup, "supports_reconfigure")  # torch 2.14 and later


@uncompiled
class DdlGroup(ReducingGroup, MovingGroup):
    """A group of torch.distributed whose collectives run on ddl, see DescribedGroup.

    ``store``: torch's own. ``ranks``: the ranks of the world, by rank in the group. ``starts_job``: this group has
    started ddl's job. ``own_store``: holds nothing but what this group writes.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        process_set: ProcessSet,
        timeout: timedelta,
        starts_job: bool,
        own_store: Any,
    ) -> None:
        super().__init__(store, rank, len(ranks), timeout)
        self._starts_job = starts_job
        self._take_peers(rank, ranks, process_set, own_store)
        self._show_backend()

    def _show_backend(self) -> None:
        """Register what torch looks for while it makes a group. A DdlBackend is itself what torch looks for."""

    def _take_peers(self, rank: int, ranks: Sequence[int], process_set: ProcessSet, own_store: Any) -> None:
        self._take_members(rank, ranks, process_set)
        self._own_store = own_store
        self._p2p = PointToPoint(own_store, rank, len(ranks), self._timeout)
        self._barriers = 0

    # --- waiting for each other

    def barrier(self, opts: Any = None) -> Any:
        self._number += 1
        waiting = waits(opts)
        if waiting and self._unnamed.barrier(self._limit_s(opts)):
            return DONE
        return self._work(barrier_async(self._set, waits=waiting), [], None, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called this. If some do not within ``timeout``, rank 0 raises an error with their ranks.

        With ``wait_all_ranks``, the error names all of them, otherwise the first one. The other ranks raise an error, too.
        The errors begin as Gloo's do: there are programs that look for these words.
        """
        self._barriers += 1
        store = dist.PrefixStore(f"monitored barrier {self._barriers}", self._own_store)
        patience = self._timeout if timeout is None else timeout
        wait_for_all(store, self._rank, len(self._ranks), patience, wait_all_ranks)

    # --- point to point

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._p2p.send(tensors, to, tag)

    def recv(self, tensors: Any, giver: int, tag: int = 0) -> Any:
        return self._p2p.receive(tensors, giver, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._p2p.receive_from_any(tensors, tag)

    # --- the end

    def shutdown(self) -> None:
        """End ddl's job if this group has started it. Other groups leave their process set to the end of the job."""
        if self._starts_job:
            shutdown()
            self._starts_job = False

    def abort(self) -> None:
        self.shutdown()


class DdlProcessGroup(DdlGroup, dist.ProcessGroup):  # type: ignore[misc]  # torch's class has no types
    """A group of torch.distributed for which ddl is the only backend. torch's functions call its methods directly."""

    def _show_backend(self) -> None:
        """Register a backend: torch 2.15 attaches a recorder to each group, and fails if it finds no backend."""
        if BACKENDS_IN_PYTHON:
            from ddl_torch.distributed.shown import ShownBackend

            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._set_default_backend(kind)
            self._register_backend(torch.device("cpu"), kind, ShownBackend(self._rank, len(self._ranks), self._timeout))
