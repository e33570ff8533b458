"""-np and -H decide how many ranks there are and where."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from ddlcore.contracts.launcher import HostSlots
from ddlcore.launch.ranks.hosts import Layout, is_this_host, lay_out, parse_hosts, read_hostfile

OWN = socket.gethostname()


def laid_out(ranks: int | None, hosts: str | None) -> Layout:
    """As -np and -H say, without asking the network for names."""
    entries = None if hosts is None else parse_hosts(hosts)
    return lay_out(ranks, entries, what=f"-H {hosts}", resolve=False)


@pytest.mark.parametrize(
    ("ranks", "hosts", "size"),
    [
        (3, None, 3),
        (32, None, 32),
        (2, "localhost:4", 2),
        (None, "localhost:4", 4),
        (2, f"{OWN}:2", 2),
        (1, "[::1]:1", 1),
        (1, "127.0.0.1:1", 1),
    ],
)
def test_ranks_of_this_host(ranks: int | None, hosts: str | None, size: int) -> None:
    """Without -H there may be any number of them; no other host runs any."""
    layout = laid_out(ranks, hosts)
    assert (layout.ranks, layout.here, layout.remote_hosts) == ((0,) * size, 0, ())


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected"),
    [
        (None, "h1:2,h2:1", Layout(("h1", "h2"), (0, 0, 1), -1)),
        (2, "h1:1,h2:4", Layout(("h1", "h2"), (0, 1), -1)),
        (2, "h1:2,h2:4", Layout(("h1",), (0, 0), -1)),
        (3, "h1:1,localhost:2", Layout(("h1", "localhost"), (0, 1, 1), 1)),
        (1, "h1:1,localhost:2", Layout(("h1",), (0,), -1)),
        (None, "root@h1:1,[2001:db8::5]:1", Layout(("root@h1", "[2001:db8::5]"), (0, 1), -1)),
    ],
)
def test_hosts_are_filled_in_their_order(ranks: int | None, hosts: str, expected: Layout) -> None:
    """A host's index is its place in the list; one that gets no rank is not asked for."""
    assert laid_out(ranks, hosts) == expected


@pytest.mark.parametrize(
    ("ranks", "hosts", "complaint"),
    [
        (None, None, "how many ranks"),
        (0, None, "at least one rank"),
        (-2, None, "at least one rank"),
        (4, "localhost:2", "too few slots.*takes 2 ranks"),
        (9, "h1:2,h2:2", "too few slots, -H h1:2,h2:2 takes 4 ranks"),
        (2, "localhost", "say how many ranks localhost takes"),
        (2, "localhost:0", "at least one rank"),
        (2, "localhost:-1", "at least one rank, not -1"),
        (2, "localhost:two", "'two', the number of ranks that localhost takes, is no number"),
        (2, "localhost:", "is no number"),
        (2, "localhost:2,", "not of the form"),
        (2, "", "not of the form"),
        (2, "a b:2", "not of the form"),
        (2, "h1:1,h2:1,h1:1", "h1 stands there twice"),
        (2, "h1:1,H1:1", "h1 and H1 are both the same host"),
        (2, "localhost:2,127.0.0.1:2", "localhost and 127.0.0.1 are both this machine"),
    ],
)
def test_refusals(ranks: int | None, hosts: str | None, complaint: str) -> None:
    """What cannot be met is said in one line."""
    with pytest.raises(ValueError, match=complaint) as raised:
        laid_out(ranks, hosts)
    assert "\n" not in str(raised.value)


HOSTFILE = """# a cluster
node1 slots=4
node2   slots = 2  # a smaller one
node3:3

node4
node5 slots=2 max_slots=4
"""


def test_a_hostfile(tmp_path: Path) -> None:
    """Both ways of writing slots, comments, empty lines; a host alone takes one rank."""
    path = tmp_path / "hosts"
    path.write_text(HOSTFILE)
    expected = [("node1", 4), ("node2", 2), ("node3", 3), ("node4", 1), ("node5", 2)]
    assert [(entry.host, entry.slots) for entry in read_hostfile(str(path))] == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("node1 slots=four\n", "line 1: 'four', the number of ranks that node1 takes, is no number"),
        ("\nnode1 slots=0\n", "line 2: node1 must take at least one rank"),
        ("node1 cores=4\n", "line 1: 'node1 cores=4' is not of the form HOST slots=N"),
        ("# nothing\n", "it names no host"),
        (None, "No such file or directory"),
    ],
)
def test_bad_hostfiles(text: str | None, complaint: str, tmp_path: Path) -> None:
    """File and line are named."""
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(complaint)) as raised:
        read_hostfile(str(path))
    assert str(path) in str(raised.value)


def test_what_is_this_host() -> None:
    """By name, by any address of an interface, by what a name resolves to; not by a name that nobody knows."""
    assert is_this_host(OWN) and is_this_host("127.0.0.1") and is_this_host("me@localhost")
    assert not is_this_host("192.0.2.7") and not is_this_host("no-such-host.invalid", resolve=True)
    assert is_this_host("ip6-localhost", resolve=True) or is_this_host("localhost", resolve=True)


def test_entries() -> None:
    """Names, addresses and bracketed IPv6 addresses are hosts."""
    assert parse_hosts("a-1.b:2, 10.0.0.1:3,[fe80::1]:4") == [
        HostSlots("a-1.b", 2),
        HostSlots("10.0.0.1", 3),
        HostSlots("[fe80::1]", 4),
    ]
