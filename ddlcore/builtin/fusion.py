"""Decides by a size threshold which tensors share a bucket. This module uses only the tensors' keys and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.contracts.fusion import Ready


class ThresholdFusion:
    """A fusion policy that fills buckets in the order in which tensors become ready, up to ``fusion_bytes`` per bucket.

    Only tensors with the same key (``Ready.key``) share a bucket. Each key has at most one open bucket, to which
    tensors can still be added. The bucket stays open if tensors of other keys become ready in between. Tensors of one
    grouped call stay together if they fit into one bucket. A tensor that is larger than ``fusion_bytes`` gets its own
    bucket. If ``fusion_bytes`` is 0, every tensor gets its own bucket. The buckets run in the order of their first
    tensors.

    If ``params`` contains ``first_bucket_bytes``, the tensors are a whole period: the sequence of tensors that repeats
    in every step. Then three rules change. First, the first bucket has at most ``first_bucket_bytes`` (0: no limit of
    its own), so that it starts early, and the last bucket has the same limit, because no computation is left that could
    overlap with it. Second, a tensor that is larger than ``fusion_bytes`` closes the open bucket of its key. Third, the
    buckets run in the order of their last tensors.
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
        filling: dict[object, tuple[list[int], int]] = {}  # by key: the key's open bucket, and the bytes in it
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
    """Return the index in ``units`` at which the last bucket begins.

    The last bucket is filled from the end of ``units`` backwards. It always gets the last unit. It gets further units
    as long as they have the same key and the bucket has at most ``edge`` bytes. ``units`` is the result of ``_units``
    for the tensors ``ready``.
    """
    first, filled = len(units), 0
    for i in reversed(range(len(units))):
        unit, nbytes = units[i]
        filled += nbytes
        if first < len(units) and (filled > edge or ready[unit[0]].key != ready[units[-1][0][0]].key):
            break
        first = i
    return first


def _units(ready: Sequence[Ready], limit: float) -> list[tuple[list[int], int]]:
    """Return the units of ``ready``: groups of tensors that must be in the same bucket.

    The tensors of one grouped call that have the same key are one unit, if together they have at most ``limit`` bytes.
    Every other tensor is a unit of its own. Each unit is returned as (positions of its tensors in ``ready``, bytes of
    these tensors together).
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
