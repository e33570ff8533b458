"""The framework contract: what a framework's package may use of a running job and of the operations that it starts.

The verbs (``ddlcore.api.Operations``) need only an Adapter. A package that reduces gradients while backward runs, or
that computes in the background, does more: it starts operations itself, waits for them, and keeps objects of its own
for each job. This file lists what it may use for that. The objects have more attributes than these protocols; those may
change without notice. An adapter sets no attribute of these objects: where it has to change a value, there is a method.

Memory in these calls is given as an address and an *owner*: any object that keeps the memory alive as long as there is
a reference to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.device import Event
from ddlcore.types import Buffer, Device

__all__ = ["Companion", "JobService", "JobSettings", "PersistentRequest", "RequestStart", "TensorEntry"]


class PersistentRequest(Protocol):
    """An allreduce that is started anew in each step. ``Operations.persistent_allreduce`` returns it.

    It is in flight from its start (``JobService.start_request`` or ``start_all``) until it has succeeded or failed.
    While it is in flight it must not be started again: the start would raise InvalidArgument. Only one thread at a time
    may use a request. It belongs to the job for which it was made, and must not be started in another job.
    """

    @property
    def starts(self) -> int:
        """How many times the request was started.

        A start increases it at the very moment from which the operation runs. So if a signal handler's exception
        interrupts a start, the caller can find out whether the operation was started.
        """

    @property
    def pending(self) -> bool:
        """Whether the request is in flight."""

    @property
    def source(self) -> Buffer:
        """The tensor's description, with the address and the owner from the last start. It must not be changed."""

    @property
    def target(self) -> Buffer:
        """The memory for the result: ``source`` itself, unless the request was made with an ``output``.

        It must not be changed.
        """

    def set_target(self, address: int, owner: object) -> None:
        """Set where later starts write their result: to the memory at ``address``, which ``owner`` keeps alive.

        The memory must have the layout of the ``output`` with which the request was made. The request must have been
        made with an ``output``, and must not be in flight. Until this is called again, all starts use this memory.
        """

    def release_target(self) -> None:
        """Drop the request's reference to the owner of the result's memory. Call it when the request is not in flight.

        Before another start, ``set_target`` must be called.
        """

    def mark_ready(self, event: int, stream: int, order: int) -> None:
        """Set the device event after which the tensor's values are complete.

        Call it each time before the request is started with a tensor on a device. For the three numbers see
        Buffer.mark_ready. The ``owner`` that is passed to ``start_request`` or ``start_all`` must keep the event alive.
        """

    def poll(self) -> bool:
        """Return whether ``wait`` would return or raise immediately. Any thread may call this."""

    def wait(self) -> None:
        """Wait until the target holds the result. Any thread may call this, also if the request is no longer in flight.

        On a device, the calling thread's current stream waits for the result, and the host does not. It returns at once
        if the request was never started. It raises the error of the last start (PeerLost, MismatchError, Closed or
        another DdlInternalError; see ``ddlcore.errors``), until the next start. If a signal handler raises an
        exception, that ends the wait but not the operation. Raises ReentrantCall in a signal handler if it has
        interrupted the work for which it would wait.
        """

    def arrive(self) -> Event | None:
        """Wait as ``wait`` does, but return a device event instead of making a stream wait for it.

        The caller must order its later work after this event. Many requests often share one event, so it is enough if
        the stream waits once for each event (``wait`` of one of the requests). Returns None if the result is already
        complete, as it always is in host memory. Raises what ``wait`` raises.
        """

    def succeeded(self) -> bool:
        """Return True if a call of ``wait`` has nothing to do, so that the caller may leave it out.

        False does not mean that the operation has failed: it may be in flight, or ``wait`` may still have something to
        record.
        """


RequestStart = tuple[PersistentRequest, int, object]  # the request, the address of its tensor, and the tensor's owner


class TensorEntry(Protocol):
    """One tensor of an operation that is not submitted yet. ``Operations.hand_over`` gets a list of them.

    ``set_id``: the process set. ``name``: the verb and the name; a call without a name gets one by
    ``JobService.name_entries`` or when it is submitted. ``source`` and ``target``: the tensor's memory; None if the
    operation does not read or write any. An override of ``hand_over`` may change the memory by ``move`` and ``locate``
    before it submits the entry.
    """

    set_id: int
    name: str

    @property
    def source(self) -> Buffer | None:
        """The memory that the operation reads."""

    @property
    def target(self) -> Buffer | None:
        """The memory that the operation writes: ``source`` itself if it works in place."""

    def move(self, source: Buffer, target: Buffer | None) -> None:
        """Make the operation use other memory of the same layout, such as copies in host memory.

        If the operation works in place, pass the same object as ``source`` and ``target``.
        """

    def locate(self, address_of: Callable[[Any], int]) -> None:
        """Set the address of each buffer to ``address_of(owner)``, where ``owner`` is that of the buffer.

        This is for buffers that were described before their memory existed. Raises what ``address_of`` raises.
        """


class JobSettings(Protocol):
    """The settings of a job by name, with those of plugins. ``ddl run --help-all`` lists them.

    While a search runs, settings may change from step to step, so read a setting each time you need it.
    """

    def text(self, name: str) -> str:
        """Return the value of setting ``name`` as text. Raises KeyError for an unknown name."""

    def number(self, name: str) -> float:
        """Return the value of setting ``name`` as a float. Raises KeyError for an unknown name.

        The name ends with the unit (``_s``: seconds).
        """

    def whole(self, name: str) -> int:
        """Return the value of setting ``name`` as an int, such as a size in bytes.

        Raises KeyError for an unknown name.
        """


class JobService(Protocol):
    """One rank's part of a world. ``ddlcore.api.current_job()`` returns the job of the calling thread.

    If an adapter makes an object for a job, it keeps a reference to that job: its own threads, and those of a
    framework, have no current job. Any thread may use a job, unless a method says otherwise. When ``closed`` is true,
    the job accepts no more operations; another ``init`` makes a new job.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the world, 0 to ``size`` - 1."""

    @property
    def size(self) -> int:
        """The number of ranks in the world."""

    @property
    def local_rank(self) -> int:
        """This process's rank among the ranks of its host."""

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""

    @property
    def closed(self) -> bool:
        """Whether this rank has left the world, or is leaving it."""

    @property
    def overlaps(self) -> bool:
        """Whether buckets in host memory should run while the step still computes. A search may change it."""

    @property
    def settings(self) -> JobSettings:
        """The job's settings."""

    def members(self, set_id: int) -> tuple[int, ...] | None:
        """Return the ranks of the process set ``set_id``, in its order; None if this job has no such set."""

    def compressor(self, name: str) -> Compressor:
        """Return the job's compressor of that name. Raises InvalidArgument for a name that no plugin offers.

        If ``name`` is the one that stands for the setting (see ``gradient_compression``), returns the compressor that
        the setting names on this rank.
        """

    def next_ordinal(self, what: str) -> int:
        """Return how many times this was called for ``what`` before: 0, then 1, 2 and so on.

        Ranks that make these calls in the same order get the same numbers, and can use them in names. Only one thread
        may call this.
        """

    def device_label(self, device: Device, sparse: bool = False, stage_on_host: bool = False) -> str:
        """Return the name of ``device`` in messages between ranks, and open the device at the first call.

        Ranks that use several devices must call this for them in the same order. ``sparse``: for a sparse gradient.
        ``stage_on_host``: stage the device's tensors in host memory. Raises PluginError if no plugin supports that kind
        of device, and DeviceError if it cannot be opened.
        """

    def companion(self, kind: type[C]) -> C:
        """Return the job's only object of class ``kind``. The first call creates it.

        Raises ReentrantCall in a signal handler that has interrupted such a call.
        """

    def start_request(self, request: PersistentRequest, address: int, owner: object, waits: bool = False) -> None:
        """Start a persistent request on the tensor at ``address``, which ``owner`` keeps alive.

        The job keeps a reference to ``owner`` until the operation has ended. ``waits``: the caller will wait for the
        request next, so the operation need not wake another thread.

        If this raises an error, nothing was started: InvalidArgument (a ValueError) if the request, or another
        operation of its name, is in flight; the job's error if the job has ended, or NotInitialized after ``shutdown``;
        ReentrantCall in a signal handler or a finalizer that has interrupted another call.
        """

    def start_all(self, started: Sequence[RequestStart], waits: bool = True) -> None:
        """Start several persistent requests in this order, with one call; see ``start_request``.

        If one of them cannot be started, this raises the error; those before it have been started, and those after it
        have not. If a signal handler raises an exception, ``PersistentRequest.starts`` says which have been started.
        """

    def submit(self, entries: Sequence[Any], waits: bool = False) -> None:
        """Submit all entries of one call, or none. ``entries``: those that ``Operations.hand_over`` got.

        ``waits`` and errors are those of ``start_request``.
        """

    def name_entries(self, entries: Sequence[Any]) -> None:
        """Give a call without a name its number now. An override of ``hand_over`` that submits later must call this.

        Calls without a name are paired by their order, so this must be called in the order of the program.
        """

    def check_stall(self, since_s: float) -> float:
        """Tell the job that the calling thread has waited for an operation since ``since_s`` (``time.monotonic``).

        A thread that waits outside ddl, such as inside a framework, must call this from time to time. Otherwise a stall
        would not be reported, and the ranks would not leave a schedule that cannot continue. Returns after how many
        seconds to call it again.
        """

    def shutdown(self, reason: str = ..., settle: bool = ...) -> None:
        """Leave the world; a call on another rank that needs this rank then raises PeerLost with ``reason``.

        An adapter calls this if its rank has begun a step and cannot finish it. Unfinished operations of this rank
        raise Closed. In a signal handler or a finalizer that has interrupted another call, this raises ReentrantCall
        and changes nothing.
        """


class Companion:
    """An object of a framework's package that lives as long as a job.

    ``JobService.companion`` creates and returns it.
    """

    def __init__(self, job: JobService) -> None:
        self.job = job

    def settle(self) -> None:
        """Wait until everything for which the user's program has asked has ended, with or without errors.

        This is called when the program ends normally, on the thread that ends the job.
        """

    def close(self) -> None:
        """End the companion's threads, because the job has ended. It may be called again."""


C = TypeVar("C", bound=Companion)
