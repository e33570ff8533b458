"""Orders tensors that become ready together by size: small tensors first, so that many of them share one bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlcore.contracts.fusion import Ready

__all__ = ["TOGETHER_S", "BySizeFusion"]

TOGETHER_S = 0.001  # tensors that become ready within such an interval count as ready together


class BySizeFusion:
    """A fusion policy that orders intervals by time and, within an interval, tensors by size, smaller ones first."""

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        limit = params["fusion_bytes"]
        order = sorted(range(len(ready)), key=lambda at: (_moment(ready[at]), ready[at].nbytes, at))
        buckets: list[list[int]] = []
        filling: dict[tuple[int, object], tuple[list[int], int]] = {}  # the bucket that is being filled, and its bytes
        for position in order:
            tensor = ready[position]
            where = (_moment(tensor), tensor.key)
            bucket, filled = filling.get(where, ([], 0))
            if not bucket or filled + tensor.nbytes > limit or limit <= 0:
                bucket, filled = [], 0
                buckets.append(bucket)
            bucket.append(position)
            filling[where] = (bucket, filled + tensor.nbytes)
        return buckets


def _moment(tensor: Ready) -> int:
    return int(tensor.time_s / TOGETHER_S)
