"""What is searched: the core's own knobs, and those that come with the providers of what is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ddlcore.contracts.tuner import Knob, Value

__all__ = ["COMPRESSION", "CORE", "choose", "narrowed"]

CORE: tuple[Knob, ...] = (
    Knob("fusion_bytes", 64 << 10, 256 << 20, logarithmic=True, doc="largest bucket"),
    Knob("first_bucket_bytes", 64 << 10, 64 << 20, logarithmic=True, doc="a step's first and last bucket"),
    Knob("overlap", choices=("off", "on"), doc="whether tensors go off while the step computes"),
)
# Takes part in the search only where the user allows it: it changes the values.
COMPRESSION = Knob("compression", choices=("none", "fp16", "bf16"), doc="what float32 gradients travel as")
_LEAST_BYTES = 1 << 10


def choose(knobs: Iterable[Knob], fixed: Iterable[str]) -> tuple[Knob, ...]:
    """Those that are searched: what the user has set by a flag or variable is not, nor what leaves no choice."""
    kept = set(fixed)
    return tuple(knob for knob in knobs if knob.name not in kept and (len(knob.choices) > 1 or knob.high > knob.low))


def narrowed(knobs: Sequence[Knob], nbytes: int, default: Mapping[str, Value]) -> tuple[Knob, ...]:
    """``knobs`` for steps of ``nbytes`` bytes: buckets larger than all of a step are all the same.

    Another default that lies outside is let in.
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
