"""Hands ddl's settings on to NCCL, which reads its own variables; what the user has set stands."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from ddlcore.contracts.interfaces import chosen_address, interface_addresses
from ddlcore.errors import TransportError

__all__ = ["chosen_interface", "tell"]

INTERFACE = "NCCL_SOCKET_IFNAME"


def tell(environ: MutableMapping[str, str], settings: Mapping[str, str | int | float | bool]) -> None:
    """Before NCCL is used first in this process: it reads each variable once.

    Which network cards of InfiniBand it takes (NCCL_IB_…) is left to NCCL and the user.
    Raises TransportError where this host has no interface of the name that was asked for.
    """
    wanted = str(settings.get("network_interface", ""))
    if wanted and not environ.get(INTERFACE):
        environ[INTERFACE] = "=" + chosen_interface(wanted)  # with =, no interface whose name only begins so


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
