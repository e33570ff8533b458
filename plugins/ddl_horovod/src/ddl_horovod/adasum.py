"""Adasum, an adaptive sum of the ranks' arrays, which keeps the length of a step that several ranks propose alike.

The sum of two arrays a and b is (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum if they are orthogonal, and their
average if they are equal. The sum of more arrays is that of two halves of them. Several arrays have one sum each. The source
is "Scaling Distributed Training with Adaptive Summation" (Maleki et al., MLSys 2021), with the algorithm that the paper calls
AdasumRVH: the ranks of a pair exchange halves of their vectors, pairs of pairs exchange quarters, and so on. Ranks of one
host are combined first. If the number of ranks is not a power of two, those that are too many are combined with the first
ones beforehand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

import numpy as np

from ddlcore.api import Operations, ProcessSet
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.errors import InvalidArgument, MismatchError
from ddlcore.process.job import Job

Array = Any  # numpy.ndarray
_OPERATIONS = Operations(NumpyAdapter())
_LEAST = float(np.sqrt(np.finfo(np.float64).tiny))  # a vector whose squared length is smaller counts as 0


def name_of(name: str | None, job: Job, process_set: ProcessSet) -> str:
    """Return ``name``, or a name for a call without one, which pairs such calls of the ranks by their order."""
    return (
        name or f"adasum.noname.{process_set.process_set_id}.{job.next_ordinal(f'adasum {process_set.process_set_id}')}"
    )


def adasum(arrays: Sequence[Array], name: str, process_set: ProcessSet, job: Job) -> list[Array]:
    """Return the adaptive sum of each of ``arrays`` over the members of ``process_set``, as new arrays, in this order.

    Every member must call this with the same ``name``, and arrays of the same shapes and types. float16 and float32 are
    combined in float32, float64 in float64; the sum is rounded to the type of the array once. Raises InvalidArgument at once
    for other types, MismatchError on all members if shapes or types differ or another member calls an allreduce of this
    name with another op, and the errors of the job.
    """
    wrong = {str(one.dtype) for one in arrays} - {"float16", "float32", "float64"}
    if wrong:
        raise InvalidArgument(
            f"op=Adasum is for floating-point numbers of 16, 32 or 64 bits, not for {', '.join(sorted(wrong))}"
        )
    return _Adasum(arrays, name, process_set, job).run()


class Background:
    """A handle of a function that a thread of its own calls, because it waits for other ranks several times.

    An exception that interrupts ``wait``, such as KeyboardInterrupt, does not interrupt the function. So the other ranks,
    which are in the same phase of it, come to its end.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: Future[Any] = Future()
        self._function = function
        self._thread = threading.Thread(target=self._run, name="ddl-adasum", daemon=True)

    def start(self) -> Background:
        """Start the thread, unless that was done before. Return this object."""
        if self._thread.ident is None:
            self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self._result.set_result(self._function())
        except BaseException as error:
            self._result.set_exception(error)

    def poll(self) -> bool:
        """Return whether the function has ended."""
        return self._result.done()

    def wait(self) -> Any:
        """Wait for the function. Return its result, or raise its error."""
        return self._result.result()


class _Adasum:
    """One call of ``adasum`` on one rank. ``_vector`` holds all arrays, of which this rank computes a part at the end."""

    def __init__(self, arrays: Sequence[Array], name: str, process_set: ProcessSet, job: Job) -> None:
        _, members = process_set.resolve(job)
        hosts = job.placement.hosts
        self._arrays = arrays
        self._name = name
        self._how: dict[str, Any] = {"process_set": process_set, "job": job, "waits": True}
        # The members by their positions in the set, in the order in which they are combined; and this rank's place there.
        self._order = sorted(range(len(members)), key=lambda at: (hosts[members[at]], at))
        self._place = self._order.index(members.index(job.rank))
        self._active = 1 << (len(members).bit_length() - 1)  # how many exchange halves: a power of two
        wide = any(one.dtype == np.float64 for one in arrays)
        self._vector = np.concatenate([one.reshape(-1) for one in arrays] or [np.zeros(0, np.float32)]).astype(
            np.float64 if wide else np.float32, copy=True
        )
        self._ends = [0, *accumulate(one.size for one in arrays)]

    def run(self) -> list[Array]:
        """Exchange and combine, and return the sums."""
        self._check_layout()
        if len(self._vector):
            self._reduce()
        parts = [self._vector[first:last] for first, last in pairwise(self._ends)]
        return [part.astype(one.dtype).reshape(one.shape) for part, one in zip(parts, self._arrays)]

    def _reduce(self) -> None:
        self._fold()
        begin, end = 0, len(self._vector)
        for level, distance in enumerate(self._distances()):
            begin, end = self._halve(level, distance, begin, end)
        self._collect(begin, end)

    def _distances(self) -> Iterator[int]:
        """Yield how far apart in the order the two ranks of a pair are, at each level."""
        distance = 1
        while distance < self._active:
            yield distance
            distance *= 2

    def _check_layout(self) -> None:
        """Raise MismatchError on all ranks if their arrays differ in shape or type."""
        layout = [f"{one.dtype}{list(one.shape)}" for one in self._arrays]
        mine = np.array([[len(layout), len(self._vector), crc32(repr(layout).encode())]], np.float64)
        # In place of an allreduce of this name: if another rank averages it, both are told that their calls differ.
        found = _OPERATIONS.allgather_async(mine, name=self._name, reduces=True, **self._how).wait()
        if not (found == mine).all():
            rows = [
                f"  rank {at}: {int(arrays)} arrays, {int(size)} numbers" for at, (arrays, size, _) in enumerate(found)
            ]
            raise MismatchError(
                "\n".join([f"allreduce {self._name!r} with op=Adasum: shapes or types differ between ranks", *rows]),
                ("allreduce",),
            )

    def _fold(self) -> None:
        """Combine the vectors of the ranks that are too many for a power of two with those of the first ones."""
        extra = len(self._order) - self._active
        if not extra:
            return
        sends = self._place >= self._active
        received = self._exchanged(self._vector if sends else self._vector[:0], self._place - self._active, "fold")
        if len(received):
            size = len(self._vector)
            self._combine(self._vector, received, 0, size, self._products(self._vector, received, 0, size))

    def _halve(self, level: int, distance: int, begin: int, end: int) -> tuple[int, int]:
        """Exchange one half of elements ``begin`` to ``end`` with the partner, and combine the other half.

        Return where the half begins and ends that this rank has now. The ranks that hold the other parts of the two vectors
        that are combined learn each other's products by an allgather.
        """
        active = self._place < self._active
        middle = begin + (end - begin) // 2
        is_second = bool(self._place & distance)  # whether this rank has a part of the second vector of the two
        give = (begin, middle) if is_second else (middle, end)
        begin, end = ((middle, end) if is_second else (begin, middle)) if active else (0, 0)
        part = self._vector[slice(*give)] if active else self._vector[:0]
        received = self._exchanged(part, self._place ^ distance, f"halves.{level}")
        mine = self._vector[begin:end]
        first, second = (received, mine) if is_second else (mine, received)
        products = self._products(first, second, begin, end)
        gathered = self._gathered(products.reshape(1, -1), f"products.{level}")
        if active:
            group = [
                at
                for place, at in enumerate(self._order[: self._active])
                if place // (2 * distance) == self._place // (2 * distance)
            ]
            mine[:] = self._combine(first, second, begin, end, gathered[group].sum(axis=0).reshape(products.shape))
        return begin, end

    def _products(self, first: Array, second: Array, begin: int, end: int) -> Array:
        """Return |a|², |b|² and a·b of this part of each array, in float64: shape (arrays, 3)."""
        products = np.zeros((len(self._arrays), 3))
        for at, here in self._pieces(begin, end):
            a, b = first[here].astype(np.float64), second[here].astype(np.float64)
            products[at] = a @ a, b @ b, a @ b
        return products

    def _combine(self, first: Array, second: Array, begin: int, end: int, products: Array) -> Array:
        """Write the sum of ``first`` and ``second``, elements ``begin`` to ``end`` of two vectors, to ``first``; return it.

        ``products``: the result of ``_products`` for the whole vectors.
        """
        for at, here in self._pieces(begin, end):
            a2, b2, ab = products[at].tolist()
            first[here] *= 1.0 if a2 < _LEAST else 1.0 - ab / (2.0 * a2)
            first[here] += second[here] * second.dtype.type(1.0 if b2 < _LEAST else 1.0 - ab / (2.0 * b2))
        return first

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, slice]]:
        """Yield each array that elements ``begin`` to ``end`` have a piece of, and where that piece is among them."""
        for at, (first, last) in enumerate(pairwise(self._ends)):
            if max(first, begin) < min(last, end):
                yield at, slice(max(first, begin) - begin, min(last, end) - begin)

    def _collect(self, begin: int, end: int) -> None:
        """Gather the parts of all ranks into ``_vector``. This rank has the elements ``begin`` to ``end``."""
        gathered = _OPERATIONS.allgather_async(
            self._vector[begin:end].copy(), name=f"{self._name}.parts", **self._how
        ).wait()
        places = {at: place for place, at in enumerate(self._order)}
        taken = 0
        for at in range(len(self._order)):
            first, last = self._part_of(places[at])
            self._vector[first:last] = gathered[taken : taken + last - first]
            taken += last - first

    def _part_of(self, place: int) -> tuple[int, int]:
        """Return where the part of the result begins and ends that the rank at ``place`` in the order has computed."""
        if place >= self._active:
            return 0, 0
        begin, end = 0, len(self._vector)
        for distance in self._distances():
            middle = begin + (end - begin) // 2
            begin, end = (middle, end) if place & distance else (begin, middle)
        return begin, end

    def _exchanged(self, part: Array, to: int, step: str) -> Array:
        """Send ``part`` to the rank at place ``to`` in the order, unless it is empty, and return what this rank is sent."""
        splits = [0] * len(self._order)
        if len(part):
            splits[self._order[to]] = len(part)
        name = f"{self._name}.{step}"
        rows: Array = _OPERATIONS.alltoall_async(part, splits, name=name, **self._how).wait()[0]
        return rows

    def _gathered(self, row: Array, step: str) -> Array:
        """Return the rows of all members, in the order of the process set."""
        rows: Array = _OPERATIONS.allgather_async(row, name=f"{self._name}.{step}", **self._how).wait()
        return rows
