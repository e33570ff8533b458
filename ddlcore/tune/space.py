"""Define the settings that can be searched (knobs), with their possible values, and choose those for one search."""

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
    """Return those of ``knobs`` that are searched: not the fixed ones, and not those with only one possible value.

    ``fixed`` holds the names of the settings that the user has set by a flag or variable.
    """
    kept = set(fixed)
    return tuple(knob for knob in knobs if knob.name not in kept and (len(knob.choices) > 1 or knob.high > knob.low))


def narrowed(knobs: Sequence[Knob], nbytes: int, default: Mapping[str, Value]) -> tuple[Knob, ...]:
    """Return ``knobs`` with ranges that fit steps of ``nbytes`` bytes.

    The upper limit for sizes of buckets is about the size of a step, because all larger sizes have the same effect. If
    the default of any other knob is not among its possible values, its range or its choices are extended to include the
    default, where that is possible.
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
