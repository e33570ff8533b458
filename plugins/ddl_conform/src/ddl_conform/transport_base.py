"""The base of the transport suite: attributes and methods that a plugin's author writes, and helpers for the tests.

A group is one communicator whose ranks are threads. The standard tests share open groups.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import pytest

from ddl_conform.group import Case, TransportGroup
from ddl_conform.standard import StandardSuite
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Capabilities, Transport
from ddlcore.types import DType, Member, ReduceOp

__all__ = ["DTYPES", "OPS", "TransportBase", "only_where"]

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
OPS = pytest.mark.parametrize(
    "op", [ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product], ids=lambda op: op.name.lower()
)


def only_where(*capabilities: str) -> Callable[[F], F]:
    """Return a decorator that records the names of the ``capabilities`` that a test needs.

    The decorator is for a test, or for a function that is a parameter of a test. collecting.py reads
    the record, and deselects tests for which the transport lacks a capability.
    """

    def note(function: F) -> F:
        function.only_where = capabilities  # type: ignore[attr-defined]  # functions take attributes
        return function

    return note


@functools.cache
def _defaults(path: tuple[str, ...]) -> Mapping[str, str | int | float | bool]:
    """Return the default settings of all plugins on the Python path, which every group asks for."""
    from ddlcore.plug.settings import settings_of

    return settings_of({})[0]


class TransportBase(StandardSuite):
    """The base of the transport suite. A subclass overrides ``make``, which creates the transports of the ranks.

    The other attributes and methods have default values for a transport that reduces memory of the CPU on one host.
    """

    sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)  # world sizes of each test; include 1 if the transport supports that
    deadline_s: ClassVar[float] = 60.0  # for the collectives of one test
    abort_s: ClassVar[float] = 10.0  # for the abort of one rank: the contract allows 1 s, a busy machine needs more
    offers: ClassVar[Capabilities | None] = (
        None  # capabilities of the transports that ``make`` makes; if set, tests that need others may be deselected
    )
    chunk_bytes: ClassVar[int] = 128 << 10  # where the transport cuts large tensors; tests use sizes around it
    _shared: ClassVar[dict[int, TransportGroup]] = {}  # groups that are opened once for all tests of the class

    def make(self, size: int) -> Sequence[Transport]:
        """Return ``size`` new transports, which are not opened yet.

        Each transport is for one rank of the same communicator. All ranks are threads of this process.
        """
        raise NotImplementedError(f"{type(self).__name__}.make(size) must return the transports to test")

    def kernels(self) -> Kernels:
        from ddlcore.kernels.cpu import CpuKernels

        return CpuKernels()

    def settings(self) -> Mapping[str, str | int | float | bool]:
        """Return the value of ``Context.settings``: the default settings of the core and of all installed plugins."""
        return _defaults(tuple(sys.path))

    def members(self, size: int) -> Sequence[Member]:
        """Return the members of a communicator of ``size`` ranks.

        The ranks of the members in the world are 1, 3, 5 and so on. So a test fails if a transport confuses the rank in
        the world with the rank in the communicator.
        """
        return [Member(rank=2 * rank + 1, host=host) for rank, host in enumerate(self.hosts(size))]

    def hosts(self, size: int) -> Sequence[int]:
        """Return the number of the host of each rank. The hosts are simulated: all ranks are threads of one process."""
        return [0] * size

    def test_what_is_offered_is_what_is_made(self) -> None:
        """``offers`` is None, or equals the capabilities of the transports that ``make`` returns.

        If ``offers`` lacked a capability of the transports, the tests of this capability would be left out.
        """
        assert self.offers in (None, self.capabilities()), "offers differs from the capabilities of what make() makes"

    # --- used by the standard tests

    @classmethod
    def setup_class(cls) -> None:
        cls._shared = {}
        for size in cls.sizes:
            group = None
            with suppress(Exception, pytest.skip.Exception):  # the tests get the same error again, and report it
                group = cls().new_group(size)
                group.open()
                cls._shared[size] = group

    @classmethod
    def teardown_class(cls) -> None:
        for group in cls._shared.values():
            group.close()
        cls._shared = {}

    def setup_method(self) -> None:
        self._own: dict[int, TransportGroup] = {}  # replaces a shared group that could not be opened or failed

    def teardown_method(self) -> None:
        for group in self._own.values():
            group.close()
        self._own.clear()

    def new_group(self, size: int, name: str = "test") -> TransportGroup:
        """Return a new group of ``size`` ranks, which is not open yet.

        If the transport does not support memory of the CPU, the test is skipped.
        """
        transports = self.make(size)
        devices = transports[0].capabilities.devices
        if "cpu" not in devices:
            pytest.skip(
                f"capabilities: moves memory of {', '.join(sorted(devices))} only, and these tests' is the CPU's"
            )
        return TransportGroup(
            transports,
            self.kernels(),
            members=self.members(size),
            settings=self.settings(),
            deadline_s=self.deadline_s,
            name=name,
        )

    def group(self, size: int) -> TransportGroup:
        """Return an open group of ``size`` ranks, which the tests of the suite share."""
        group = self._shared.get(size) or self._own.get(size)
        if group is None:
            group = self.new_group(size)
            group.open()
            self._own[size] = group
        return group

    def capabilities(self) -> Capabilities:
        return self.group(self.sizes[0]).transports[0].capabilities

    def play(self, size: int, function: Callable[[int, Transport], None]) -> None:
        """Call ``function(rank, transport)`` on every rank of the open group of ``size`` ranks.

        If a rank raises an error, close the group and forget it, so that later tests get a new group.
        """
        group = self.group(size)
        try:
            group.run(function)
        except BaseException:
            self._shared.pop(size, None)
            self._own.pop(size, None)
            group.discard()
            raise

    def check(self, size: int, cases: Sequence[Case]) -> None:
        """Run all ``cases`` on every rank, one directly after the other. Then check the results of each case."""

        def all_of_them(rank: int, transport: Transport) -> None:
            for case in cases:
                case.run(rank, transport)

        self.play(size, all_of_them)
        for case in cases:
            case.check()

    def adding(self, size: int) -> Sequence[int] | None:
        """Return the host of each rank if the transport adds the values within each host first. Otherwise return None.

        The result is passed as ``hosts`` to the functions of ``ddl_conform.oracle``.
        """
        return self.hosts(size) if self.capabilities().host_first else None

    def needs(self, dtype: DType, op: ReduceOp = ReduceOp.Sum) -> None:
        """Skip the test if the transport cannot reduce values of the type ``dtype`` with the op ``op``."""
        capabilities = self.capabilities()
        if dtype not in capabilities.dtypes:
            pytest.skip(f"capabilities: does not reduce {dtype.label}")
        if op not in capabilities.ops:
            pytest.skip(f"capabilities: has no {op.name.lower()}")

    def needs_vectored(self, dtype: DType) -> None:
        self.needs(dtype)
        if not self.capabilities().vectored:
            pytest.skip("capabilities: not vectored")
