"""What the author of a transport fills in, and the groups of ranks that the standard tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import pytest

from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Capabilities, Transport
from ddlcore.testing.group import Case, Group
from ddlcore.testing.standard import StandardSuite
from ddlcore.types import DType, Member, ReduceOp

__all__ = ["DTYPES", "OPS", "TransportBase", "only_where"]

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
OPS = pytest.mark.parametrize(
    "op", [ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product], ids=lambda op: op.name.lower()
)


def only_where(*capabilities: str) -> Callable[[F], F]:
    """Return a decorator that records on a test, or on a parameter of a test, which capabilities it needs.

    ddlcore/testing/collecting.py deselects tests by this record.
    """

    def note(function: F) -> F:
        function.only_where = capabilities  # type: ignore[attr-defined]  # functions take attributes
        return function

    return note


class TransportBase(StandardSuite):
    """The base of the transport suite. A subclass overrides ``make``, which creates the transports of the ranks.

    The defaults of the other attributes fit a transport on the CPUs of one host.
    """

    sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)  # world sizes of each test; include 1 if the transport supports that
    deadline_s: ClassVar[float] = 60.0  # for the collectives of one test
    abort_s: ClassVar[float] = 10.0  # for the abort of one rank: the contract allows 1 s, a busy machine needs more
    offers: ClassVar[Capabilities | None] = (
        None  # capabilities of the transports that ``make`` makes; if set, tests that need others may be deselected
    )
    chunk_bytes: ClassVar[int] = 128 << 10  # where the transport cuts large tensors; tests use sizes around it
    _shared: ClassVar[dict[int, Group]] = {}  # groups that are opened once for all tests of the class

    def make(self, size: int) -> Sequence[Transport]:
        """Return ``size`` new transports, not yet opened, that will meet as one group within this process."""
        raise NotImplementedError(f"{type(self).__name__}.make(size) must return the transports to test")

    def kernels(self) -> Kernels:
        from ddlcore.kernels.cpu import CpuKernels

        return CpuKernels()

    def settings(self) -> Mapping[str, str | int | float | bool]:
        """Return the settings for ``context.settings``: the defaults of the core and of all installed plugins."""
        from ddlcore.plug.settings import settings_of

        return settings_of({})[0]

    def members(self, size: int) -> Sequence[Member]:
        """Return the members of the group.

        Their world ranks are not 0, 1, 2, …, so that a transport that confuses them with the group's ranks is noticed.
        """
        return [Member(rank=2 * rank + 1, host=host) for rank, host in enumerate(self.hosts(size))]

    def hosts(self, size: int) -> Sequence[int]:
        """Return the host on which each rank pretends to be; in fact all ranks are threads of one process."""
        return [0] * size

    def test_what_is_offered_is_what_is_made(self) -> None:
        """``offers`` equals the transports' capabilities, so that no test is left out that the transport could fail."""
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
        self._own: dict[int, Group] = {}  # replaces a shared group that could not be opened or failed

    def teardown_method(self) -> None:
        for group in self._own.values():
            group.close()
        self._own.clear()

    def new_group(self, size: int, name: str = "test") -> Group:
        """Return a new group of ``size`` ranks, not yet open.

        Skips the test if the transport does not support the CPU's memory.
        """
        transports = self.make(size)
        devices = transports[0].capabilities.devices
        if "cpu" not in devices:
            pytest.skip(
                f"capabilities: moves memory of {', '.join(sorted(devices))} only, and these tests' is the CPU's"
            )
        return Group(
            transports,
            self.kernels(),
            members=self.members(size),
            settings=self.settings(),
            deadline_s=self.deadline_s,
            name=name,
        )

    def group(self, size: int) -> Group:
        """Return an open group of this size, which the tests of the class share."""
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

        If that fails, discard the group, so that later tests get a new one.
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
        """Run all ``cases`` on every rank without a pause between them, then check the results of each case."""

        def all_of_them(rank: int, transport: Transport) -> None:
            for case in cases:
                case.run(rank, transport)

        self.play(size, all_of_them)
        for case in cases:
            case.check()

    def adding(self, size: int) -> Sequence[int] | None:
        """Return the host of each rank if the transport adds values on each host first; otherwise None.

        The result is the argument ``hosts`` of the oracle's functions.
        """
        return self.hosts(size) if self.capabilities().host_first else None

    def needs(self, dtype: DType, op: ReduceOp = ReduceOp.Sum) -> None:
        """Skip the test if the transport cannot reduce this type with this op."""
        capabilities = self.capabilities()
        if dtype not in capabilities.dtypes:
            pytest.skip(f"capabilities: does not reduce {dtype.label}")
        if op not in capabilities.ops:
            pytest.skip(f"capabilities: has no {op.name.lower()}")

    def needs_vectored(self, dtype: DType) -> None:
        self.needs(dtype)
        if not self.capabilities().vectored:
            pytest.skip("capabilities: not vectored")
