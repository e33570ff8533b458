"""Finds the network interfaces and addresses of this host, by an interface's name or by the route to another host.

Transports, the control server and launchers use these functions before they listen or connect. The functions support
IPv4 and IPv6.
"""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["chosen_address", "interface_addresses", "route_address"]

_PROBE_PORT = 9  # "discard"; connecting a datagram socket sends nothing


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return a dict that maps the name of each network interface of this host to the interface's addresses.

    The order of the addresses is: IPv4, IPv6, link-local IPv6 (``fe80::1%eth0``). The tuple of an interface without an
    address is empty. Raises OSError if the system does not provide the list of interfaces.
    """
    import psutil  # here, because few ranks need it

    known = psutil.net_if_addrs()  # leaves out interfaces that have no address at all
    found = {
        name: [one.address for one in known.get(name, ()) if one.family in (socket.AF_INET, socket.AF_INET6)]
        for name in dict.fromkeys((*(name for _, name in socket.if_nameindex()), *known))
    }
    return {name: tuple(sorted(addresses, key=_preference)) for name, addresses in found.items()}


def chosen_address(wanted: str, toward: str = "") -> str:
    """Return one of this host's own addresses. ``wanted`` names the address, or a network interface that has it.

    ``wanted`` may be a list of such names, separated by commas. Then the first name that exists on this host is used.
    ``toward``: the address of a peer; "" if there is none. If a named interface has IPv4 and IPv6 addresses, the result
    is of the same IP version as ``toward``.

    Raises ValueError if no name in ``wanted`` exists on this host. The message is one line that lists the existing
    interfaces.
    """
    have = interface_addresses()
    family = _family(toward)
    for name in (part.strip() for part in wanted.split(",")):
        if have.get(name):
            return next((a for a in have[name] if _family(a) == family), have[name][0])
        if any(_same(name, address) for addresses in have.values() for address in addresses):
            return name
    there = ", ".join(f"{name} ({addresses[0]})" for name, addresses in have.items() if addresses)
    bare = [name for name in wanted.split(",") if name.strip() in have]
    what = f"network interface {bare[0].strip()} has no address" if bare else f"no network interface is called {wanted}"
    raise ValueError(f"{what} on {socket.gethostname()}; there are {there} (--network-interface)")


def route_address(host: str) -> str:
    """Return this host's own address on the route to ``host``, without sending anything to ``host``.

    ``host``: the name or the address of another host. Raises ValueError, with a message of one line, if ``host`` has no
    address or if there is no route to ``host``.
    """
    failure: OSError | None = None
    try:
        for family, _, _, _, place in socket.getaddrinfo(host, _PROBE_PORT, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(place)
                    return _text(probe.getsockname())
            except OSError as error:  # one of several addresses may be of a family that this host does not have
                failure = failure or error
    except OSError as error:
        failure = error
    raise ValueError(f"no route from {socket.gethostname()} to {host}: {failure.strerror if failure else 'no address'}")


def _text(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    address = name[0]
    scope = name[3] if len(name) == 4 else 0
    return f"{address}%{socket.if_indextoname(scope)}" if scope and "%" not in address else address


def _family(address: str) -> int:
    """Return the version of the IP address ``address``, 4 or 6; 0 if ``address`` is not an IP address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).version
    except ValueError:
        return 0


def _same(one: str, other: str) -> bool:
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        return False


def _preference(address: str) -> tuple[int, bool]:
    return _family(address), "%" in address
