"""Runs an atomic allreduce of a schedule, and lets another thread continue if the thread that runs it is interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ddlcore.contracts.transport import Prepared
from ddlcore.runtime.delivery import Deliver, same, void
from ddlcore.runtime.request import Entry
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.waiter import Waited


class AtomicAllreduce:
    """A function that runs an atomic allreduce in replay, in place.

    Either all ranks get the results, or the tensors of all ranks stay unchanged. In the second case the bucket is void.
    """

    __slots__ = ("_done", "_prepared", "resumable")

    def __init__(self, prepared: Prepared, tensors: int, resumable: bool) -> None:
        self._prepared = prepared
        self._done: Deliver = partial(same, [None] * tensors)
        self.resumable = resumable  # whether a user thread may run it, which Ctrl-C may interrupt

    def __call__(self, launch: Launch[Entry], use: str) -> Deliver:
        if launch.entries is None:
            self._prepared.run_atomic((), (), False)
            return void
        sources, targets = _addresses(launch.entries)
        return self._done if self._prepared.run_atomic(sources, targets, True) else void

    def resume(self, launch: Launch[Entry], operation: Waited | None = None) -> Deliver | None:
        """Begin to run the bucket, or continue after an interruption. Return the bucket's deliver function.

        This method may be called again for the same launch, also on another thread. ``operation`` is the operation for
        which the calling thread waits. Return None if ``operation`` ended before the bucket could be entered.
        """
        assert launch.entries is not None
        sources, targets = _addresses(launch.entries)
        # A user thread may run this, and Ctrl-C may interrupt it at any moment. The launch number is the ticket: the
        # transport recognizes a repeated try for the same number. So the engine can continue with this launch, without
        # entering the bucket twice and without leaving the peers waiting in it.
        entered = None
        while entered is None:  # Ctrl-C may interrupt the thread between two tries
            entered = self._prepared.try_run_atomic(sources, targets, launch.number)
            if entered is None and operation is not None and not operation.pending:
                return None
        return self._done if entered else void

    def forget(self) -> None:
        """Do nothing, because the results are in the tensors; see AtomicMove.forget."""


def _addresses(entries: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Wait until the source of each entry may be read. Return the addresses of all sources and of all targets."""
    for entry in entries:
        if entry.source.wait is not None:
            entry.source.wait()
    return [entry.source.address for entry in entries], [entry.target.address for entry in entries]
