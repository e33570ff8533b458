"""Runs a collective in rounds of three steps each: on this host, across hosts, and on this host again."""

from __future__ import annotations

from collections.abc import Callable

from ddl_shm.hierarchical.crossing import Crossing, Task, finish
from ddl_shm.hierarchical.layout import HostGroups
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Memory, Transport, Work
from ddlcore.types import Buffer, DType

AHEAD = 2  # rounds that have begun and not ended: one is sent across hosts, the next round waits to be sent
SLOTS = AHEAD + 1

Step = Callable[[int], None]  # called with the number of the round
Cross = Callable[[Transport, int], Work]


class Pipeline:
    """The state that all collectives of one communicator use: its layout, its transports and its staging memory.

    One thread calls the collectives and runs their steps on this host. The ``Cross`` steps run on another thread, that
    of the ``Crossing`` object. That thread uses only staging memory, which stays alive as long as the thread needs it.
    So if a collective raises an error, the caller may free the source and the target at once.
    """

    def __init__(
        self,
        layout: HostGroups,
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
        """Return whether this rank is the first of its host.

        If a collective does not divide its data into shares, only the first rank of each host exchanges data with
        other hosts.
        """
        return self.layout.local == 0

    def rounds(self, nbytes: int) -> int:
        """Return the number of rounds that ``nbytes`` bytes need; 0 for no bytes."""
        return -(-nbytes // self.chunk_bytes)

    def staging(self, use: str, i: int, count: int, dtype: DType = DType.U8) -> Buffer:
        """Return staging memory for ``count`` elements of type ``dtype``, for the purpose ``use`` in round ``i``.

        Calls with the same ``use`` and the same round return the same memory. After round ``i`` has ended, a later
        round gets this memory.
        """
        # The crossing's thread may still work on round i - AHEAD while ``before`` of round i runs. Each use has SLOTS
        # pieces of memory, so such rounds use different pieces. Round i - SLOTS, which used the same piece, has ended,
        # because ``stream`` has waited for its ticket.
        nbytes = count * dtype.itemsize
        key = (use, i % SLOTS)
        memory = self._staging.get(key)
        if memory is None or memory.nbytes < nbytes:
            memory = self._staging[key] = Memory(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)

    def stream(self, rounds: int, before: Step, cross: Cross | None, after: Step) -> None:
        """Run the three steps ``before``, ``cross`` and ``after`` for each round from 0 to ``rounds`` - 1.

        All ranks of the host run ``before`` and ``after``, in the same order. ``cross`` is None on a rank that
        exchanges no data with other hosts. While the data of one round is sent across hosts, the step ``before`` of
        following rounds and the step ``after`` of earlier rounds run. No step waits for a later round, so there can be
        no deadlock, whichever rank is slowest.
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
        """Wait until ``work``, an operation of the transport within the host, is complete."""
        finish(work, self.check)


def _task(cross: Cross, i: int) -> Task:
    return lambda transport: cross(transport, i)


def at(buffer: Buffer, begin: int, count: int) -> Buffer:
    """Return the part of ``buffer`` that begins at element ``begin`` and has ``count`` elements. Nothing is copied."""
    return Buffer(buffer.address + begin * buffer.dtype.itemsize, count, buffer.dtype, (count,), owner=buffer.owner)
