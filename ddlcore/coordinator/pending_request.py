"""Records which ranks have asked for a tensor that not all ranks have ready; does not know what is done about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ddlcore.messages import Ask, Spec


class PendingRequest:
    """One tensor name that some ranks have ready and others have not."""

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
        self.members = members  # ranks as bits, for speed: each step brings hundreds of tensors times hundreds of ranks
        self.asked = 0  # the members that have the tensor ready, as bits
        self.own: dict[int, Ask] = {}  # of ranks whose ask differs from the first one, or has sizes
        self.uniform = True  # all asks carry the same spec bytes
        self.stamp = -1  # the highest stamp of all asks

    def add(self, rank: int, bit: int, ask: Ask) -> None:
        self.asked |= bit
        if ask.stamp > self.stamp:
            self.stamp = ask.stamp
        if ask.spec != self.spec or ask.rows or ask.digest:
            self.own[rank] = ask
            self.uniform = self.uniform and ask.spec == self.spec

    def ask_of(self, rank: int) -> Ask:
        """Return what ``rank`` asked. The rank must have asked."""
        return self.own.get(rank, self.first)

    def ranks(self) -> list[int]:
        """Return the ranks that have asked."""
        return ranks_of(self.asked)

    def different_asks(self) -> tuple[Ask, ...]:
        """Return what the ranks asked, where ranks that asked the same as the first one count once."""
        return (self.first, *self.own.values())

    def is_grouped(self, spec_of: Callable[[bytes], Spec]) -> bool:
        """Return whether any rank asked for the tensor in a grouped call."""
        return any(spec_of(ask.spec).group for ask in self.different_asks())


def bits_of(ranks: Iterable[int]) -> int:
    """Return a number whose bits are the given ranks."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_of(bits: int) -> list[int]:
    """Return the ranks whose bits are set, in rising order. The inverse of ``bits_of``."""
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
