"""Records which ranks have requested a tensor, as long as not all ranks have it ready. This module decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.spec import Ask, Spec


class PendingRequest:
    """The requests of different ranks for one tensor. Some members have the tensor ready, others may not."""

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
        self.members = members  # ranks as bits, for speed: a step has hundreds of tensors on hundreds of ranks
        self.asked = 0  # the members that have the tensor ready, as bits
        # By rank: asks that differ from the first one, or that have rows or a digest.
        self.own: dict[WorldRank, Ask] = {}
        self.uniform = True  # all asks carry the same spec bytes
        self.stamp = -1  # the highest stamp of all asks

    def add(self, rank: WorldRank, bit: int, ask: Ask) -> None:
        self.asked |= bit
        if ask.stamp > self.stamp:
            self.stamp = ask.stamp
        if ask.spec != self.spec or ask.rows or ask.digest:
            self.own[rank] = ask
            self.uniform = self.uniform and ask.spec == self.spec

    def ask_of(self, rank: WorldRank) -> Ask:
        """Return the Ask that ``rank`` has sent for this tensor. The rank must have sent an Ask."""
        return self.own.get(rank, self.first)

    def ranks(self) -> list[WorldRank]:
        """Return the ranks that have sent an Ask for this tensor."""
        return ranks_of(self.asked)

    def different_asks(self) -> tuple[Ask, ...]:
        """Return the first Ask, and all Asks that may differ from it. Asks that are equal to the first are left out."""
        return (self.first, *self.own.values())

    def is_grouped(self, spec_of: Callable[[bytes], Spec]) -> bool:
        """Return whether at least one rank has requested this tensor in a grouped call. ``spec_of`` decodes a spec."""
        return any(spec_of(ask.spec).group for ask in self.different_asks())


def bits_of(ranks: Iterable[WorldRank]) -> int:
    """Return a number in which bit r is set for each rank r of ``ranks``."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_of(bits: int) -> list[WorldRank]:
    """Return the ranks r for which bit r of ``bits`` is set, in rising order. This is the inverse of ``bits_of``."""
    return cast("list[WorldRank]", [rank for rank in range(bits.bit_length()) if bits >> rank & 1])
