"""-np and -H decide how many ranks there are and where."""

from __future__ import annotations

import socket

import pytest

from ddlcore.launch.hosts import HostSlots, parse_hosts, place


@pytest.mark.parametrize(
    ("ranks", "hosts", "size"),
    [
        (3, None, 3),
        (32, None, 32),
        (2, "localhost:4", 2),
        (None, "localhost:4", 4),
        (4, "localhost:2,127.0.0.1:2", 4),
        (2, f"{socket.gethostname()}:2", 2),
        (1, "[::1]:1", 1),
    ],
)
def test_places(ranks: int | None, hosts: str | None, size: int) -> None:
    """Ranks are placed on this host; without -H there may be any number of them."""
    assert place(ranks, hosts) == (0,) * size


@pytest.mark.parametrize(
    ("ranks", "hosts", "complaint"),
    [
        (None, None, "how many ranks"),
        (0, None, "at least one rank"),
        (-2, None, "at least one rank"),
        (4, "localhost:2", "too few slots.*takes 2 ranks"),
        (2, "localhost", "say how many ranks localhost takes"),
        (2, "localhost:0", "at least one rank"),
        (2, "localhost:two", "not of the form"),
        (2, "localhost:2,", "not of the form"),
        (2, "", "not of the form"),
        (2, "no-such-node:2", "no-such-node is not this machine.*multi-host"),
    ],
)
def test_refusals(ranks: int | None, hosts: str | None, complaint: str) -> None:
    """What cannot be met is said in one line."""
    with pytest.raises(ValueError, match=complaint) as raised:
        place(ranks, hosts)
    assert "\n" not in str(raised.value)


def test_entries() -> None:
    """Names, addresses and bracketed IPv6 addresses are hosts."""
    assert parse_hosts("a-1.b:2, 10.0.0.1:3,[fe80::1]:4") == [
        HostSlots("a-1.b", 2),
        HostSlots("10.0.0.1", 3),
        HostSlots("[fe80::1]", 4),
    ]
