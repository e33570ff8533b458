"""The framework contract: those methods of a job and of its operations that a framework's package may use.

The collectives (``ddlcore.api.Operations``) need only an Adapter. Some packages do more, for example packages that
reduce gradients during the backward pass or that compute in the background. Such a package starts operations itself,
waits for them, and keeps its own objects for each job. This file lists the attributes and methods that a package may
use for that. The objects have more attributes than these protocols list, but the other attributes may change without
notice. A package must not set any attribute of these objects. To change a value, it must call a method.

Memory in these calls is given as an address and an *owner*. The owner is any object that keeps the memory alive as long
as there is a reference to the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.device import Event
from ddlcore.types import Buffer, Device

__all__ = ["Companion", "JobService", "JobSettings", "PersistentRequest", "RequestStart", "TensorEntry"]


class PersistentRequest(Protocol):
    """An allreduce that is started anew in each step. ``Operations.persistent_allreduce`` creates a persistent request.

    A request is in flight from its start (``JobService.start_request`` or ``start_all``) until it has succeeded or
    failed. A request that is in flight must not be started again: the start would raise InvalidArgument. Only one
    thread at a time may use a request, except for ``poll`` and ``wait``. A request belongs to the job for which it was
    created, and must not be started in another job.
    """

    @property
    def starts(self) -> int:
        """How many times the request was started.

        The count increases exactly when the operation begins to run. So if an exception of a signal handler interrupts
        a start, the caller can compare two counts to find out whether the operation was started.
        """

    @property
    def pending(self) -> bool:
        """Whether the request is in flight."""

    @property
    def source(self) -> Buffer:
        """The description of the tensor, with the address and the owner from the last start.

        Do not change this Buffer.
        """

    @property
    def target(self) -> Buffer:
        """The memory for the result. It is ``source`` itself, unless the request was created with an ``output``.

        Do not change this Buffer.
        """

    def set_target(self, address: int, owner: object) -> None:
        """Set the memory to which later starts write their results, until the next call of this method.

        ``address``: the address of the memory. ``owner``: the object that keeps the memory alive. The request must have
        been created with an ``output``, and must not be in flight. The memory must have the same layout as that
        ``output``.
        """

    def release_target(self) -> None:
        """Drop the request's reference to the owner of the result's memory.

        The request must not be in flight. ``set_target`` must be called before the next start.
        """

    def mark_ready(self, event: int, stream: int, order: int) -> None:
        """Set the device event after which the tensor's values are complete.

        If the tensor is on a device, call this before each start of the request. For the three arguments see
        Buffer.mark_ready. The ``owner`` that is passed to ``start_request`` or ``start_all`` must keep the event alive.
        """

    def poll(self) -> bool:
        """Return whether ``wait`` would return or raise an error immediately. Any thread may call this."""

    def wait(self) -> None:
        """Wait until the target contains the result. Any thread may call this, even if the request is not in flight.

        If the tensor is on a device, the calling thread's current device stream waits for the result, and the host does
        not. ``wait`` returns at once if the request was never started. If the last start has failed, every call of
        ``wait`` until the next start raises the error: PeerLost, MismatchError, Closed or another DdlInternalError; see
        ``ddlcore.errors``. If a signal handler raises an exception, the exception ends the wait but not the operation.
        Raises ReentrantCall in a signal handler that has interrupted the very work that ``wait`` would wait for.
        """

    def arrive(self) -> Event | None:
        """Wait until the operation's work is queued on the device, and return the device event of the result.

        Unlike ``wait``, this method does not make the current device stream wait for the event. The caller must order
        its later work after the event. Many requests often share one event; then it is enough that the stream waits
        once for this event, by a call of ``wait`` of one of these requests. Return None if the result is complete, as
        it always is in host memory. Raises the same errors as ``wait``.
        """

    def succeeded(self) -> bool:
        """Return True if the operation has succeeded and the caller need not call ``wait``.

        False does not mean that the operation has failed. The operation may still be in flight, or ``wait`` may still
        have to record that the operation has succeeded.
        """


RequestStart = tuple[PersistentRequest, int, object]  # the request, the address of its tensor, and the tensor's owner


class TensorEntry(Protocol):
    """One tensor of an operation that is not submitted yet. ``Operations.hand_over`` gets a list of such entries.

    ``set_id``: the id of the process set. ``name``: the kind of operation and the user's name, such as
    "allreduce.loss". If the call has no name, the entry gets one from ``JobService.name_entries``, or when it is
    submitted. ``source``: the memory that the operation reads; None if it reads none. ``target``: the memory that the
    operation writes; None if it writes none. An override of ``hand_over`` may change this memory by ``move`` and
    ``locate`` before it submits the entry.
    """

    set_id: int
    name: str

    @property
    def source(self) -> Buffer | None:
        """The memory that the operation reads; None if it reads none."""

    @property
    def target(self) -> Buffer | None:
        """The memory that the operation writes: ``source`` itself if it works in place; None if it writes none."""

    def move(self, source: Buffer, target: Buffer | None) -> None:
        """Make the operation use other memory of the same layout, such as copies of the tensors in host memory.

        If the operation works in place, pass the same Buffer as ``source`` and ``target``.
        """

    def locate(self, address_of: Callable[[Any], int]) -> None:
        """Set the address of each buffer of this entry to ``address_of(buffer.owner)``.

        This is for buffers that were described before their memory existed. Raises the same errors as ``address_of``.
        """


class JobSettings(Protocol):
    """The settings of a job by name, including the settings of plugins. ``ddl run --help-all`` lists them.

    While a search for better settings runs, settings may change from step to step. So read a setting each time you need
    it.
    """

    def text(self, name: str) -> str:
        """Return the value of the setting ``name`` as text. Raises KeyError for an unknown name."""

    def number(self, name: str) -> float:
        """Return the value of the setting ``name`` as a float. Raises KeyError for an unknown name.

        The name of a setting ends with the unit of its value, such as ``_s`` for seconds.
        """

    def whole(self, name: str) -> int:
        """Return the value of the setting ``name`` as an int, such as a size in bytes.

        Raises KeyError for an unknown name.
        """


class JobService(Protocol):
    """The job: one rank's part of a world. ``ddlcore.api.current_job()`` returns the job of the calling thread.

    An object that a framework's package creates for a job must keep a reference to that job, because the threads of the
    package and of the framework have no current job. Any thread may use a job, unless the docstring of a method says
    otherwise. When ``closed`` is true, the job accepts no more operations. Another call of ``init`` creates a new job.
    """

    @property
    def rank(self) -> int:
        """The rank of this process in the world, from 0 to ``size`` - 1."""

    @property
    def size(self) -> int:
        """The number of ranks in the world."""

    @property
    def local_rank(self) -> int:
        """The number of this process among the ranks of its host, from 0."""

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""

    @property
    def closed(self) -> bool:
        """Whether this rank has left the world or is leaving the world."""

    @property
    def overlaps(self) -> bool:
        """Whether buckets in host memory should run while the step still computes.

        A search for better settings may change this property during the job.
        """

    @property
    def settings(self) -> JobSettings:
        """The settings of this job."""

    def members(self, set_id: int) -> tuple[int, ...] | None:
        """Return the ranks of the process set ``set_id`` in rising order, or None if this job has no such set."""

    def compressor(self, name: str) -> Compressor:
        """Return the job's compressor called ``name``. Raises InvalidArgument for a name that no plugin offers.

        If ``name`` is "setting" (see ``gradient_compression``), return the compressor that the setting ``compression``
        names on this rank.
        """

    def next_ordinal(self, what: str) -> int:
        """Return how many earlier calls had the same argument ``what``: 0 at the first call, then 1, 2 and so on.

        Ranks that make these calls in the same order get the same numbers, and can use the numbers in names. Only one
        thread may call this.
        """

    def device_label(self, device: Device, sparse: bool = False, stage_on_host: bool = False) -> str:
        """Return the name of ``device`` in messages between ranks. The first call for a device opens the device.

        If ranks use several devices, all ranks must make these calls in the same order. ``sparse``: the name is for
        tensors of a sparse gradient. ``stage_on_host``: the device's tensors are staged in host memory. Raises
        PluginError if no plugin supports that kind of device, and DeviceError if the device cannot be opened.
        """

    def companion(self, kind: type[C]) -> C:
        """Return the job's companion of class ``kind``; see the class Companion. The first call creates the companion.

        A job has only one companion of each class. Raises ReentrantCall in a signal handler that has interrupted
        another call of this method.
        """

    def start_request(self, request: PersistentRequest, address: int, owner: object, waits: bool = False) -> None:
        """Start a persistent request on the tensor at ``address``. ``owner`` is an object that keeps the tensor alive.

        The job keeps a reference to ``owner`` until the operation has ended. ``waits``: the caller will wait for the
        request next, so the call need not wake another thread to run the operation.

        If this raises an error, nothing was started. Raises InvalidArgument (a ValueError) if the request, or another
        operation with the same name, is in flight. Raises the job's error if the job has failed, and NotInitialized
        after ``shutdown``. Raises ReentrantCall in a signal handler or a finalizer that has interrupted another call of
        ddl.
        """

    def start_all(self, started: Sequence[RequestStart], waits: bool = True) -> None:
        """Start several persistent requests with one call, in the order of ``started``; see ``start_request``.

        If a request cannot be started, this raises the error. Then the requests before that request have been started,
        and the requests after it have not. If a signal handler raises an exception during the call,
        ``PersistentRequest.starts`` shows which requests have been started.
        """

    def submit(self, entries: Sequence[Any], waits: bool = False) -> None:
        """Submit all entries of one call or, if an error is raised, none of them.

        ``entries``: the entries that were passed to ``Operations.hand_over``. ``waits`` has the same meaning, and the
        errors are the same, as for ``start_request``.
        """

    def name_entries(self, entries: Sequence[Any]) -> None:
        """Give a number to a call without a name now, instead of when it is submitted.

        ``entries``: the entries of one call. An override of ``Operations.hand_over`` that submits entries later must
        call this at once. Calls without a name are paired by these numbers, so all ranks must make the calls in the
        same order.
        """

    def check_stall(self, since_s: float) -> float:
        """Tell the job that the calling thread is waiting for an operation outside ddl, such as inside a framework.

        ``since_s``: the time of ``time.monotonic()`` at which the wait began. Such a thread must call this from time to
        time: return the longest time, in seconds, until the next call. Without these calls, a stall would not be
        reported, and the ranks would not leave a schedule that cannot continue.
        """

    def shutdown(self, reason: str = ..., settle: bool = ...) -> None:
        """Leave the world. ``reason``: why this rank leaves, a text for the other ranks.

        If another rank later makes a call that needs this rank, that call raises PeerLost with ``reason``. A
        framework's package calls this if its rank has begun a step and cannot finish the step. Unfinished operations of
        this rank raise Closed. ``settle``: true if the user's program has ended. Then the call first waits until the
        companions' work is complete and the parameters have been compared. In a signal handler or a finalizer that has
        interrupted another call of ddl, this raises ReentrantCall and changes nothing.
        """


class Companion:
    """An object of a framework's package that exists as long as a job, such as one that makes calls in the background.

    A job has at most one companion of each subclass. ``JobService.companion`` creates and returns the companion.
    """

    def __init__(self, job: JobService) -> None:
        self.job = job

    def settle(self) -> None:
        """Wait until all work that the user's program has requested has ended, with or without errors.

        The thread that ends the job calls this when the user's program ends normally.
        """

    def close(self) -> None:
        """End the companion's threads, because the job has ended. A second call has no effect."""


C = TypeVar("C", bound=Companion)
