"""The base of the adapter suite: the attributes and methods that a plugin's author writes, and helpers for the tests.

The ranks of a test are threads of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from ddl_conform import oracle
from ddl_conform.standard import StandardSuite
from ddl_conform.world import run_world
from ddlcore.api import Operations
from ddlcore.contracts.adapter import Adapter
from ddlcore.process.job import Job
from ddlcore.types import DType

__all__ = ["DTYPES", "AdapterBase", "Tensor"]

Tensor = Any  # of the framework that is tested

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)


def _with_job(function: Callable[[int, int, Operations], None], operations: Operations, rank: int, job: Job) -> None:
    function(rank, job.size, operations)


class AdapterBase(StandardSuite):
    """The base of the adapter suite. A subclass sets ``adapter`` and overrides ``make`` and ``to_numpy``.

    A subclass may also change the other attributes and methods, to say what the framework's tensors cannot do. The
    tests that need such an ability are then skipped.
    """

    adapter: ClassVar[Adapter]
    dtypes: ClassVar[frozenset[DType]] = frozenset(DType)  # types that the framework's tensors can have
    elements: ClassVar[frozenset[str]] = frozenset()  # usual names of types that others carry, see ``carrier_of``
    adopts: ClassVar[bool] = True  # True: adopt() shares the memory; False: it copies
    sizes: ClassVar[tuple[int, ...]] = (2, 3)  # world sizes in which each verb is tested
    deadline_s: ClassVar[float] = 60.0  # for the collectives of one test

    def make(self, array: oracle.Array) -> Tensor:
        """Return a new row-major tensor of the framework, with the shape, the element type and the values of ``array``.

        The element type of ``array`` may be bfloat16 of the package ml_dtypes.
        """
        raise NotImplementedError(f"{type(self).__name__}.make(array) must return a tensor")

    def to_numpy(self, tensor: Tensor) -> oracle.Array:
        """Return a numpy array with the current values of ``tensor``, and with the same shape and element type."""
        raise NotImplementedError(f"{type(self).__name__}.to_numpy(tensor) must return an array")

    def permuted(self, tensor: Tensor) -> Tensor:
        """Return the transpose of ``tensor``, a matrix, as a tensor that uses the same memory.

        Return None if the framework has no such tensors.
        """
        return tensor.T

    def sliced(self, tensor: Tensor) -> Tensor:
        """Return a tensor that consists of every second element of ``tensor`` and uses the same memory.

        Return None if the framework has no such tensors.
        """
        return tensor[::2]

    def unsupported(self) -> Tensor:
        """Return a tensor of an element type that ddl does not support."""
        return self.make(np.zeros(3, np.complex64))

    # --- used by the standard tests

    def needs(self, dtype: DType) -> None:
        if dtype not in self.dtypes:
            pytest.skip(f"the framework's tensors are never {dtype.label}")

    def on_ranks(self, function: Callable[[int, int, Operations], None]) -> None:
        """Call ``function(rank, size, operations)`` on every rank of a new world, for each size in ``sizes``."""
        operations = Operations(self.adapter)
        for size in self.sizes:
            run_world(size, partial(_with_job, function, operations), deadline_s=self.deadline_s)

    def values(self, dtype: DType, shape: tuple[int, ...], rank: int = 0, seed: int = 0) -> oracle.Array:
        return oracle.values(dtype, int(np.prod(shape)), rank, seed=seed).reshape(shape)

    def same(self, tensor: Tensor, expected: oracle.Array, what: str, *, terms: int = 0) -> None:
        """Raise AssertionError if the values of ``tensor`` differ from ``expected``.

        ``terms`` is the number of floats that were added or scaled, in any order, to compute one value. The more terms
        there are, the more a value may differ. With 0, every bit must agree. The message begins with ``what``.
        """
        fault = oracle.difference(self.to_numpy(tensor), expected, terms=terms, exact=terms == 0)
        assert not fault, f"{what}: {fault}"
