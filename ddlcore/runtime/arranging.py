"""Arranges the tensors of a period as a schedule. A period is the part of a training loop that repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from math import prod

import msgspec

from ddlcore.contracts.fusion import FusionPolicy, Ready
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import BY_SETTING, Spec
from ddlcore.messages.to_rank import Arranged, Planned
from ddlcore.runtime.device_labels import ON_HOST
from ddlcore.runtime.periods import Occurrence, segments
from ddlcore.types import CPU, Kind

UNDIVIDED_BYTES = float(256 << 20)
_NEVER = frozenset({Kind.JOIN, Kind.ADD_SET, Kind.REMOVE_SET})


def arrange(
    number: int,
    period: Sequence[Occurrence],
    spec_of: Callable[[bytes], Spec],
    policy: FusionPolicy,
    params: Mapping[str, float],
    compression: str = "none",
) -> Arranged | None:
    """Return the schedule with the number ``number`` for the tensors of ``period``, or None if it cannot be replayed.

    ``period`` contains the tensors in the order in which they became ready. ``policy`` and its parameters ``params``
    decide which tensors share a bucket. ``compression`` is the compressor for those tensors whose compressor is chosen
    by the job's setting, see ``Spec.compressor_by``.

    Tensors that depend on each other never share a bucket. If at least one rank asked for y only after x had ended on
    that rank, the bucket of y is after the bucket of x.
    """
    if any(spec_of(one.key.spec).kind in _NEVER for one in period):
        return None
    planned = tuple(
        _compressed(bucket, spec_of, compression)
        for segment in segments(period)
        for bucket in _committed(_lay_out(segment, spec_of, policy, params, compression), spec_of)
    )
    digest = hashlib.blake2b(encode(Arranged(number, b"", planned)), digest_size=16).digest()
    return Arranged(number, digest, planned)


def _lay_out(
    segment: Sequence[Occurrence],
    spec_of: Callable[[bytes], Spec],
    policy: FusionPolicy,
    params: Mapping[str, float],
    compression: str,
) -> list[Planned]:
    """Return the buckets of one segment. A segment contains tensors that do not depend on each other.

    The tensors of ``segment`` are in the order in which they become ready. The buckets are sorted by the positions of
    their last tensors in this order, because a bucket cannot start before its last tensor is ready.
    """
    specs = [spec_of(one.key.spec) for one in segment]
    fusable = [i for i, spec in enumerate(specs) if spec.kind is Kind.ALLREDUCE]
    groups = [[i] for i, spec in enumerate(specs) if spec.kind is not Kind.ALLREDUCE]
    late = [i for i in fusable if specs[i].device == CPU.kind] if not params.get("overlap", 1.0) else []
    early = [i for i in fusable if i not in set(late)]
    for chosen, given in ((early, params), (late, _undivided(params))):
        ready = [_ready(segment[i], specs[i], compression) for i in chosen]
        groups += [[chosen[p] for p in positions] for positions in policy.arrange(ready, given)]
    groups.sort(key=max)  # a bucket cannot start before its last tensor is ready
    return [
        Planned(
            segment[group[0]].key.set_id,
            specs[group[0]].kind,
            tuple(segment[i].key.name for i in group),
            tuple(segment[i].key.spec for i in group),
            specs[group[0]].is_negotiated,
        )
        for group in groups
    ]


def _committed(buckets: list[Planned], spec_of: Callable[[bytes], Spec]) -> list[Planned]:
    """Mark the last device bucket of each process set in ``buckets`` by ``commit``, and return all buckets.

    ``buckets`` are those of one segment. The user's next operation may depend on the marked bucket. So after that
    bucket, the hosts tell each other that all of them have launched it and all earlier buckets. A bucket that is staged
    on the host is never marked, because no such message follows it.
    """
    places = [spec_of(one.specs[0]).device for one in buckets]
    on_devices = [place != CPU.kind and not place.endswith(ON_HOST) for place in places]
    last = {one.set_id: i for i, (one, on_device) in enumerate(zip(buckets, on_devices)) if on_device}
    for i in last.values():
        buckets[i] = msgspec.structs.replace(buckets[i], commit=True)
    return buckets


def _compressed(planned: Planned, spec_of: Callable[[bytes], Spec], compression: str) -> Planned:
    if not any(spec_of(spec).compressor == BY_SETTING for spec in planned.specs):
        return planned
    return msgspec.structs.replace(planned, compressor=spec_of(planned.specs[0]).compressor_by(compression))


def _undivided(params: Mapping[str, float]) -> dict[str, float]:
    """Return a copy of ``params``, changed so that the buckets become large.

    Large buckets are for tensors whose communication would take CPU cores from the computation. For such tensors, an
    early start with small buckets has no advantage.
    """
    fusion_bytes = params["fusion_bytes"]
    return {**params, "fusion_bytes": fusion_bytes and max(fusion_bytes, UNDIVIDED_BYTES), "first_bucket_bytes": 0.0}


def _ready(one: Occurrence, spec: Spec, compression: str) -> Ready:
    compressor = spec.compressor_by(compression)
    key = (one.key.set_id, spec.dtype, spec.op, spec.prescale, spec.postscale, spec.device, compressor)
    group = f"{one.key.set_id}.{one.key.name.rpartition('[')[0]}" if spec.group and one.key.name else None
    return Ready(one.key.name, key, prod(spec.shape) * spec.dtype.itemsize, group=group)
