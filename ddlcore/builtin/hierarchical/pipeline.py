"""Runs a collective in rounds of three steps each: on this host, across hosts, and on this host again."""

from __future__ import annotations

from collections.abc import Callable

from ddlcore.builtin.hierarchical.crossing import Crossing, Task, finish
from ddlcore.builtin.hierarchical.layout import Layout
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Memory, Transport, Work
from ddlcore.types import Buffer, DType

AHEAD = 2  # rounds that have begun and not ended: one is sent across hosts, the next one waits for that
SLOTS = AHEAD + 1

Step = Callable[[int], None]  # called with the number of the round
Cross = Callable[[Transport, int], Work]


class Pipeline:
    """The state that the collectives of one communicator share.

    One thread uses it, except that ``Cross`` steps run on the crossing's thread. The crossing's thread uses only
    staging memory, which stays alive as long as that thread needs it. So the caller may free its own memory as soon as
    a call has raised.
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
        """Return whether this rank is the first of its host.

        If the data is not divided into shares, only the first rank of each host exchanges data with other hosts.
        """
        return self.layout.local == 0

    def rounds(self, nbytes: int) -> int:
        """Return the number of rounds that ``nbytes`` bytes need; 0 for no bytes."""
        return -(-nbytes // self.chunk_bytes)

    def staging(self, use: str, i: int, count: int, dtype: DType = DType.U8) -> Buffer:
        """Return memory for the purpose ``use`` in round ``i``.

        A later round uses the same memory after round ``i`` has ended.
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
        """Run ``before``, ``cross`` and ``after`` for each of the rounds.

        All ranks of the host run ``before`` and ``after``, in the same order. ``cross`` is None on a rank that
        exchanges no data with other hosts. While one round is sent across hosts, ``before`` of following rounds and
        ``after`` of earlier rounds run. No step waits for a later round, so there can be no deadlock, whichever rank is
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
        """Wait for ``work`` of the transport within the host."""
        finish(work, self.check)


def _task(cross: Cross, i: int) -> Task:
    return lambda transport: cross(transport, i)


def at(buffer: Buffer, begin: int, count: int) -> Buffer:
    """Return ``count`` elements of ``buffer``, from element ``begin`` on."""
    return Buffer(buffer.address + begin * buffer.dtype.itemsize, count, buffer.dtype, (count,), owner=buffer.owner)
