"""Decides by a size threshold which tensors share a bucket; it knows keys and sizes, but no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.contracts.fusion import Ready


class ThresholdFusion:
    """A policy that fills buckets in order of arrival up to ``fusion_bytes``; with 0, every tensor gets its own bucket.

    Each key has one open bucket, so tensors of other keys in between do not split a bucket. A bucket runs at the
    position of its first member. Tensors of one grouped call stay together if they fit; a tensor that is larger than
    the threshold gets its own bucket.

    With ``first_bucket_bytes``, a whole period is arranged, in the order in which its tensors become ready. Then the
    first bucket is no larger than that, so that it starts early; the last one too, because no computation is left that
    could overlap with it. A bucket then does not continue after a tensor of its key that is too large, and it runs at
    the position of its last member.
    """

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        limit = params["fusion_bytes"]
        if limit <= 0:
            return [[position] for position in range(len(ready))]
        period = "first_bucket_bytes" in params
        edge = min(params.get("first_bucket_bytes", 0) or limit, limit)
        units = _units(ready, limit)
        tail = _tail(ready, units, edge) if edge < limit else len(units)
        buckets: list[list[int]] = []
        filling: dict[object, tuple[list[int], int]] = {}  # by key: its open bucket, the bytes in that
        for i, (unit, nbytes) in enumerate(units):
            if i == tail:
                filling.clear()
            key = ready[unit[0]].key
            bucket, filled = filling.get(key, ([], 0))
            room = edge if bucket and bucket is buckets[0] else limit
            if bucket and filled + nbytes <= room:
                bucket += unit
                filling[key] = (bucket, filled + nbytes)
                continue
            buckets.append(list(unit))
            if nbytes <= limit:
                filling[key] = (buckets[-1], nbytes)
            elif period:  # otherwise a tensor that is too large leaves the open bucket open
                filling.pop(key, None)
        return sorted(buckets, key=max) if period else buckets


def _tail(ready: Sequence[Ready], units: Sequence[tuple[list[int], int]], edge: float) -> int:
    """Return the unit at which the last bucket begins: as many of the last units as fit and share one key."""
    first, filled = len(units), 0
    for i in reversed(range(len(units))):
        unit, nbytes = units[i]
        filled += nbytes
        if first < len(units) and (filled > edge or ready[unit[0]].key != ready[units[-1][0][0]].key):
            break
        first = i
    return first


def _units(ready: Sequence[Ready], limit: float) -> list[tuple[list[int], int]]:
    """Return the units that must not be split, and their bytes.

    A unit has the tensors of a group that share a key, if they fit; otherwise it is a single tensor.
    """
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
