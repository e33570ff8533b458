"""Submits the operations of user threads to the tensor queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from ddlcore.reentry import reentrant
from ddlcore.runtime.request import IDLE, PENDING, Entry, PersistentRequest
from ddlcore.runtime.schedule import Replay
from ddlcore.runtime.tensor_queue import TensorQueue


class Submission:
    """Puts entries into the tensor queue. Any user thread may call the methods.

    A signal handler may raise an exception in the middle of a call, see TensorQueue: then the caller can see what was
    submitted, and the next thread that takes the lock finishes the work.
    """

    def __init__(self, tensor_queue: TensorQueue) -> None:
        self._tensor_queue = tensor_queue

    def submit(self, entries: Sequence[Entry], waits: bool = False) -> None:
        """Submit all entries or none of them.

        Raises InvalidArgument (a ValueError) if a name is already in flight, the job's error after the job has ended,
        and ReentrantCall if the calling thread is inside another call of ddl. If a signal handler raises an exception
        during this call, the caller gets that exception. ``Handle.submitted`` then says whether the entries were
        submitted.

        The entries of an unnamed call have the name ANONYMOUS without a number. They get a number here. ``waits`` says
        that the caller will wait for the operation next. That wait runs a ready bucket or wakes the engine, so this
        method does not wake the engine.
        """
        queue = self._tensor_queue
        queue.lock.refuse("an operation")
        if queue.events.on:
            queue.events.submitted(entries, False)
        try:
            with queue.lock:
                if queue.behind:
                    queue.catch_up()
                if queue.refusal is not None:
                    raise queue.refusal()
                ordinal = queue.unnamed.number(entries)
                queue.unfinished.require_free(entries)
                handle, set_id = entries[0].handle, entries[0].set_id
                # From here to the store of ``behind`` nothing calls a function, so a signal handler cannot raise in
                # between. Either all of these stores happen or none: a caller that is interrupted can trust
                # ``Handle.submitted``.
                if ordinal >= 0:
                    queue.unnamed.counts[set_id] = ordinal
                handle.submitted = True
                queue.placing = entries
                queue.behind = True
                queue.place_all(waits)
                wake = bool(queue.unsent) and not queue.unanswered and not queue.frozen
            if wake:
                queue.wake()
        except BaseException:
            queue.behind = True  # here, because a second interrupt may raise at the beginning of the next call
            self._interrupted()
            raise

    def name(self, entries: Sequence[Entry]) -> None:
        """Write the number of an unnamed call into the names of its entries. The caller submits these entries later."""
        queue = self._tensor_queue
        queue.lock.refuse("an operation")
        with queue.lock:
            ordinal = queue.unnamed.number(entries)
            if ordinal >= 0:
                queue.unnamed.counts[entries[0].set_id] = ordinal

    def start_request(self, entry: PersistentRequest, address: int, owner: object, waits: bool = False) -> None:
        """Start the persistent request ``entry`` on the tensor at ``address``, whose memory ``owner`` keeps alive.

        ``waits`` has the same meaning as in ``submit``, and the exceptions are the same. This method is called once per
        tensor and step. In replay it only fills the slot of the request.
        """
        self.start_all(((entry, address, owner),), waits)

    def start_all(self, started: Sequence[tuple[PersistentRequest, int, object]], waits: bool = True) -> None:
        """Start several persistent requests. Each item of ``started`` has the arguments of ``start_request``.

        If a request cannot be started, raise its error. The requests before it in ``started`` have then been started,
        and the requests after it have not. ``waits`` says that the caller will wait for the requests next. If a signal
        handler raises an exception, ``PersistentRequest.starts`` says which requests have been started.
        """
        queue = self._tensor_queue
        if queue.lock.held():
            raise reentrant("an operation")
        if queue.events.on:
            queue.events.submitted([one[0] for one in started], True)
        try:
            with queue.lock:
                if queue.behind:
                    queue.catch_up()
                refusal = self._start_each(started, waits)
                wake = queue.behind or (bool(queue.unsent) and not queue.unanswered and not queue.frozen)
            if wake:
                queue.wake()
        except BaseException:
            queue.behind = True  # here, because a second interrupt may raise at the beginning of the next call
            self._interrupted()
            raise
        if refusal is not None:
            raise refusal

    def _start_each(self, started: Sequence[tuple[PersistentRequest, int, object]], waits: bool) -> Exception | None:
        """Start the requests of ``started``, see ``start_all``. Return the error of the one that cannot be started.

        The caller holds the lock.
        """
        queue = self._tensor_queue
        replay = cast("Replay[Entry]", queue.open)  # if it is None, no entry has its slot there
        observed = queue.completion.observed
        for entry, address, owner in started:
            position = entry.position
            if entry.replay is not replay or entry.state != IDLE or position.entries[entry.slot] is not None:
                try:
                    self._start_anew(entry, address, owner, waits)
                except Exception as error:
                    return error  # the requests before it must still be sent
                replay = cast("Replay[Entry]", queue.open)  # ``_start_anew`` may have closed the replay
                continue
            # From here to the increment of ``starts`` nothing calls a function, so a signal handler cannot
            # raise in between. A request is started completely or not at all, and ``starts`` tells which.
            entry.stamp = observed
            entry.state = PENDING
            entry.error = None
            buffer = entry.source
            buffer.address = address
            buffer.owner = owner
            position.entries[entry.slot] = entry
            position.missing -= 1
            replay.filled += 1
            entry.starts += 1
            ready = position.missing == 0 and position is replay.current
            if ready and not waits:
                queue.work.notify()
            if queue.waits_since_s is None and (not ready or queue.launches):  # see ``_place``
                queue.waits_since_s = time.monotonic()
        return None

    def _start_anew(self, entry: PersistentRequest, address: int, owner: object, waits: bool) -> None:
        """Start a persistent request in the slow way, because its slot in the present replay is not known or not free.

        The request may also have no slot. Raises an error if the job has ended, or if the name is in flight.
        """
        queue = self._tensor_queue
        if queue.refusal is not None:
            raise queue.refusal()
        placing = (entry,)
        queue.unfinished.require_free(placing)
        queue.unfinished.requests[entry.set_id, entry.name] = entry
        entry.stamp = queue.completion.observed
        entry.state = PENDING
        entry.error = None
        entry.source.address = address
        entry.source.owner = owner
        entry.starts += 1
        queue.placing = placing
        queue.behind = True
        queue.place_all(waits)

    def _interrupted(self) -> None:
        """Wake the control thread, which finishes the work of a call that an exception has ended (see ``behind``)."""
        queue = self._tensor_queue
        if queue.refusal is None:  # otherwise this may be a forked child, which has no control thread
            queue.wake()
