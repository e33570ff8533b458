"""Addresses what the coordinator has decided to the ranks: those that must get the same share one message."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby

from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.to_rank import Adjust, Answer, Arranged, Bucket, Failure, Outgoing, Resume

Item = Bucket | Failure | Arranged | Resume | Adjust
Items = list[tuple[Iterable[WorldRank], Item]]  # what must be sent, each with the ranks that must get it


def answers(
    epoch: int, items: Items, left: Collection[WorldRank], asker: WorldRank | None = None, serial: int = 0
) -> Outgoing[WorldRank]:
    """Return one message for each rank that must get at least one of ``items``, except for those that have ``left``.

    ``asker`` is the rank whose request is answered, or None. The asker always gets a message, because it waits for
    an answer. ``serial`` is the number of the asker's request.
    """
    outgoing: Outgoing[WorldRank] = []
    for ranks, told in shared(items, () if asker is None else (asker,)):
        answer = Answer(epoch, 0, told)
        for rank in ranks:
            if rank == asker:
                outgoing.append((rank, Answer(epoch, serial, told)))
            elif rank not in left:
                outgoing.append((rank, answer))
    return outgoing


def shared(items: Items, always: Iterable[WorldRank]) -> list[tuple[list[WorldRank], tuple[Item, ...]]]:
    """Return pairs (ranks, items to send to these ranks). The order of the items is kept.

    Ranks that get the same items are in one pair. The ranks in ``always`` are included even if there is no item for
    them.
    """
    runs = [list(run) for _, run in groupby(items, key=lambda pair: id(pair[0]))]  # often just one run, for all ranks
    heard: dict[WorldRank, tuple[int, ...]] = dict.fromkeys(always, ())
    for number, run in enumerate(runs):
        for rank in run[0][0]:
            heard[rank] = (*heard.get(rank, ()), number)
    ranks: dict[tuple[int, ...], list[WorldRank]] = {}
    for rank, numbers in heard.items():
        ranks.setdefault(numbers, []).append(rank)
    return [(same, tuple(item for n in numbers for _, item in runs[n])) for numbers, same in ranks.items()]
