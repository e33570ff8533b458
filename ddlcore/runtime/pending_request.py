"""Holds who has asked for a tensor that not all ranks have ready; knows nothing of what is done about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ddlcore.messages import Ask, Spec

__all__ = ["PendingRequest", "bits_of", "ranks_of"]


class PendingRequest:
    """One name that some ranks have ready and some have not."""

    __slots__ = (
        "asked",
        "first",
        "members",
        "name",
        "own",
        "set_id",
        "spec",
        "stamp",
        "uniform",
    )

    def __init__(self, first: Ask, members: int) -> None:
        self.set_id = first.set_id
        self.name = first.name
        self.first = first
        self.spec = first.spec
        self.members = members  # ranks as bits: hundreds of ranks times hundreds of tensors are seen in each step
        self.asked = 0  # the members that have it ready, as bits
        self.own: dict[int, Ask] = {}  # of the ranks that asked for something else than the first, or with sizes
        self.uniform = True  # all asks carry the same spec bytes
        self.stamp = -1  # the newest of all asks

    def add(self, rank: int, bit: int, ask: Ask) -> None:
        self.asked |= bit
        if ask.stamp > self.stamp:
            self.stamp = ask.stamp
        if ask.spec != self.spec or ask.rows or ask.digest:
            self.own[rank] = ask
            self.uniform = self.uniform and ask.spec == self.spec

    def ask_of(self, rank: int) -> Ask:
        """What ``rank`` asked, which has."""
        return self.own.get(rank, self.first)

    def ranks(self) -> list[int]:
        """Those that have asked."""
        return ranks_of(self.asked)

    def is_grouped(self, spec_of: Callable[[bytes], Spec]) -> bool:
        """Whether any rank asked for it in a grouped call."""
        return any(spec_of(ask.spec).group for ask in (self.first, *self.own.values()))


def bits_of(ranks: Iterable[int]) -> int:
    """Ranks as the bits of a number."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_of(bits: int) -> list[int]:
    """The other way, in rising order."""
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
