"""The process group: each method is one of torch's collectives, made of calls of ddl.

ddl pairs the calls of different ranks by their order within the group, as torch asks for. A call whose shape, type or
operation differs between ranks raises MismatchError on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddl_torch.distributed.arguments import waits
from ddl_torch.distributed.joining import join_job
from ddl_torch.distributed.monitored import wait_for_all
from ddl_torch.distributed.moving import MovingGroup
from ddl_torch.distributed.point_to_point import PointToPoint
from ddl_torch.distributed.reducing import ReducingGroup
from ddl_torch.distributed.store import DdlStore
from ddl_torch.distributed.uncompiled import uncompiled
from ddl_torch.distributed.work import DONE
from ddlcore.api import ProcessSet, current_job, global_process_set, shutdown
from ddlcore.api.framework_groups import add_members_set, barrier_async


def create(options: Any, backend_options: Any = None) -> DdlProcessGroup:
    """Return the process group for ``options``, as torch's ``register_backend`` asks for (``extended_api``).

    The first group starts ddl's job, unless it runs already. All members of the group must call this.
    """
    ranks = list(options.global_ranks_in_group)
    rank, size = options.group_rank, options.group_size
    ours = False
    if ranks:
        members = add_members_set(ranks, f"group {options.group_id}")
        own = f"set {members.process_set_id}"
    else:
        ours = join_job(options.store, rank, size, options.timeout)
        ranks, members = list(range(size)), global_process_set
        own = f"default group {current_job().next_ordinal('default groups')}"
    store = DdlStore(own, options.timeout)  # torch's own may hold what earlier groups with this name have left there
    return DdlProcessGroup(options.store, rank, ranks, members, options.timeout, ours, store)


@uncompiled
class DdlProcessGroup(ReducingGroup, MovingGroup):
    """A group of torch.distributed whose collectives run on ddl.

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
        super().__init__(store, rank, ranks, process_set, timeout)
        self._starts_job = starts_job
        self._own_store = own_store
        self._p2p = PointToPoint(own_store, rank, len(ranks), timeout)
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
            self._starts_job = False
            shutdown()

    def abort(self) -> None:
        self.shutdown()
