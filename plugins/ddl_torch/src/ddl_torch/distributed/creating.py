"""Makes the process groups that torch asks for."""

from __future__ import annotations

from typing import Any

from ddl_torch.distributed.group import DdlGroup, DdlProcessGroup
from ddl_torch.distributed.joining import join_job
from ddl_torch.distributed.reconfigurable import ReconfigurableGroup
from ddl_torch.distributed.store import DdlStore
from ddlcore.api import current_job, global_process_set
from ddlcore.api.framework_groups import add_members_set
from ddlcore.errors import InvalidArgument

_ANY_BACKEND_IN_PYTHON = "custom"


def create(options: Any, backend_options: Any = None) -> DdlGroup:
    """Return the process group for ``options``, as torch's ``register_backend`` asks for (``extended_api``).

    If the group has another backend for other devices, return only the backend, which torch calls for its own devices.
    The first group starts ddl's job, unless it runs already. All members of the group must call this.
    """
    chosen = group_class(getattr(options, "process_group", None))
    ranks = list(options.global_ranks_in_group)
    reconfigures = not ranks and getattr(options, "enable_reconfigure", False)  # torch 2.14 and later
    if reconfigures and chosen is not DdlProcessGroup:
        raise InvalidArgument("enable_reconfigure=True: a process group with several backends cannot be reconfigured")
    rank, size = options.group_rank, options.group_size
    if reconfigures:
        return ReconfigurableGroup(options.store, rank, size, options.timeout)
    ours = False
    if ranks:
        members = add_members_set(ranks, f"group {options.group_id}")
        own = f"set {members.process_set_id}"
    else:
        ours = join_job(options.store, rank, size, options.timeout)
        ranks, members = list(range(size)), global_process_set
        own = f"default group {current_job().next_ordinal('default groups')}"
    store = DdlStore(own, options.timeout)  # torch's own may hold what earlier groups with this name have left there
    return chosen(options.store, rank, ranks, members, options.timeout, ours, store)


def group_class(process_group: Any) -> type[DdlGroup]:
    """Return the class of what ``create`` returns for torch's ``process_group``.

    torch adds one backend after the other to it. Each call of a DdlBackend takes some µs longer than that of a
    DdlProcessGroup. Where torch does not say which other backends there are (before version 2.14), a DdlProcessGroup
    takes the place of all of them.
    """
    if process_group is None:
        return DdlProcessGroup
    others_follow = process_group._get_backend_name() != _ANY_BACKEND_IN_PYTHON  # this is the last one's name
    if not others_follow and not process_group._device_types:
        return DdlProcessGroup
    from ddl_torch.distributed.backend import DdlBackend  # needs torch 2.14

    return DdlBackend
