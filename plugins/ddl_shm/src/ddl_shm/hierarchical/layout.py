"""Decides which ranks share a host, which ranks exchange data across hosts, and how counts are divided into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddlcore.types import Member


@dataclass(frozen=True)
class HostGroups:
    """The ranks of one communicator, grouped by host. The hosts are in the order of their first ranks."""

    hosts: tuple[tuple[int, ...], ...]  # the ranks of each host, in order
    host: int  # this rank's host, as an index into ``hosts``
    local: int  # this rank's position on its host
    shares: int  # how many ranks of each host, from its first, send and receive across hosts

    @classmethod
    def of(cls, members: Sequence[Member], rank: int, shares: int) -> HostGroups:
        """Return the layout of the communicator whose members are ``members``, for its rank ``rank``.

        On each host, ``shares`` ranks should exchange data with other hosts; 0 means as many as possible. In the
        layout, this number is at most the number of ranks on the host with the fewest ranks.
        """
        by_host: dict[int, list[int]] = {}
        for r, member in enumerate(members):
            by_host.setdefault(member.host, []).append(r)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        host = next(h for h, ranks in enumerate(hosts) if rank in ranks)
        most = min(len(ranks) for ranks in hosts)
        return cls(hosts, host, hosts[host].index(rank), min(shares, most) or most)

    @property
    def mates(self) -> tuple[int, ...]:
        """Return the ranks of this rank's host, including this rank."""
        return self.hosts[self.host]

    @property
    def crosses(self) -> bool:
        """Return whether this rank exchanges data with other hosts."""
        return self.local < self.shares

    @property
    def crossing(self) -> tuple[int, ...]:
        """Return the ranks that exchange data with this rank across hosts: one rank per host, including this rank."""
        return tuple(ranks[self.local] for ranks in self.hosts)

    def places(self) -> dict[int, tuple[int, int]]:
        """Return a dict that maps each rank to (index of its host, position on that host).

        The dict is in the order of the hosts, and for each host in the order of the positions.
        """
        return {r: (h, i) for h, ranks in enumerate(self.hosts) for i, r in enumerate(ranks)}

    def shared_out(self, count: int) -> list[int]:
        """Divide ``count`` elements among the ranks of this host for sending them across hosts.

        Return the number of elements for each rank of this host. It is 0 for a rank that exchanges no data with other
        hosts.
        """
        return split(count, self.shares) + [0] * (len(self.mates) - self.shares)


def split(count: int, parts: int) -> list[int]:
    """Divide ``count`` elements into ``parts`` parts, and return the lengths of the parts.

    The lengths differ by at most one.
    """
    return [part(count, i, parts)[1] for i in range(parts)]


def part(count: int, i: int, parts: int) -> tuple[int, int]:
    """Divide ``count`` elements into ``parts`` parts, and return (first element, length) of the part number ``i``."""
    begin = count * i // parts
    return begin, count * (i + 1) // parts - begin
