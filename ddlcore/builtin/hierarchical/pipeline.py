"""Runs the rounds of a collective, three steps each: on this host, across hosts, on this host again."""

from __future__ import annotations

from collections.abc import Callable

from ddlcore.builtin.hierarchical.crossing import Crossing, Task, finish
from ddlcore.builtin.hierarchical.layout import Layout
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Memory, Transport, Work
from ddlcore.types import Buffer, DType

__all__ = ["Pipeline", "at"]

AHEAD = 2  # rounds that begin before the first one ends: one crosses, one waits to
SLOTS = AHEAD + 1

Step = Callable[[int], None]  # of round i
Cross = Callable[[Transport, int], Work]


class Pipeline:
    """What the collectives of one communicator share. One thread uses it; ``Cross`` steps run on the crossing's.

    The crossing's thread touches staging memory only, which lives as long as it: the caller's memory is
    free as soon as a call has raised.
    """

    def __init__(
        self,
        layout: Layout,
        local: Transport,
        crossing: Crossing | None,
        kernels: Kernels,
        chunk_bytes: int,
        check: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.local = local
        self.kernels = kernels
        self.chunk_bytes = chunk_bytes
        self.check = check  # raises where the communicator is of no further use
        self._crossing = crossing
        self._staging: dict[tuple[str, int], Memory] = {}

    @property
    def leads(self) -> bool:
        """Whether this rank is its host's first, which crosses where nothing is shared out."""
        return self.layout.local == 0

    def rounds(self, nbytes: int) -> int:
        """In how many rounds so many bytes pass: 0 for none."""
        return -(-nbytes // self.chunk_bytes)

    def staging(self, use: str, i: int, count: int, dtype: DType = DType.U8) -> Buffer:
        """Memory of round i, which a later round has again once this one has ended."""
        nbytes = count * dtype.itemsize
        key = (use, i % SLOTS)
        memory = self._staging.get(key)
        if memory is None or memory.nbytes < nbytes:
            memory = self._staging[key] = Memory(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)

    def stream(self, rounds: int, before: Step, cross: Cross | None, after: Step) -> None:
        """Every rank of the host takes part in ``before`` and ``after``, in one order; None: this one does not cross.

        While round i crosses, ``before`` of the next ones and ``after`` of those behind run. No step waits
        for a later round, so whoever is slowest, the others' steps end: nobody waits in a circle.
        """
        tickets = []
        for i in range(rounds + AHEAD):
            if i < rounds:
                self.check()
                before(i)
                if cross is not None:
                    assert self._crossing is not None
                    tickets.append(self._crossing.put(_task(cross, i)))
            if i >= AHEAD:
                if cross is not None:
                    assert self._crossing is not None
                    self._crossing.wait(tickets[i - AHEAD])
                after(i - AHEAD)

    def here(self, work: Work) -> None:
        """Waits for what runs within the host."""
        finish(work, self.check)


def _task(cross: Cross, i: int) -> Task:
    return lambda transport: cross(transport, i)


def at(buffer: Buffer, begin: int, count: int) -> Buffer:
    """``count`` elements of it."""
    return Buffer(buffer.address + begin * buffer.dtype.itemsize, count, buffer.dtype, (count,), owner=buffer.owner)
