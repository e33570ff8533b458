"""The framework contract: what a framework's package may use of a running job and of the operations that it starts.

The verbs (``ddlcore.api.Operations``) need no more than an Adapter. A package that reduces gradients while backward
runs, or that computes in the background, also starts operations itself, follows them, and keeps something beside the
job. This file lists what it may use for that. The objects have more attributes than these protocols, and they may
change without notice. An adapter writes no attribute of them: where it has to change something, there is a method.

Memory in these calls is an address and an *owner*: any object that keeps the memory alive while it is referred to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.device import Event
from ddlcore.types import Buffer, Device

__all__ = ["Companion", "JobService", "JobSettings", "PersistentRequest", "RequestStart", "TensorEntry"]


class PersistentRequest(Protocol):
    """One allreduce that is started again in each step, made by ``Operations.persistent_allreduce``.

    It is in flight from its start (``JobService.start_request`` or ``start_all``) until it has succeeded or failed.
    While it is in flight it must not be started again: the start raises InvalidArgument. One thread at a time uses a
    request. It belongs to the job for which it was made, and must not be started in another one.
    """

    @property
    def starts(self) -> int:
        """How often it was started.

        It changes at the moment of the start. So a caller that an exception of a signal handler has interrupted can
        tell from it whether the operation was started.
        """

    @property
    def pending(self) -> bool:
        """Whether it is in flight."""

    @property
    def source(self) -> Buffer:
        """The tensor that was described; its address and owner are those of the last start. Read it only."""

    @property
    def target(self) -> Buffer:
        """The memory for the result: ``source`` itself, unless the request was made with an ``output``. Read it only."""

    def set_target(self, address: int, owner: object) -> None:
        """Make the next starts write their result to the memory at ``address``, which ``owner`` keeps alive.

        The memory has the layout of the ``output`` with which the request was made. Only for a request that has one and
        that is not in flight. Without a call, the memory of the last start is used again.
        """

    def release_target(self) -> None:
        """Drop the owner of the result's memory, so that only the caller keeps it. Call it after the end of a start.

        Another start needs ``set_target`` first.
        """

    def mark_ready(self, event: int, stream: int, order: int) -> None:
        """Note the device event after which the tensor's values are complete. Call it before each start on a device.

        For the three numbers see Buffer.mark_ready. The owner that is given at the start must keep the event alive.
        """

    def poll(self) -> bool:
        """Return whether ``wait`` would return or raise immediately. Any thread may call it."""

    def wait(self) -> None:
        """Wait until the target holds the result. Any thread may call it, also after the end.

        On a device, the calling thread's current stream waits for the result, and the host does not. Returns at once
        for a request that was never started. Raises the error of the last start, until the next start: PeerLost,
        MismatchError, Closed or another DdlInternalError; see ``ddlcore.errors``. If a signal handler raises, that ends
        the wait but not the operation. Raises ReentrantCall in a handler that has interrupted what it would wait for.
        """

    def arrive(self) -> Event | None:
        """Wait as ``wait`` does, but let no stream wait: the caller orders its work after the returned event.

        Many requests often share one event, so the caller can wait for that alone (``wait`` of one of them). Returns
        None if the result is complete already, as it always is in host memory. Raises what ``wait`` raises.
        """

    def succeeded(self) -> bool:
        """Return whether ``wait`` would do nothing but return, so that it may be left out.

        False does not mean that it has failed: it may be in flight, or ``wait`` may have something to note.
        """


RequestStart = tuple[PersistentRequest, int, object]  # the request, the address of its tensor, and the tensor's owner


class TensorEntry(Protocol):
    """One tensor of an operation, as ``Operations.hand_over`` gets it, before it is submitted.

    ``set_id``: the process set. ``name``: with the verb in front; a call without a name gets one by
    ``JobService.name_entries`` or when it is submitted. ``source`` and ``target``: its memory; None for an operation
    that reads or writes none. An override of ``hand_over`` may change the memory by the two methods, until it submits.
    """

    set_id: int
    name: str

    @property
    def source(self) -> Buffer | None:
        """The memory that is read."""

    @property
    def target(self) -> Buffer | None:
        """The memory that is written: ``source`` itself if the operation works in place."""

    def move(self, source: Buffer, target: Buffer | None) -> None:
        """Use other memory of the same layout, such as copies in host memory. In place: pass one object twice."""

    def locate(self, address_of: Callable[[Any], int]) -> None:
        """Set each address to ``address_of(owner)``, for buffers that were described before their memory existed.

        Raises what ``address_of`` raises.
        """


class JobSettings(Protocol):
    """The settings of a job by name; `ddl run --help` lists them, and a plugin's own are among them.

    While a search runs, settings change from step to step, so read them when they are needed.
    """

    def text(self, name: str) -> str:
        """Return a value as text. Raises KeyError for an unknown name."""

    def number(self, name: str) -> float:
        """Return a number in the unit that the name ends with (``_s``: seconds). Raises KeyError for an unknown name."""

    def whole(self, name: str) -> int:
        """Return a whole number, such as a size in bytes. Raises KeyError for an unknown name."""


class JobService(Protocol):
    """One rank's part of a world. ``ddlcore.api.current_job()`` returns that of the calling thread.

    An adapter keeps the job for which it has made something: its own threads, and those of a framework, have no current
    job. Any thread may use a job, unless a method says otherwise. When ``closed`` is true, the job serves nothing any
    more, and after another ``init`` there is a new one.
    """

    @property
    def rank(self) -> int:
        """This process's number in the world, 0 to ``size`` - 1."""

    @property
    def size(self) -> int:
        """How many ranks the world has."""

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host."""

    @property
    def local_size(self) -> int:
        """How many ranks run on this host."""

    @property
    def closed(self) -> bool:
        """Whether this rank has left the world, or is leaving it."""

    @property
    def overlaps(self) -> bool:
        """Whether buckets in host memory are to run while the step still computes. A search may change it."""

    @property
    def settings(self) -> JobSettings:
        """The job's settings."""

    def members(self, set_id: int) -> tuple[int, ...] | None:
        """Return the ranks of a process set, in its order; None if no set of this job has that id."""

    def compressor(self, name: str) -> Compressor:
        """Return the job's compressor of that name. Raises InvalidArgument for a name that no plugin offers.

        If the name is that of the setting (see ``gradient_compression``), returns what this rank's setting names.
        """

    def next_ordinal(self, what: str) -> int:
        """Return how often this was called for ``what`` before: 0, 1, 2 and so on.

        Ranks that call in the same order get the same numbers, and can make names of them. Call it from one thread.
        """

    def device_label(self, device: Device, sparse: bool = False, stage_on_host: bool = False) -> str:
        """Return the name of ``device`` in messages between ranks, and open the device at the first call.

        Ranks that use several devices must name them in the same order. ``sparse``: for a sparse gradient.
        ``stage_on_host``: its tensors are to be staged in host memory. Raises PluginError if nothing serves that kind
        of device, and DeviceError if it cannot be opened.
        """

    def companion(self, kind: type[C]) -> C:
        """Return the job's companion of that class. The first call makes it.

        Raises ReentrantCall in a signal handler that has interrupted such a call.
        """

    def start_request(self, request: PersistentRequest, address: int, owner: object, waits: bool = False) -> None:
        """Start a persistent request on the tensor at ``address``, which ``owner`` keeps alive until the end.

        ``waits``: the caller is going to wait for it next, so no other thread needs to be woken up. The job replaces
        this function while a timeline is recorded; a caller that keeps it must fetch it anew in each step.

        Raises InvalidArgument (a ValueError) if the request, or another operation of its name, is in flight; the
        reason why the job has ended, or NotInitialized after ``shutdown``; and ReentrantCall in a signal handler or a
        finalizer that has interrupted another call. Then nothing was started.
        """

    def start_all(self, started: Sequence[RequestStart], waits: bool = True) -> None:
        """Start several persistent requests in this order, with one call; see ``start_request``.

        If one is refused, this raises its error; those before it have been started, and those after it have not. If a
        signal handler raises, ``PersistentRequest.starts`` tells which have been started.
        """

    def submit(self, entries: Sequence[Any], waits: bool = False) -> None:
        """Submit all entries of one call or none. ``entries``: those that ``Operations.hand_over`` was given.

        ``waits`` and errors: as for ``start_request``.
        """

    def name_entries(self, entries: Sequence[Any]) -> None:
        """Give a call without a name its number now, for an override of ``hand_over`` that submits it later.

        Such calls are paired by their order, so this must be called in the order of the program.
        """

    def check_stall(self, since_s: float) -> float:
        """Say that a thread has been waiting for an operation since ``since_s`` (``time.monotonic``).

        For a thread that waits without a call of ddl, such as inside a framework. Without it, nobody would report what
        the other ranks lack, nor leave a schedule that cannot go on. Returns in how many seconds to call it again.
        """

    def shutdown(self, reason: str = ..., settle: bool = ...) -> None:
        """Leave the world, and tell the others why: a call there that needs this rank raises PeerLost with ``reason``.

        For a rank that has begun a step and cannot finish it. What is unfinished on this rank raises Closed. Raises
        ReentrantCall, and changes nothing, in a signal handler or a finalizer that has interrupted another call.
        """


class Companion:
    """What a framework runs beside a job; there is one for each job and class, see ``JobService.companion``."""

    def __init__(self, job: JobService) -> None:
        self.job = job

    def settle(self) -> None:
        """Return when everything that the user's program has asked for is over, with or without errors.

        Called at a normal end, on the thread that ends the job.
        """

    def close(self) -> None:
        """End the companion's threads, because the job is over. May be called again."""


C = TypeVar("C", bound=Companion)
