"""Define which settings are searched: the core's own knobs, and those of the plugins in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ddlcore.contracts.tuner import Knob, Value

CORE: tuple[Knob, ...] = (
    Knob("fusion_bytes", 64 << 10, 256 << 20, logarithmic=True, doc="largest bucket"),
    Knob("first_bucket_bytes", 64 << 10, 64 << 20, logarithmic=True, doc="a step's first and last bucket"),
    Knob("overlap", choices=("off", "on"), doc="whether buckets run while the step still computes"),
)
# Searched only if the user allows it, because compression changes the values of gradients.
COMPRESSION = Knob("compression", choices=("none", "fp16", "bf16"), doc="compression of float32 gradients")
_LEAST_BYTES = 1 << 10


def choose(knobs: Iterable[Knob], fixed: Iterable[str]) -> tuple[Knob, ...]:
    """Return those of ``knobs`` that are searched.

    The knobs in ``fixed``, which the user has set by a flag or variable, are left out, and so are those with only one
    possible value.
    """
    kept = set(fixed)
    return tuple(knob for knob in knobs if knob.name not in kept and (len(knob.choices) > 1 or knob.high > knob.low))


def narrowed(knobs: Sequence[Knob], nbytes: int, default: Mapping[str, Value]) -> tuple[Knob, ...]:
    """Return ``knobs`` with ranges that fit steps of ``nbytes`` bytes.

    The sizes of buckets are limited to about the size of a step, because all larger ones have the same effect. If the
    default of another knob is outside of its range, the range is extended to it.
    """
    made = []
    for knob in knobs:
        if knob.name in ("fusion_bytes", "first_bucket_bytes"):
            high = float(min(knob.high, max(nbytes, 4 * _LEAST_BYTES)))
            low = float(max(min(knob.low, high / 64), _LEAST_BYTES))
            made.append(replace(knob, low=low, high=high))
        else:
            made.append(_with(knob, default.get(knob.name)))
    return tuple(made)


def _with(knob: Knob, value: Value | None) -> Knob:
    if value is None or knob.holds(value):
        return knob
    if knob.choices:
        return replace(knob, choices=(value, *knob.choices))
    if isinstance(value, (str, bool)) or (knob.logarithmic and value <= 0):
        return knob
    return replace(knob, low=min(knob.low, value), high=max(knob.high, value))
