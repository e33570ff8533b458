"""Checks whether all gradients of a backward pass have the types and sizes of the last pass's gradients.

Each property is compared for all gradients in one loop in C.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from ddl_torch.slots import Slot

# These functions read the properties that ``looks_alike`` compares. They are implemented in C, and ``map`` calls them
# for all gradients.
_count_of, _is_contiguous, _is_neg = torch.Tensor.numel, torch.Tensor.is_contiguous, torch.Tensor.is_neg
_is_conj = torch.Tensor.is_conj
_dtype_of, _is_cpu, is_sparse = (getattr(torch.Tensor, name).__get__ for name in ("dtype", "is_cpu", "is_sparse"))
storage_of, address_of, address_of_storage = (
    torch.Tensor.untyped_storage,
    torch.Tensor.data_ptr,
    attrgetter("_cdata"),
)


def has_lazy_views(grads: list[Any]) -> bool:
    """Return whether one of ``grads`` is a conjugated or negated view: its memory has other values than the tensor."""
    return any(map(_is_conj, grads)) or any(map(_is_neg, grads))


class UsualGradients:
    """The description of the last round's gradients, in the order in which they arrived.

    A round is one reduction of all gradients. The description is empty unless all gradients were row-major and were
    started together.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots if all(slot.strides is None for slot in slots) else []
        self._counts = [slot.count for slot in self.slots]
        self._dtypes = [slot.dtype for slot in self.slots]

    def looks_alike(self, grads: list[Any]) -> bool:
        """Return whether ``grads`` are row-major, are in host memory, and match the last round's types and sizes.

        A round is one reduction of all gradients. Raises TypeError if one of ``grads`` is None.
        """
        return (
            list(map(_count_of, grads)) == self._counts
            and list(map(_dtype_of, grads)) == self._dtypes
            and all(map(_is_contiguous, grads))
            and all(map(_is_cpu, grads))
            and not any(map(is_sparse, grads))
            and not any(map(_is_neg, grads))
        )
