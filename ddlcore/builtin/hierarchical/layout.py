"""Who shares a host with whom, who crosses to other hosts, and how lengths are cut: numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddlcore.types import Member

__all__ = ["Layout", "part", "split"]


@dataclass(frozen=True)
class Layout:
    """The ranks of one communicator by host. Hosts stand in the order of their first ranks."""

    hosts: tuple[tuple[int, ...], ...]  # the ranks of each host, in order
    host: int  # of this rank, an index into ``hosts``
    local: int  # this rank's place on its host
    shares: int  # the first so many ranks of each host send and receive across hosts

    @classmethod
    def of(cls, members: Sequence[Member], rank: int, shares: int) -> Layout:
        """``shares``: how many are wanted, 0: as many as there can be, which is what the smallest host has."""
        by_host: dict[int, list[int]] = {}
        for r, member in enumerate(members):
            by_host.setdefault(member.host, []).append(r)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        host = next(h for h, ranks in enumerate(hosts) if rank in ranks)
        most = min(len(ranks) for ranks in hosts)
        return cls(hosts, host, hosts[host].index(rank), min(shares, most) or most)

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this host, this one among them."""
        return self.hosts[self.host]

    @property
    def crosses(self) -> bool:
        """Whether this rank speaks to other hosts."""
        return self.local < self.shares

    @property
    def crossing(self) -> tuple[int, ...]:
        """The ranks that this one speaks to across hosts, by host, itself among them."""
        return tuple(ranks[self.local] for ranks in self.hosts)

    def places(self) -> dict[int, tuple[int, int]]:
        """Of each rank, in the order of hosts and of places on them: host, and place on it."""
        return {r: (h, i) for h, ranks in enumerate(self.hosts) for i, r in enumerate(ranks)}

    def shared_out(self, count: int) -> list[int]:
        """How much of ``count`` each rank of this host has across hosts."""
        return split(count, self.shares) + [0] * (len(self.mates) - self.shares)


def split(count: int, parts: int) -> list[int]:
    """``count`` in parts that differ by one at most."""
    return [part(count, i, parts)[1] for i in range(parts)]


def part(count: int, i: int, parts: int) -> tuple[int, int]:
    """Where part i of ``count`` begins, and how long it is."""
    begin = count * i // parts
    return begin, count * (i + 1) // parts - begin
