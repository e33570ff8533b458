"""The vocabulary of ddl: element types, operations, devices, and the memory that travels between rooms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "BF16_NAME",
    "CPU",
    "Adasum",
    "Average",
    "Buffer",
    "DType",
    "Device",
    "Kind",
    "Knob",
    "Max",
    "Member",
    "Min",
    "Placement",
    "Product",
    "ReduceOp",
    "Sum",
    "Value",
]

BF16_NAME = "bfloat16"  # numpy has no such type of its own; ml_dtypes and the frameworks use this name


class DType(IntEnum):
    """An element type, by the code it has on the wire and in kernels."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    I32 = 4
    I64 = 5
    F16 = 6
    BF16 = 7
    F32 = 8
    F64 = 9
    BOOL = 10

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The field's name of the type, such as ``float32``."""
        return _LABEL[self]

    @property
    def is_float(self) -> bool:
        return DType.F16 <= self <= DType.F64

    @property
    def is_integer(self) -> bool:
        return self <= DType.I64

    @classmethod
    def of(cls, label: str) -> DType:
        """The type that is called ``label`` (``float32``, ``bfloat16``, …).

        Raises ValueError for a type that ddl does not carry.
        """
        try:
            return _BY_LABEL[label]
        except KeyError:
            known = ", ".join(_LABEL.values())
            raise ValueError(f"tensor type {label} is not supported; ddl carries {known}") from None


_ITEMSIZE = (1, 1, 2, 2, 4, 8, 2, 2, 4, 8, 1)
_LABEL = {
    DType.U8: "uint8",
    DType.I8: "int8",
    DType.U16: "uint16",
    DType.I16: "int16",
    DType.I32: "int32",
    DType.I64: "int64",
    DType.F16: "float16",
    DType.BF16: BF16_NAME,
    DType.F32: "float32",
    DType.F64: "float64",
    DType.BOOL: "bool",
}
_BY_LABEL = {label: dtype for dtype, label in _LABEL.items()}


class ReduceOp(IntEnum):
    """How the ranks' values are combined; the integers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


class Kind(IntEnum):
    """What a bucket does. The last three change the job itself and carry no tensor."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    JOIN = 6
    ADD_SET = 7
    REMOVE_SET = 8

    @property
    def is_ragged(self) -> bool:
        """Whether ranks may differ in the first dimension."""
        return self in (Kind.ALLGATHER, Kind.ALLTOALL)

    @property
    def is_elementwise(self) -> bool:
        """Whether any dense layout will do, because elements meet only their own index."""
        return self in (Kind.ALLREDUCE, Kind.BROADCAST)


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory lives: ``cpu``, or ``cuda`` with the index that this process sees."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")


@dataclass(slots=True)
class Buffer:
    """Dense memory of one tensor, seen without a framework.

    Only a persistent request's address, owner, event and order ever change, while nothing is under way.

    ``strides`` (in elements) is None for row-major memory, else the tensor's own dense permutation.
    ``owner`` keeps the memory alive, and the event. ``wait``, where the producer may still be writing,
    blocks until the values stand; None says that they do, or that the device will see to it: ``event`` is
    the handle of an event behind which they stand, recorded on the producer's stream; 0 for host memory.

    ``stream`` is that stream's handle, and ``order`` rises from event to event of it, so that of many the
    last alone need be waited for; where ``order`` is 0, each is waited for.
    """

    address: int
    count: int  # elements
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    device: Device = CPU
    owner: object = None
    wait: Callable[[], None] | None = None
    event: int = 0
    stream: int = 0
    order: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether its elements fill ``nbytes`` bytes from ``address`` on, in whatever order of the axes."""
        expected = 1
        for stride, length in sorted(zip(self.strides or (), self.shape)):
            if length > 1 and stride != expected and self.count:
                return False
            expected *= length
        return True


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a communicator, as the launcher placed it."""

    rank: int  # in the world
    host: int  # index of its host, as counted by the launcher: the only proof that two ranks share one


@dataclass(frozen=True)
class Placement:
    """Where one rank stands among all: everything follows from the host index of every rank."""

    rank: int
    hosts: tuple[int, ...]  # (size,) host index of each rank

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def _mine(self) -> int:
        return self.hosts[self.rank]

    @property
    def local_rank(self) -> int:
        """How many lower ranks share this rank's host."""
        return self.hosts[: self.rank].count(self._mine)

    @property
    def local_size(self) -> int:
        return self.hosts.count(self._mine)

    def _same_local_rank(self) -> list[int]:
        seen: dict[int, int] = {}
        peers = []
        for host in self.hosts:
            if seen.setdefault(host, 0) == self.local_rank:
                peers.append(host)
            seen[host] += 1
        return peers

    @property
    def cross_rank(self) -> int:
        """This rank's place among the ranks that have its local rank on their hosts."""
        return self._same_local_rank().index(self._mine)

    @property
    def cross_size(self) -> int:
        return len(self._same_local_rank())

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        return len({self.hosts.count(host) for host in self.hosts}) == 1

    def among(self, ranks: Sequence[int]) -> Placement:
        """The placement of the world that consists of ``ranks`` only, in that order."""
        return Placement(list(ranks).index(self.rank), tuple(self.hosts[r] for r in ranks))


Value = str | int | float | bool  # of a setting


@dataclass(frozen=True)
class Knob:
    """One setting that may be searched: a range (``low`` to ``high``, both included) or ``choices``."""

    name: str  # of the setting
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()  # not empty: one of these, and there is no range
    logarithmic: bool = False  # of a range: equal ratios count alike, as with bytes; then low is above 0
    whole: bool = True  # of a range: integers only
    reopens: bool = False  # takes effect when a communicator opens: it is opened anew for each value
    doc: str = ""

    def holds(self, value: Value) -> bool:
        """Whether ``value`` is one of this knob's."""
        if self.choices:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if isinstance(value, (str, bool)) or (self.whole and not isinstance(value, int)):
            return False
        return self.low <= value <= self.high

    def at(self, part: float) -> Value:
        """The value at ``part`` of the way from the first to the last, 0 to 1."""
        if self.choices:
            return self.choices[min(int(part * len(self.choices)), len(self.choices) - 1)]
        if self.logarithmic:
            value = math.exp(math.log(self.low) + part * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + part * (self.high - self.low)
        value = min(max(value, self.low), self.high)
        return int(min(max(round(value), math.ceil(self.low)), math.floor(self.high))) if self.whole else value

    def part(self, value: Value) -> float:
        """Where ``value`` stands between the first and the last, 0 to 1; what is beyond them counts as one of these."""
        if self.choices:
            at = self.choices.index(value) if value in self.choices else 0
            return (at + 0.5) / len(self.choices)
        number = min(max(float(value), self.low), self.high)
        if self.high == self.low:
            return 0.0
        if self.logarithmic:
            return math.log(number / self.low) / math.log(self.high / self.low)
        return (number - self.low) / (self.high - self.low)
