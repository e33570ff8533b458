"""Check the arguments of ``ddlcore.run``, and translate them to settings."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ddlcore.config.loading import Settings
from ddlcore.launch.job.launcher import check_route
from ddlcore.launch.job.placement import Placed, check_elastic, find_discovery, place_ranks
from ddlcore.launch.ranks.environment import RankVariables
from ddlcore.plug.registry import Registry

# Arguments, and the settings with the same meaning. If two arguments have one meaning, the later one of this table counts.
_SETTINGS = (
    ("mpi_args", "launcher_args"),
    ("backend", "backend"),
    ("start_timeout", "start_timeout_s"),
    ("start_timeout_s", "start_timeout_s"),
    ("torch_env", "torch_env"),
    ("ssh_port", "ssh_port"),
    ("ssh_identity_file", "ssh_identity_file"),
    ("network_interface", "network_interface"),
    ("network_interfaces", "network_interface"),
    ("min_np", "min_np"),
    ("min_num_proc", "min_np"),
    ("max_np", "max_np"),
    ("max_num_proc", "max_np"),
    ("slots", "slots_per_host"),
    ("reset_limit", "reset_limit"),
    ("host_discovery_script", "host_discovery_script"),
)
_CALLER = 4  # stack level, seen from ``_warn``, of the code that has called ``ddlcore.run``


def check_call(func: object, args: object, kwargs: object, executable: str | None) -> None:
    """Check the first arguments of ``ddlcore.run``, and raise ValueError if one of them has a wrong type.

    Also raise ValueError if ``executable`` is given and is not the interpreter of this process.
    """
    if not callable(func):
        raise ValueError(f"run: func is of type {type(func).__name__}; pass a function")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ValueError(f"run: args is of type {type(args).__name__}; pass a tuple, such as args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ValueError(f"run: kwargs is of type {type(kwargs).__name__}; pass a dict")
    if executable is not None and os.path.abspath(executable) != os.path.abspath(sys.executable):
        raise ValueError(
            f"run: executable={executable!r}: the ranks run {sys.executable}, the interpreter of this process, for which "
            "func is pickled. Leave it out and start this script with the other interpreter, or use `ddl run`"
        )


def number_of_ranks(
    num_proc: int | None, np: int | None, hosts: str | None, hostfile: str | None, discovery: str | None = None
) -> int | None:
    """Return the number of ranks for these arguments of ``ddlcore.run``. A result of None means all slots of the hosts.

    ``num_proc`` and ``np`` are two names for the number of ranks. If neither is given, the result is None if hosts are
    given in any way, and 2 if not. ``discovery`` is the host discovery script. Raises ValueError if ``num_proc`` and
    ``np`` are different or if the number is not an int.
    """
    if np is not None:
        if num_proc is not None and num_proc != np:
            raise ValueError(f"run: np={np} and num_proc={num_proc} say different things; pass num_proc alone")
        _warn("np is deprecated; pass num_proc", DeprecationWarning)
        num_proc = np
    if num_proc is None and hosts is None and hostfile is None and not discovery:
        num_proc = 2
    if num_proc is not None and (isinstance(num_proc, bool) or not isinstance(num_proc, int)):
        raise ValueError(f"run: num_proc is of type {type(num_proc).__name__}; pass a whole number")
    return num_proc


def settings_asked(asked: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of ddl that ``asked``, all arguments of ``ddlcore.run`` by name, ask for.

    An argument that is None was not given. Warns about arguments that have no effect in ddl. Raises ValueError for
    arguments that ddl cannot support, and for bad values.
    """
    if asked["use_gloo"] and asked["use_mpi"]:
        raise ValueError("run: use_gloo and use_mpi name different transports; pass one of them, or backend=")
    if asked["disable_cache"]:
        _warn("disable_cache has no effect: nothing is cached between starts", UserWarning)
    wanted = [name.removeprefix("use_") for name, value in asked.items() if name.startswith("use_") and value]
    own: dict[str, Any] = {"backend": wanted[0]} if wanted else {}
    own |= {setting: asked[name] for name, setting in _SETTINGS if asked[name] is not None}
    if asked["cooldown_range"] is not None:
        own["host_cooldown_s"] = " ".join(map(str, asked["cooldown_range"]))
    if not isinstance(own.get("network_interface", ""), str):
        own["network_interface"] = ",".join(own["network_interface"])
    if asked["dashboard"] is not None:
        # True and False ask for any free port and for no live page; a port or an address is the setting itself.
        words = {True: "auto", False: ""} if isinstance(asked["dashboard"], bool) else {}
        own["dashboard"] = words.get(asked["dashboard"], str(asked["dashboard"]))
    return own


def placed_on(
    ranks: int | None,
    hosts: str | None,
    hostfile: str | None,
    settings: Settings,
    registry: Registry,
    environ: Mapping[str, str],
) -> Placed:
    """Decide on which hosts the ranks run, and check that the transports can serve ranks on these hosts.

    ``ranks`` is the number of ranks; None means all slots of the hosts. ``hosts`` and ``hostfile`` are the arguments of
    ``ddlcore.run``. Raises ValueError, PluginError or TransportError, with a message of one line, if the ranks cannot
    run there.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("run: hosts and hostfile both say where; pass one of them")
    discovery = find_discovery(settings, registry, environ)
    placed = place_ranks(ranks, hosts, hostfile, settings, registry, environ, discovery)
    route = check_route(settings.text("backend"), placed.layout.ranks, registry, placed.launcher)
    check_elastic(settings, placed.layout.size, route)
    RankVariables.of(settings)
    return placed


def _warn(text: str, category: type[Warning]) -> None:
    warnings.warn(f"run: {text}", category, stacklevel=_CALLER)
