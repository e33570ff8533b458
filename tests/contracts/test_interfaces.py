"""What a name of an interface, an address or a route stands for on this host."""

from __future__ import annotations

import socket

import pytest

from ddlcore.contracts import interfaces
from ddlcore.contracts.interfaces import chosen_address, interface_addresses, route_address

HAVE = {"lo": ("127.0.0.1", "::1"), "down0": (), "eth0": ("10.0.0.1", "10.0.0.9", "fd00::1", "fe80::1%eth0")}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has these interfaces."""
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: HAVE)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")


def test_this_hosts_interfaces() -> None:
    """All that the system names, with the loopback's address among them."""
    have = interface_addresses()
    assert set(have) == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in [address for addresses in have.values() for address in addresses]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("wanted", "toward", "address"),
    [
        ("eth0", "", "10.0.0.1"),
        ("eth0", "10.0.0.7", "10.0.0.1"),
        ("eth0", "fd00::7", "fd00::1"),
        ("ib0, eth0", "", "10.0.0.1"),
        ("down0,lo", "", "127.0.0.1"),
        ("10.0.0.9", "", "10.0.0.9"),
        ("fd00:0::1", "10.0.0.7", "fd00:0::1"),
    ],
)
def test_what_is_chosen(wanted: str, toward: str, address: str) -> None:
    """The first of them that the host has, of the family that is needed."""
    assert chosen_address(wanted, toward) == address


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("wanted", ["eth7", "eth7,ib0", "10.0.0.2", "down0", "eth7,down0"])
def test_what_there_is_not(wanted: str) -> None:
    """One line: what, on which host, and what there is instead."""
    with pytest.raises(ValueError, match=r"on node1; there are lo \(127.0.0.1\), eth0 \(10.0.0.1\)") as told:
        chosen_address(wanted)
    assert "\n" not in str(told.value)
    assert ("down0 has no address" in str(told.value)) == ("down0" in wanted)


def test_routes() -> None:
    """A host's own address on the way to itself is that; where there is no way, one line says so."""
    assert route_address("127.0.0.1") == "127.0.0.1"
    if "::1" in interface_addresses().get("lo", ()):
        assert route_address("::1") == "::1"
    with pytest.raises(ValueError, match=r"^no route from .* to no\.such\.host\.invalid: "):
        route_address("no.such.host.invalid")
