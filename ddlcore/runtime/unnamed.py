"""Numbers the calls that have no name, so that the calls of different ranks can be paired by their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddlcore.runtime.request import ANONYMOUS, IDLE, Entry, PersistentRequest
from ddlcore.runtime.unfinished import Unfinished


class UnnamedCalls:
    """Counts the unnamed calls of one rank, per process set. The caller holds the lock of the tensor queue.

    All kinds of operations share one count. So the coordinator can see that two ranks ask for different operations.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}  # by process set; ``TensorQueue`` stores what ``number`` returns
        self._generation = 0  # how often all ranks have joined
        # The unnamed calls that fit in no slot of the schedule and that the coordinator has not answered, in their order,
        # each with the time of the call. If another rank has made a different call with the same number, no answer comes.
        self.strays: dict[tuple[int, str], float] = {}
        self.held: list[Entry] = []  # later unnamed calls, in order, that fit in a slot; see ``must_wait``
        self.readmitted: list[PersistentRequest] = []  # see ``readmit``

    def number(self, entries: Sequence[Entry]) -> int:
        """Write the number of an unnamed call into the names of its entries, and return the new count of such calls.

        The caller must store the returned count in ``counts``. If the call has a name, change nothing and return -1.
        """
        first = entries[0]
        if not first.name.startswith(ANONYMOUS) or first.name[len(ANONYMOUS) :][:1] not in ("", "["):
            return -1
        ordinal = self.counts.get(first.set_id, 0)
        for entry in entries:
            entry.name = f"{ANONYMOUS}{self._generation}.{ordinal}{entry.name[len(ANONYMOUS) :]}"
        return ordinal + 1

    def next_name(self, set_id: int) -> str:
        """Return the name that the next unnamed call of a single tensor gets. Afterwards ``counts[set_id]`` must be increased."""
        return f"{ANONYMOUS}{self._generation}.{self.counts.setdefault(set_id, 0)}"

    def readmit(self, entries: Iterable[Entry], unfinished: Unfinished) -> None:
        """Add those of ``entries`` that ``launch_unnamed`` has started to ``unfinished``, because their bucket is void.

        In the next epoch each of them gets a slot again, or is requested from the coordinator.
        """
        for entry in entries:
            if isinstance(entry, PersistentRequest) and entry.name.startswith(ANONYMOUS):
                unfinished.requests[entry.set_id, entry.name] = entry
                self.readmitted.append(entry)

    def forget_readmitted(self, unfinished: Unfinished) -> None:
        """Remove from ``unfinished`` what ``readmit`` has added and what has ended since: its name is never used again."""
        for entry in self.readmitted:
            if entry.state == IDLE:
                unfinished.requests.pop((entry.set_id, entry.name), None)
        self.readmitted = [entry for entry in self.readmitted if entry.state != IDLE]

    def must_wait(self, entry: Entry) -> bool:
        """Return whether ``entry`` must get no slot yet, because an earlier call of its process set is in ``strays``.

        Another rank may have made a call of the schedule where this rank made the stray. That rank is then one call of
        the schedule ahead, and the slots would pair its calls with later calls of this rank.
        """
        number = _number_in(entry.name)
        return any(set_id == entry.set_id and _number_in(name) < number for set_id, name in self.strays)

    def answered(self, set_id: int, names: Iterable[str]) -> list[Entry]:
        """Record that the tensors ``names`` are decided on, so that they stray no longer.

        Return the held entries that no stray holds up any more. They are held no longer.
        """
        for name in names:
            self.strays.pop((set_id, name), None)
        free = [entry for entry in self.held if not self.must_wait(entry)] if self.held else []
        if free:
            self.held = [entry for entry in self.held if self.must_wait(entry)]
        return free

    def next_generation(self) -> None:
        """Number unnamed calls from 0 again, because all ranks have joined.

        Before they joined, some ranks had made fewer calls than others. So the old counts differ between ranks.
        """
        self._generation += 1
        self.counts.clear()


def order_of(entry: Entry) -> int:
    """Return the sort key for pending entries: the number of the unnamed call, or -1 if ``entry`` has a name.

    So the entries of unnamed calls get their slots in the order of these calls.
    """
    return _number_in(entry.name) if entry.name.startswith(ANONYMOUS) else -1


def _number_in(name: str) -> int:
    return int(name.rpartition(".")[2].partition("[")[0])
