"""What NCCL finds around it: hands ddl's settings on, of which the user's own stand, and warns of two NCCLs in one place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping

from ddl_nccl.library import overwritten, spelled
from ddl_nccl.plugin import one_each
from ddlcore.contracts.interfaces import chosen_address, interface_addresses
from ddlcore.contracts.transport import Context
from ddlcore.errors import TransportError

__all__ = ["chosen_interface", "identity", "tell", "warn"]

log = logging.getLogger("ddl")
INTERFACE = "NCCL_SOCKET_IFNAME"
BLOCKING = "NCCL_COMM_BLOCKING"


def tell(environ: MutableMapping[str, str], settings: Mapping[str, str | int | float | bool]) -> None:
    """Before NCCL is used first in this process: it reads each variable once.

    Which network cards of InfiniBand it takes (NCCL_IB_…) is left to NCCL and the user.
    Raises TransportError where this host has no interface of the name that was asked for, or a variable makes calls
    return before they are done, over what a communicator was opened with.
    """
    if environ.get(BLOCKING, "").strip() == "0":
        raise TransportError(f"nccl: {BLOCKING}=0 makes NCCL's calls return before they are done; unset {BLOCKING}")
    wanted = str(settings.get("network_interface", ""))
    if wanted and not environ.get(INTERFACE):
        environ[INTERFACE] = "=" + chosen_interface(wanted)  # with =, no interface whose name only begins so


def identity(environ: Mapping[str, str], device: str) -> str:
    """Of the device, for the ranks to see whether two are on one; empty where they may be: NCCL then says whether it can."""
    return device if one_each(environ) else ""


def chosen_interface(wanted: str) -> str:
    """The name of the interface that ``wanted`` stands for: names, or addresses of this host; the first that it has."""
    try:
        address = chosen_address(wanted)
    except ValueError as error:
        raise TransportError(f"nccl: {error}") from None
    have = interface_addresses()
    names = [part.strip() for part in wanted.split(",")]
    named = (name for name in names if have.get(name))
    return next(named, None) or next(name for name, addresses in have.items() if address in addresses)


def warn(context: Context, version: int) -> None:
    """One line from each host where it is not sure that the NCCL of this ``version`` is the one that was meant."""
    me = context.members[context.rank]
    first = next(member.rank for member in context.members if member.host == me.host)
    if me.rank == first and overwritten():
        log.warning("nccl: NCCL %s is loaded, but %s", spelled(version), overwritten())
