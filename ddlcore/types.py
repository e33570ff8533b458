"""Define the types that all parts of ddl use: element types, operations, devices, buffers, placements, and knobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "BF16_NAME",
    "CPU",
    "Adasum",
    "Average",
    "Buffer",
    "Carrier",
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
    "carrier_of",
    "known_types",
    "own_shape",
]

BF16_NAME = "bfloat16"  # numpy has no such type; this is the type's name in ml_dtypes and in the frameworks


class DType(IntEnum):
    """The type of a tensor's elements. Its integer value is its code in messages and in kernels."""

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
        """The size of one element in bytes."""
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The usual name of the element type, such as ``float32``."""
        return _LABEL[self]

    @property
    def is_float(self) -> bool:
        return DType.F16 <= self <= DType.F64

    @property
    def is_integer(self) -> bool:
        return self <= DType.I64

    @classmethod
    def of(cls, label: str) -> DType:
        """Return the element type whose usual name is ``label`` (``float32``, ``bfloat16``, …).

        Raises ValueError for a type that transports do not know; another type may carry it, see ``carrier_of``.
        """
        try:
            return _BY_LABEL[label]
        except KeyError:
            known = ", ".join(_LABEL.values())
            raise ValueError(f"tensor type {label} is not supported; transports know {known}") from None


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


class Carrier(NamedTuple):
    """How elements are sent whose type no transport knows: each of them is sent as ``parts`` elements of ``dtype``.

    A complex number has two parts, the real part and the imaginary part. So complex numbers can be added, part by part.
    Elements of all other types that have a carrier can only be moved.
    """

    dtype: DType
    parts: int = 1

    @property
    def is_complex(self) -> bool:
        return self.parts == 2


_CARRIERS = {
    "complex64": Carrier(DType.F32, 2),
    "complex128": Carrier(DType.F64, 2),
    "uint32": Carrier(DType.I32),
    "uint64": Carrier(DType.I64),
    **{
        f"float8_{kind}": Carrier(DType.U8)
        for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    },
}


def carrier_of(label: str) -> Carrier | None:
    """Return the carrier of the element type with the usual name ``label``, or None if the type has no carrier."""
    return _CARRIERS.get(label)


def own_shape(shape: tuple[int, ...], element: str) -> tuple[int, ...]:
    """Return the shape of a tensor, given ``shape``, the shape that its carrier has.

    For complex numbers, ``shape`` has an additional last extent for the two parts, which is left out. ``element``: the
    usual name of the tensor's element type, or "" if the tensor has no carrier.
    """
    carrier = _CARRIERS.get(element)
    return shape[:-1] if carrier is not None and carrier.is_complex else shape


def known_types() -> str:
    """Return the names of all element types that tensors may have, for messages."""
    names = [name for name in (*_BY_LABEL, *_CARRIERS) if not name.startswith("float8_")]
    return ", ".join([*names, "float8_*"])


class ReduceOp(IntEnum):
    """An operation that combines the values of the ranks. The members have the same integers as in Horovod."""

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
    """The kind of operation that a bucket runs.

    JOIN, ADD_SET and REMOVE_SET change the job itself: its joined ranks and its process sets. These three kinds and
    BARRIER have no tensor.
    """

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
        """Whether the size of a tensor's first dimension may differ between ranks and between calls."""
        return self in (Kind.ALLGATHER, Kind.ALLTOALL)


@dataclass(frozen=True, slots=True)
class Device:
    """The device that contains a tensor's memory.

    ``kind`` is ``cpu`` or the kind of an accelerator, such as ``cuda``. ``index`` is the number that the device has in
    this process.
    """

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")


@dataclass(slots=True)
class Buffer:
    """The dense memory of one tensor, independent of the tensor's framework.

    The fields address, owner, event, stream and order change only in the buffers of a persistent request, and only
    while that request is not in flight. In all other buffers no field changes.

    ``strides`` (in elements) is None if the memory is row-major. Otherwise the axes are in another order, without gaps.
    ``owner`` keeps the memory and the event alive. ``wait`` blocks until the framework has written all values; it is
    None if the values are complete already, or if the device itself orders the work. ``event`` is the handle of an
    event that the framework has recorded on its device stream after the values were written; 0 for host memory.

    ``stream`` is the handle of that device stream. ``order`` grows with each event of a stream. So among several events
    of one stream, only the event with the highest ``order`` must be waited for. If ``order`` is 0, the order of the
    event is unknown, and the event must always be waited for.

    ``element`` is the usual name of the tensor's own element type if no transport knows it, such as ``complex64``, and
    otherwise "". Then the other fields describe the carrier's elements in the same memory (see ``carrier_of``). For a
    complex type, ``shape`` has an additional last extent of 2.
    """

    address: int
    count: int  # number of elements
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    device: Device = CPU
    owner: object = None
    wait: Callable[[], None] | None = None
    event: int = 0
    stream: int = 0
    order: int = 0
    element: str = ""

    def mark_ready(self, event: int, stream: int, order: int) -> None:
        """Set the event after which the values are complete, the event's stream, and its order on that stream."""
        self.event = event
        self.stream = stream
        self.order = order

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def label(self) -> str:
        """The usual name of the tensor's own element type."""
        return self.element or self.dtype.label

    @property
    def extents(self) -> tuple[int, ...]:
        """The tensor's own shape, which is () for a scalar; see ``own_shape``."""
        return own_shape(self.shape, self.element) if self.element else self.shape

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill the ``nbytes`` bytes from ``address`` on without gaps, in any order of the axes."""
        expected = 1
        for stride, length in sorted(zip(self.strides or (), self.shape)):
            if length > 1 and stride != expected and self.count:
                return False
            expected *= length
        return True


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a communicator, and the host on which the launcher has placed that rank."""

    rank: int  # world rank
    host: int  # host index from the launcher; two ranks share a host if and only if their host indexes are equal


@dataclass(frozen=True)
class Placement:
    """The position of one rank among the ranks and hosts of the job.

    All properties are computed from ``rank`` and from the host indexes of all ranks.
    """

    rank: int
    hosts: tuple[int, ...]  # (size,) host index of each rank; -1 if the rank was not started yet

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def _mine(self) -> int:
        return self.hosts[self.rank]

    @property
    def local_rank(self) -> int:
        """The local rank: how many lower ranks are on the same host as this rank."""
        return self.hosts[: self.rank].count(self._mine)

    @property
    def local_size(self) -> int:
        return self.hosts.count(self._mine)

    def _same_local_rank(self) -> list[int]:
        seen: dict[int, int] = {}
        peers = []
        for host in self.hosts:
            if host < 0:
                continue  # that rank was not started yet
            if seen.setdefault(host, 0) == self.local_rank:
                peers.append(host)
            seen[host] += 1
        return peers

    @property
    def cross_rank(self) -> int:
        """The position of this rank among all ranks that have the same local rank, from 0."""
        return self._same_local_rank().index(self._mine)

    @property
    def cross_size(self) -> int:
        return len(self._same_local_rank())

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        return len({self.hosts.count(host) for host in self.hosts}) == 1

    def among(self, ranks: Sequence[int]) -> Placement:
        """Return the placement of this rank in a world that consists of ``ranks`` only.

        The new rank of each process is its position in ``ranks``.
        """
        return Placement(list(ranks).index(self.rank), tuple(self.hosts[r] for r in ranks))


Value = str | int | float | bool  # value of a setting


@dataclass(frozen=True)
class Knob:
    """One setting that a search may change, with its allowed values.

    The allowed values are ``choices``, or the range from ``low`` to ``high``, both included.
    """

    name: str  # name of the setting
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()  # if not empty, the value is one of these and there is no range
    logarithmic: bool = False  # for a range: equal steps are equal ratios, as for bytes; ``low`` must be above 0
    whole: bool = True  # for a range: integers only
    reopens: bool = False  # a communicator uses the value only when it opens, so it is opened again for each value
    doc: str = ""

    def holds(self, value: Value) -> bool:
        """Return whether this knob allows ``value``."""
        if self.choices:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if isinstance(value, (str, bool)) or (self.whole and not isinstance(value, int)):
            return False
        return self.low <= value <= self.high

    def at(self, part: float) -> Value:
        """Return the allowed value at the position ``part``, a fraction from 0 (first value) to 1 (last value)."""
        if self.choices:
            return self.choices[min(int(part * len(self.choices)), len(self.choices) - 1)]
        if self.logarithmic:
            value = math.exp(math.log(self.low) + part * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + part * (self.high - self.low)
        value = min(max(value, self.low), self.high)
        return int(min(max(round(value), math.ceil(self.low)), math.floor(self.high))) if self.whole else value

    def part(self, value: Value) -> float:
        """Return the position of ``value`` among the allowed values, as a fraction from 0 (first) to 1 (last).

        A number outside the range counts as the nearest end of the range. A value that is not among ``choices`` counts
        as the first choice.
        """
        if self.choices:
            at = self.choices.index(value) if value in self.choices else 0
            return (at + 0.5) / len(self.choices)
        number = min(max(float(value), self.low), self.high)
        if self.high == self.low:
            return 0.0
        if self.logarithmic:
            return math.log(number / self.low) / math.log(self.high / self.low)
        return (number - self.low) / (self.high - self.low)
