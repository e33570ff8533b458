"""Runs the rounds of a collective in three steps each: on this host, across hosts, on this host again."""

from __future__ import annotations

from collections.abc import Callable

from ddlcore.builtin.hierarchical.crossing import Crossing, Task, finish
from ddlcore.builtin.hierarchical.layout import Layout
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Memory, Transport, Work
from ddlcore.types import Buffer, DType

AHEAD = 2  # rounds that begin before the first one ends: one crosses, the next one waits to cross
SLOTS = AHEAD + 1

Step = Callable[[int], None]  # of round i
Cross = Callable[[Transport, int], Work]


class Pipeline:
    """The state that the collectives of one communicator share.

    One thread uses it; ``Cross`` steps run on the crossing's thread. That thread touches only staging memory, which
    lives as long as the thread uses it; so the caller may free its own memory as soon as a call has raised.
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
        self.check = check  # raises if the communicator can no longer be used
        self._crossing = crossing
        self._staging: dict[tuple[str, int], Memory] = {}

    @property
    def leads(self) -> bool:
        """Return whether this rank is the first of its host, which crosses if the data is not divided into shares."""
        return self.layout.local == 0

    def rounds(self, nbytes: int) -> int:
        """Return the number of rounds for so many bytes; 0 for no bytes."""
        return -(-nbytes // self.chunk_bytes)

    def staging(self, use: str, i: int, count: int, dtype: DType = DType.U8) -> Buffer:
        """Return memory for round i, which a later round reuses after this one has ended."""
        # The crossing's thread may still work on round i - AHEAD while ``before`` of round i runs. With SLOTS pieces of
        # memory per use, no two such rounds share one. Round i - SLOTS has ended: ``stream`` has waited for its ticket.
        nbytes = count * dtype.itemsize
        key = (use, i % SLOTS)
        memory = self._staging.get(key)
        if memory is None or memory.nbytes < nbytes:
            memory = self._staging[key] = Memory(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)

    def stream(self, rounds: int, before: Step, cross: Cross | None, after: Step) -> None:
        """Run the rounds. Every rank of the host takes part in ``before`` and ``after``, in the same order.

        ``cross`` is None on a rank that does not cross. While round i crosses, ``before`` of the following rounds and
        ``after`` of earlier ones run. No step waits for a later round, so there can be no deadlock, whichever rank is
        slowest.
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
        """Wait for work within the host."""
        finish(work, self.check)


def _task(cross: Cross, i: int) -> Task:
    return lambda transport: cross(transport, i)


def at(buffer: Buffer, begin: int, count: int) -> Buffer:
    """Return ``count`` elements of the buffer from element ``begin`` on."""
    return Buffer(buffer.address + begin * buffer.dtype.itemsize, count, buffer.dtype, (count,), owner=buffer.owner)
