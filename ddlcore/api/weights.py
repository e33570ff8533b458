"""Weights of an average: what a rank's values count for, checked, and how they travel with the values.

The result is sum(w * x) / sum(w) over the ranks. A ``Share`` says how much of the whole a rank's values stand for, so
each rank multiplies its values by its share, and their sum is the result. Of a plain weight, no rank knows the sum: it
is reduced together with the values, as one more small tensor, and divides the results before they are given out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

from ddlcore.errors import InvalidArgument
from ddlcore.messages.spec import BY_SHARE, BY_WEIGHT
from ddlcore.types import Average, ReduceOp

__all__ = ["Share", "Weight", "average_by", "check_weighted", "checked_weight", "reciprocal_of"]

NO_WEIGHT = (
    "the weights of all ranks are 0, so the average {what} is not defined; give at least one rank a weight above 0, or "
    "catch this error, which all ranks raise, and skip the step"
)


@dataclass(frozen=True)
class Share:
    """How many of ``total`` rows (or tokens) this rank's values stand for; it is a weight of an average.

    All ranks know ``total`` without asking, as they do if they deal rows by the same rule: nothing is exchanged. The
    ``rows`` of the ``size`` ranks that reduce the values must add up to ``total``. Raises ValueError for numbers that
    cannot be so.
    """

    rows: float
    total: float
    size: int

    def __post_init__(self) -> None:
        for name in ("rows", "total"):
            given = getattr(self, name)
            number = _number(given, "Share")
            if not isinstance(given, Real):
                object.__setattr__(self, name, number)
        if not 0 <= self.rows <= self.total or not self.total > 0 or self.size < 1:
            raise InvalidArgument(
                f"{self} is not a share: it needs 0 <= rows <= total, total above 0, and size of 1 or more"
            )

    @property
    def factor(self) -> float:
        """The part of the result that this rank's values make up."""
        return self.rows / self.total


Weight = float | Share


def checked_weight(weight: Any, members: int) -> Weight:
    """Return ``weight`` as a float or a Share, for a reduction over ``members`` ranks.

    Numbers of Python and numpy are accepted, and whatever has one element and ``item()``, such as a tensor. Raises
    InvalidArgument for another type, a negative number, NaN and infinity, and for a Share of another number of ranks.
    """
    if isinstance(weight, Share):
        if weight.size != members:
            raise InvalidArgument(
                f"weight: {weight} is a share of a batch for {weight.size} ranks, and the average is taken over "
                f"{members}; pass the share for the ranks of this process set, or a plain number"
            )
        return weight
    return _number(weight, "weight")


def _number(weight: Any, what: str) -> float:
    if not isinstance(weight, Real) and callable(getattr(weight, "item", None)):
        try:
            weight = weight.item()
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{what}: {error}; pass one number, such as the count of this rank's tokens"
            ) from None
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise InvalidArgument(
            f"{what} is a {type(weight).__name__}: {weight!r}; pass a number, such as the count of this rank's tokens"
        )
    try:
        number = float(weight)
    except OverflowError:
        number = float("inf")
    if not isfinite(number) or number < 0:
        raise InvalidArgument(f"{what} is {number}; pass a finite number that is not negative")
    return number


def average_by(share: bool) -> str:
    """Return the text ``part_of`` for tensors of an average by shares or by plain weights, which tells the two apart."""
    return BY_SHARE if share else BY_WEIGHT


def check_weighted(op: ReduceOp, prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> None:
    """Raise InvalidArgument unless the reduction is a plain average: only that can be weighted."""
    if op is not Average:
        raise InvalidArgument(f"weight= needs op=Average, and this call has op={op.name}; leave one of them out")
    if (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise InvalidArgument(
            f"weight= cannot be combined with prescale_factor={prescale_factor} and postscale_factor="
            f"{postscale_factor}; leave them out, and scale the result"
        )


def reciprocal_of(total: float, what: str) -> float:
    """Return 1 / ``total``, the sum of all ranks' weights. ``what`` names what is averaged, for the error.

    Raises InvalidArgument if ``total`` is 0, on all ranks, as they have the same total.
    """
    if not total > 0:
        raise InvalidArgument(NO_WEIGHT.format(what=what))
    return 1.0 / total
