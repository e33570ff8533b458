"""Decides by a size threshold which tensors share a batch; knows keys and sizes, never tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.contracts.fusion import Ready

__all__ = ["ThresholdFusion"]


class ThresholdFusion:
    """Fills batches in order of arrival up to ``fusion_bytes``; 0 gives every tensor its own.

    Each key has one batch open, so tensors of other keys in between do not part a batch. A batch runs
    at the place of its first member. Tensors of one grouped call stay together where they fit; a
    tensor that is larger than the threshold goes alone.
    """

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        limit = params["fusion_bytes"]
        if limit <= 0:
            return [[position] for position in range(len(ready))]
        batches: list[list[int]] = []
        filling: dict[object, tuple[list[int], int]] = {}  # key: its open batch, the bytes in it
        for unit, nbytes in _units(ready, limit):
            key = ready[unit[0]].key
            batch, filled = filling.get(key, ([], 0))
            if batch and filled + nbytes <= limit:
                batch += unit
                filling[key] = (batch, filled + nbytes)
                continue
            batches.append(unit)
            if nbytes <= limit:  # what is too large leaves the open batch open
                filling[key] = (unit, nbytes)
        return batches


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
