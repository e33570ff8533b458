"""Decides by a size threshold which tensors share a batch; knows keys and sizes, never tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.contracts.fusion import Ready

__all__ = ["ThresholdFusion"]


class ThresholdFusion:
    """Fills batches in order of arrival up to ``fusion_bytes``; 0 gives every tensor its own.

    With ``first_batch_bytes`` (a whole period, in the order in which its tensors become ready) the first batch is
    no larger than that, so that it starts early, and so is the last, which nothing is left to hide behind. A
    batch then does not reach past a tensor of its key that is too large, and runs at the place of its last member.

    Each key has one batch open, so tensors of other keys in between do not part a batch. A batch runs
    at the place of its first member (of its last, in a period). Tensors of one grouped call stay together where they fit; a
    tensor that is larger than the threshold goes alone.
    """

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        limit = params["fusion_bytes"]
        if limit <= 0:
            return [[position] for position in range(len(ready))]
        period = "first_batch_bytes" in params
        edge = min(params.get("first_batch_bytes", 0) or limit, limit)
        units = _units(ready, limit)
        tail = _tail(ready, units, edge) if edge < limit else len(units)
        batches: list[list[int]] = []
        filling: dict[object, tuple[list[int], int]] = {}  # key: its open batch, the bytes in it
        for i, (unit, nbytes) in enumerate(units):
            if i == tail:
                filling.clear()
            key = ready[unit[0]].key
            batch, filled = filling.get(key, ([], 0))
            room = edge if batch and batch is batches[0] else limit
            if batch and filled + nbytes <= room:
                batch += unit
                filling[key] = (batch, filled + nbytes)
                continue
            batches.append(list(unit))
            if nbytes <= limit:
                filling[key] = (batches[-1], nbytes)
            elif period:  # else what is too large leaves the open batch open
                filling.pop(key, None)
        return sorted(batches, key=max) if period else batches


def _tail(ready: Sequence[Ready], units: Sequence[tuple[list[int], int]], edge: float) -> int:
    """The unit at which the last batch begins: what comes last of one key, as much as fits."""
    first, filled = len(units), 0
    for i in reversed(range(len(units))):
        unit, nbytes = units[i]
        filled += nbytes
        if first < len(units) and (filled > edge or ready[unit[0]].key != ready[units[-1][0][0]].key):
            break
        first = i
    return first


def _units(ready: Sequence[Ready], limit: float) -> list[tuple[list[int], int]]:
    """What is placed as one, with its bytes: a group's tensors of one key where they fit, else single tensors."""
    groups: dict[tuple[object, str], tuple[list[int], int]] = {}
    for position, tensor in enumerate(ready):
        if tensor.group is not None:
            mates, nbytes = groups.get((tensor.key, tensor.group), ([], 0))
            mates.append(position)
            groups[tensor.key, tensor.group] = (mates, nbytes + tensor.nbytes)
    units: list[tuple[list[int], int]] = []
    for position, tensor in enumerate(ready):
        alone = ([position], tensor.nbytes)
        unit = alone if tensor.group is None else groups[tensor.key, tensor.group]
        if unit[1] > limit:
            units.append(alone)
        elif unit[0][0] == position:
            units.append(unit)
    return units
