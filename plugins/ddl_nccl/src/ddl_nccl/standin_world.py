"""Lets the ranks of the stand-in for NCCL meet: their queues' threads execute collectives and exchange messages."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddl_conform.pretend import PretendQueue

from ddl_nccl.standin_moves import Asked, carry_out, memory

SENDS, RECEIVES = "send", "recv"


class _Round:
    """One collective: the calls that the ranks have made so far, and whether the collective has ended."""

    def __init__(self) -> None:
        self.parts: dict[int, Asked] = {}
        self.over = False


@dataclass
class _Message:
    call: Asked
    over: bool = False


@dataclass(eq=False)
class Comm:
    """One rank's communicator. NCCL frees it when it is aborted or destroyed, so a later use counts as a fault."""

    world: StandInWorld
    rank: int
    device: int
    error: int = 0
    account: str = ""
    aborted: bool = False
    ended: str = ""
    collectives: int = 0  # called so far
    queued: int = 0  # number of groups of calls that the queue has not finished
    streams: set[int] = field(default_factory=set)

    def fault(self, what: str) -> None:
        """Record a use of this communicator that NCCL does not allow."""
        self.world.faults.append(f"rank {self.rank}'s communicator: {what}")


class _Aborted(Exception):
    """Raised to end a kernel whose communicator was aborted."""


class StandInWorld:
    """The ranks that use one unique id, and their communicators.

    ``faults`` and ``deaf`` are those of the stand-in.
    """

    def __init__(self, faults: list[str], deaf: set[int]) -> None:
        self.size = 0  # 0: no rank has come yet
        self.comms: dict[int, Comm] = {}
        self.changed = threading.Condition()
        self.rounds: defaultdict[int, _Round] = defaultdict(_Round)
        self.messages: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self.faults = faults
        self.deaf = deaf

    def run(self, comm: Comm, queue: PretendQueue, calls: Sequence[tuple[int, Asked]]) -> None:
        """Execute the calls of one group on the thread of ``queue``, which is the queue of ``comm``'s rank.

        Each call has its number among the collectives of the communicator, or -1 if it is a message.
        """
        for _, call in calls:
            for address, nbytes in call.spans(self.size):
                queue.runtime.require(address, nbytes)
        try:
            with self.changed:
                sent = self._sends(comm, calls)
                for number, call in calls:
                    if number >= 0:
                        self._collective(comm, number, call)
                for _, call in calls:
                    if call.kind == RECEIVES:
                        self._receive(comm, call)
                for message in sent:
                    while not message.over:
                        self._wait(comm)
        except _Aborted:
            pass  # the kernel ends, and the stream continues with whatever is in the memory
        finally:
            comm.queued -= 1

    def _sends(self, comm: Comm, calls: Sequence[tuple[int, Asked]]) -> list[_Message]:
        sent = []
        for _, call in calls:
            if call.kind == SENDS:
                message = _Message(call)
                self.messages[comm.rank, call.root].append(message)
                sent.append(message)
        self.changed.notify_all()
        return sent

    def _receive(self, comm: Comm, call: Asked) -> None:
        incoming = self.messages[call.root, comm.rank]
        while not incoming or self.comms[call.root].aborted:
            self._wait(comm)
        message = incoming.popleft()
        if (message.call.count, message.call.dtype) != (call.count, call.dtype):
            comm.fault(f"receives {call.said} where rank {call.root} sends {message.call.said}")
        else:
            memory(call.target, call.count, call.dtype)[:] = memory(message.call.source, call.count, call.dtype)
        message.over = True
        self.changed.notify_all()

    def _collective(self, comm: Comm, number: int, call: Asked) -> None:
        """Take part in a collective on the thread of this rank's queue.

        The last rank that takes part executes the collective. ``number`` is the number of the collective among those of
        the communicator. If a rank was aborted, its memory may be freed. Then the collective is not executed, and the
        other ranks wait until they are aborted too.
        """
        this = self.rounds[number]
        this.parts[comm.rank] = call
        deaf = self.deaf & {stream for comm in self.comms.values() for stream in comm.streams}
        if len(this.parts) == self.size and not deaf and not any(one.aborted for one in self.comms.values()):
            said = {part.said for part in this.parts.values()}
            if len(said) > 1:
                comm.fault(f"the ranks disagree: {' / '.join(sorted(said))}")
            else:
                carry_out([this.parts[rank] for rank in range(self.size)])
            this.over = True
            del self.rounds[number]
            self.changed.notify_all()
            return
        while not this.over:
            self._wait(comm)

    def _wait(self, comm: Comm) -> None:
        if comm.aborted:
            raise _Aborted
        self.changed.wait(0.05)
