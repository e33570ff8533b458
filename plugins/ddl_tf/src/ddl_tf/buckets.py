"""Decides which gradients are joined into a bucket, and in which order buckets are sent. Uses only shapes and sizes.

Passing an array from TensorFlow to Python and back costs about 10 µs, whatever the array's size. Joining and splitting
in TensorFlow's own code costs about 2 µs per gradient. Therefore small gradients are joined along their first
dimension. Small gradients whose other dimensions are equal are joined as they are; all other small gradients are
flattened first. Large gradients are sent alone and are never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

MOST_GROUPS = 16  # operations per step that send gradients
SMALL_BYTES = 64 << 10  # up to this size, two copies by TensorFlow cost less than passing one more array to Python


@dataclass(frozen=True)
class GradientLook:
    """Those properties of a gradient that are known while the graph is traced.

    ``shape`` is None if it is not fully known.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """The size of the gradient in bytes, or 0 if the shape is not known."""
        return 0 if self.shape is None else prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are sent as one tensor of shape (rows, *inner).

    ``members`` are the positions of the gradients in the list of all gradients. ``inner`` is None for a single gradient
    that is sent unchanged.
    """

    members: tuple[int, ...]
    inner: tuple[int, ...] | None = None

    def rows(self, look: GradientLook) -> int:
        """Return how many rows of the joined tensor belong to the gradient with the properties ``look``."""
        assert look.shape is not None and self.inner is not None
        return prod(look.shape) if not self.inner else look.shape[0]


def cut(looks: Sequence[GradientLook], places: Sequence[int], first_bytes: float, most_bytes: float) -> list[list[int]]:
    """Split the list ``places``, in its order, into at most MOST_GROUPS lists of about ``most_bytes`` bytes.

    ``places`` are positions in ``looks``, which describes the gradients. The first list has about ``first_bytes``
    bytes; if ``first_bytes`` is 0, the first list is as large as the others.
    """
    total = sum(looks[place].nbytes for place in places)
    most_bytes = max(most_bytes, total / (MOST_GROUPS - 1))
    runs: list[list[int]] = []
    filled, room = 0.0, first_bytes or most_bytes
    for place in places:
        nbytes = looks[place].nbytes
        if not runs or (filled + nbytes > room and len(runs) < MOST_GROUPS):
            room = (first_bytes or most_bytes) if not runs else most_bytes
            runs.append([])
            filled = 0.0
        runs[-1].append(place)
        filled += nbytes
    return runs


def pack(looks: Sequence[GradientLook], places: Sequence[int]) -> list[GradientBucket]:
    """Return the buckets in which the gradients at the positions ``places`` are sent.

    ``looks`` describes all gradients.
    """
    small = {place for place in places if looks[place].shape is not None and looks[place].nbytes <= SMALL_BYTES}
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for place in places:
        if place in small:
            alike.setdefault((looks[place].dtype, (looks[place].shape or ())[1:]), []).append(place)
    joined: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (dtype, inner), members in alike.items():
        empty = 0 in inner  # without elements, the number of rows cannot be derived from the size
        key = (dtype, inner if len(members) > 1 and not empty else ())
        joined.setdefault(key, []).extend(members)
    buckets = [GradientBucket((place,)) for place in places if place not in small]
    return buckets + [GradientBucket(tuple(members), inner) for (_, inner), members in joined.items()]
