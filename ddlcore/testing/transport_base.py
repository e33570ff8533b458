"""What a transport's author fills in, and the groups that the standard tests share."""

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
    """Notes on a test, or on what one is called with, which capabilities it needs; see ddlcore/testing/collecting.py."""

    def note(function: F) -> F:
        function.only_where = capabilities  # type: ignore[attr-defined]  # functions take attributes
        return function

    return note


class TransportBase(StandardSuite):
    """To write: ``make``. The rest has values that fit a transport on one host's CPUs."""

    sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)  # of the worlds that each test runs in; with 1 where it serves that
    deadline_s: ClassVar[float] = 60.0  # of one test's collectives
    abort_s: ClassVar[float] = 10.0  # of one rank's abort: the contract gives it 1 s, a busy machine takes longer
    offers: ClassVar[Capabilities | None] = (
        None  # those of what ``make`` makes; if said, what they rule out may be left out
    )
    chunk_bytes: ClassVar[int] = 128 << 10  # where the transport cuts large tensors: the sizes tried lie around it
    _shared: ClassVar[dict[int, Group]] = {}  # opened once for all tests of the class

    def make(self, size: int) -> Sequence[Transport]:
        """``size`` new transports, not yet opened, that will meet as one group within this process."""
        raise NotImplementedError(f"{type(self).__name__}.make(size) must return the transports to test")

    def kernels(self) -> Kernels:
        from ddlcore.kernels.cpu import CpuKernels

        return CpuKernels()

    def settings(self) -> Mapping[str, str | int | float | bool]:
        """What the transport finds in ``context.settings``: the core's rows and those of installed plugins."""
        from ddlcore.plug.settings import settings_of

        return settings_of({})[0]

    def members(self, size: int) -> Sequence[Member]:
        """Who they are in the world; not 0, 1, 2, …, so that nobody takes a world rank for a group's."""
        return [Member(rank=2 * rank + 1, host=host) for rank, host in enumerate(self.hosts(size))]

    def hosts(self, size: int) -> Sequence[int]:
        """The host that each rank is said to be on; all are threads of one process all the same."""
        return [0] * size

    def test_what_is_offered_is_what_is_made(self) -> None:
        """So that no test is left out that the transport could have failed."""
        assert self.offers in (None, self.capabilities()), "offers differs from the capabilities of what make() makes"

    # --- used by the standard tests

    @classmethod
    def setup_class(cls) -> None:
        cls._shared = {}
        for size in cls.sizes:
            group = None
            with suppress(Exception, pytest.skip.Exception):  # the tests meet it again, and tell
                group = cls().new_group(size)
                group.open()
                cls._shared[size] = group

    @classmethod
    def teardown_class(cls) -> None:
        for group in cls._shared.values():
            group.close()
        cls._shared = {}

    def setup_method(self) -> None:
        self._own: dict[int, Group] = {}  # where the class has none, because it failed

    def teardown_method(self) -> None:
        for group in self._own.values():
            group.close()
        self._own.clear()

    def new_group(self, size: int, name: str = "test") -> Group:
        """A group that is not open yet. Skips the test where its memory is not the CPU's."""
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
        """An open group of this size, shared with the other tests of the class."""
        group = self._shared.get(size) or self._own.get(size)
        if group is None:
            group = self.new_group(size)
            group.open()
            self._own[size] = group
        return group

    def capabilities(self) -> Capabilities:
        return self.group(self.sizes[0]).transports[0].capabilities

    def play(self, size: int, function: Callable[[int, Transport], None]) -> None:
        """``function(rank, transport)`` on every rank; after a failure the group is not used again."""
        group = self.group(size)
        try:
            group.run(function)
        except BaseException:
            self._shared.pop(size, None)
            self._own.pop(size, None)
            group.discard()
            raise

    def check(self, size: int, cases: Sequence[Case]) -> None:
        """Plays the cases one behind the other without a pause, then checks each."""

        def all_of_them(rank: int, transport: Transport) -> None:
            for case in cases:
                case.run(rank, transport)

        self.play(size, all_of_them)
        for case in cases:
            case.check()

    def adding(self, size: int) -> Sequence[int] | None:
        """The hosts whose sums are made first; None where all ranks are added in one go. For the oracle."""
        return self.hosts(size) if self.capabilities().host_first else None

    def needs(self, dtype: DType, op: ReduceOp = ReduceOp.Sum) -> None:
        """Skips where the capabilities say that it does not reduce so."""
        capabilities = self.capabilities()
        if dtype not in capabilities.dtypes:
            pytest.skip(f"capabilities: does not reduce {dtype.label}")
        if op not in capabilities.ops:
            pytest.skip(f"capabilities: has no {op.name.lower()}")

    def needs_vectored(self, dtype: DType) -> None:
        self.needs(dtype)
        if not self.capabilities().vectored:
            pytest.skip("capabilities: not vectored")
