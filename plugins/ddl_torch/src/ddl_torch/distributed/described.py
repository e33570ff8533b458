"""What torch asks about a process group, and what every part of it needs: the members, the store, the time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ErrorType

from ddl_torch.autograd import OPERATIONS
from ddl_torch.distributed.uncompiled import uncompiled
from ddl_torch.distributed.work import DdlWork
from ddlcore.api import ProcessSet
from ddlcore.api.framework_groups import failure
from ddlcore.api.unnamed_calls import UnnamedBlockingCalls

NO_TIME = timedelta(0)
GRACE_S = 5.0  # the error that names the missing ranks comes after the group's timeout, and from the coordinator


@uncompiled
class DescribedGroup:
    """A group of torch.distributed without collectives. The methods have the signatures of torch's own classes.

    Classes that torch uses inherit from this one and from one of torch's, whose ``__init__`` takes rank and size.
    """

    supports_coalescing = False
    supports_splitting = False
    supports_reconfigure = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # of torch's class
        self._store = store
        self._timeout = timeout
        self._name = self._description = ""

    def _take_members(self, rank: int, ranks: Sequence[int], process_set: ProcessSet) -> None:
        """Make this the group of ``ranks``, which are ranks of the world, by rank in the group.

        ``process_set``: the same ranks for ddl.
        """
        self._rank = rank
        self._ranks = list(ranks)
        self._set = process_set
        self._unnamed = UnnamedBlockingCalls(OPERATIONS, process_set)
        self._number = 0

    # --- what torch asks about a group

    def getRank(self) -> int:
        """Return the rank of this process in the group."""
        return self._rank

    def getSize(self) -> int:
        """Return the number of ranks in the group."""
        return len(self._ranks)

    def getBackendName(self) -> str:
        """Return the name by which programs ask for this backend."""
        return "ddl"

    def name(self) -> str:
        """Return the same as ``getBackendName``."""
        return "ddl"

    def setGroupName(self, name: str) -> None:
        """Keep the name by which torch knows the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name that torch has given."""
        return self._name

    def setGroupDesc(self, text: str) -> None:
        """Keep the description that the program has given."""
        self._description = text

    def getGroupDesc(self) -> str:
        """Return the description."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> DescribedGroup:
        return self

    def _get_backend_name(self) -> str:
        return "ddl"

    def get_group_store(self) -> Any:
        """Return torch's store, not ddl's."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._number = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a collective of this group may wait for other ranks."""
        self._timeout = timeout

    def _has_hooks(self) -> bool:
        return False

    def get_error(self) -> Any:
        """Return whether ddl's job has failed: then every call of every group raises the error of the job."""
        return ErrorType.SUCCESS if failure() is None else ErrorType.COMM_ERROR

    def _limit_s(self, opts: Any) -> float:
        """Return how long a blocking call may take, in seconds: the time limit of the call, or else of the group."""
        own = getattr(opts, "timeout", None)
        timeout = own if own is not None and own > NO_TIME else self._timeout
        return timeout.total_seconds() + GRACE_S

    def _work(
        self, handle: Any, outputs: Sequence[torch.Tensor], land: Callable[[Any], None] | None, opts: Any
    ) -> DdlWork:
        """Return the work of an operation of this group, whose time limit is that of the call or of the group."""
        return DdlWork(handle, outputs, land, self._limit_s(opts))
