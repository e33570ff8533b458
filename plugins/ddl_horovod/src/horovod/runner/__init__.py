"""``horovod.run``: call a function on several ranks, which this process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks, and return their results in rank order.

    This is ``ddlcore.run``, which describes the arguments and the errors, with Horovod's defaults: without ``num_proc``
    there is one rank, and an elastic job without ``min_num_proc`` needs ``num_proc`` ranks. The ranks are told their
    place by Horovod's variables, too (HOROVOD_RANK and others), and the HOROVOD_* variables of this process count.
    """
    given = dict(locals())
    from ddl_horovod.variables import rank_variables, with_ddl_variables

    import ddlcore

    if np is not None:
        given["num_proc"] = np
    elastic = host_discovery_script or max_num_proc or max_np
    if elastic and min_num_proc is None and min_np is None:
        given["min_num_proc"] = given["num_proc"]
    environ, _ = with_ddl_variables(os.environ)
    environ["DDL_RANK_VARIABLES"] = rank_variables(environ)
    results: list[Any] = ddlcore.run(**given, env=environ)
    return results
