"""Passes ddl's settings to NCCL as environment variables, and warns if two NCCLs are installed.

Variables that the user has set are not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping

from ddl_nccl.library import overwritten, spelled
from ddl_nccl.plugin import one_each
from ddlcore.contracts.interfaces import chosen_address, interface_addresses
from ddlcore.contracts.transport import Context
from ddlcore.errors import TransportError

log = logging.getLogger("ddl")
INTERFACE = "NCCL_SOCKET_IFNAME"
BLOCKING = "NCCL_COMM_BLOCKING"


def tell(environ: MutableMapping[str, str], settings: Mapping[str, str | int | float | bool]) -> None:
    """Set NCCL's variables in ``environ``.

    Call this function before NCCL is first used in the process, because NCCL reads each variable once. The choice of
    InfiniBand cards (NCCL_IB_…) is left to NCCL and the user. Raises TransportError if this host has no interface of
    the requested name. Also raises TransportError if a variable overrides the communicator's configuration so that
    calls return before they are done.
    """
    if environ.get(BLOCKING, "").strip() == "0":
        raise TransportError(f"nccl: {BLOCKING}=0 makes NCCL's calls return before they are done; unset {BLOCKING}")
    wanted = str(settings.get("network_interface", ""))
    if wanted and not environ.get(INTERFACE):
        environ[INTERFACE] = "=" + chosen_interface(wanted)  # with "=", only the interface of exactly this name matches


def identity(environ: Mapping[str, str], device: str) -> str:
    """Return the text by which ranks check that no two of them use the same device.

    The text is ``device``. It is empty if ranks may share a device: then the ranks do not check, and NCCL decides
    whether sharing works.
    """
    return device if one_each(environ) else ""


def chosen_interface(wanted: str) -> str:
    """Return the name of the network interface to use.

    ``wanted`` is a list, separated by commas, of names of interfaces or of addresses. The first entry that this host
    has is used. Raises TransportError if this host has none of the entries.
    """
    try:
        address = chosen_address(wanted)
    except ValueError as error:
        raise TransportError(f"nccl: {error}") from None
    have = interface_addresses()
    names = [part.strip() for part in wanted.split(",")]
    named = (name for name in names if have.get(name))
    return next(named, None) or next(name for name, addresses in have.items() if address in addresses)


def warn(context: Context, version: int) -> None:
    """Log a warning, once on each host, if one of two installed NCCLs has overwritten the other.

    ``version`` is the version code of the loaded NCCL, which may not be the one that the user wants.
    """
    me = context.members[context.rank]
    first = next(member.rank for member in context.members if member.host == me.host)
    if me.rank == first and overwritten():
        log.warning("nccl: NCCL %s is loaded, but %s", spelled(version), overwritten())
