"""Sends the tensors of one reduction in several parts, without blocking, and returns the results.

The tensors are eager tensors, or NumPy arrays: inside a graph, TensorFlow passes its tensors as arrays, without a copy.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from ddl_tf.adapter import TfAdapter, brought
from ddlcore.api import Operations, current_job, wait_for_all
from ddlcore.contracts import JobService, PersistentRequest, RequestStart
from ddlcore.errors import DdlInternalError, NotInitialized

TOKEN = np.int32(0)
P = ParamSpec("P")
R = TypeVar("R")

_given_up: weakref.WeakKeyDictionary[JobService, str] = weakref.WeakKeyDictionary()  # the reasons; see ``_explained``


def give_up(job: JobService) -> NoReturn:
    """End the job, because this rank has begun a step and cannot finish it. Raises DdlInternalError.

    Other ranks may have received the gradients that this rank has sent in that step. If this rank continued, its
    variables would differ from those of the other ranks. The other ranks, which wait or will wait for this rank, raise
    PeerLost with the same text.
    """
    text = (
        f"a step of rank {job.rank} was interrupted, or begun again, after it had sent gradients off and before it "
        "came to its end: by a signal's handler, by another operation's error, or by a loop that runs several steps "
        "at once (give it parallel_iterations=1); call init() again on all ranks, and load a checkpoint"
    )
    _given_up[job] = text  # before ``shutdown``, during which other threads already find the job closed
    job.shutdown(text)
    raise DdlInternalError(text)


def _explained(function: Callable[Concatenate[Exchange, P], R]) -> Callable[Concatenate[Exchange, P], R]:
    """Wrap ``function`` so that its error says why this rank has ended a job, not only that the job is closed.

    Several threads send the parts of one run. When one thread calls ``give_up``, the other threads find a closed job,
    and may raise their error earlier than the first thread. TensorFlow shows only the first error of a run. Without
    this wrapper that error would say only that init() must be called.
    """

    @wraps(function)
    def called(exchange: Exchange, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(exchange, *args, **kwargs)
        except (DdlInternalError, NotInitialized) as error:
            reason = _given_up.get(exchange.job) if exchange.job.closed else None
            if reason is None or str(error) == reason:
                raise
            raise DdlInternalError(reason) from error

    return called


class Pools(dict[int, list[Any]]):
    """The arrays for the results of one exchange, by tensor number. An array that nothing else refers to is reused."""


class Exchange:
    """A set of tensors that are reduced in each step under the same names.

    The first ``count`` tensors are reduced by allreduce, and all further tensors are sent by allgather. Any thread may
    call ``send``, ``gather`` and ``take``, but only one run of a step may use an exchange at a time.
    """

    def __init__(
        self,
        operations: Operations,
        job: JobService,
        name: str,
        count: int,
        kinds: Mapping[str, Any],
        part_of: str,
        pools: Pools | None,
    ) -> None:
        """Prepare the reduction of ``count`` tensors by allreduce. The names of the tensors begin with ``name``.

        * ``kinds``: the options of the reduction, such as ``op`` and ``process_set``.
        * ``part_of``: a text that describes all tensors of the step; it must be the same on all ranks.
        * ``pools``: the memory for results that are arrays. The memory is reused as long as the caller keeps ``pools``.
          The results of other tensors, and all results without ``pools``, get new memory each time.
        """
        self.job = job
        self._operations = operations
        self._name = name
        self._kinds = dict(kinds)
        self._part_of = part_of
        self._entries: list[Any] = [None] * count  # persistent allreduce requests
        self._outputs: list[Any] = [None] * count
        self._pools = (lambda: None) if pools is None else weakref.ref(pools)
        self._handles: dict[int, Any] = {}  # of the allgathers
        self._begun: set[int] = set()  # the first numbers of the parts sent since the last completed ``take``
        self._failure: DdlInternalError | None = None  # the first error of the operations in flight
        self._unsure = False  # whether an exception has left the run in an unknown state
        self.check: Callable[[JobService], None] | None = None  # called before results, which change variables

    # --- sending

    @_explained
    def send(self, first: int, *tensors: Any) -> Any:
        """Start the allreduce of ``tensors``, without blocking. Their numbers are ``first``, ``first + 1`` and so on.

        The exchange keeps the tensors alive until they are no longer needed. Returns a constant that an operation in a
        graph can have as its output. Raises DdlInternalError if the job has ended, or if the previous run has not
        finished.
        """
        self._bind()
        if tensors:  # when the GPU has finished the first tensor's work, it has finished that of the others
            cast("TfAdapter", self._operations.adapter).settle(tensors[0])
        started = [self._made_ready(number, tensor) for number, tensor in enumerate(tensors, first)]
        self._begin(first)
        try:
            self.job.start_all(started, waits=False)  # another thread waits, perhaps much later
        except DdlInternalError:  # the job is over
            self._over()
            raise
        return TOKEN

    @_explained
    def lift(self, first: int, *tensors: Any) -> None:
        """Do the same as ``send`` (start the allreduce of ``tensors``) for eager tensors on a GPU.

        If the transports of the current job do not reach that GPU, this method sends copies of the tensors in host
        memory.
        """
        self._bind()
        self.send(first, *brought(cast("TfAdapter", self._operations.adapter), self.job, tensors))

    @_explained
    def gather(self, first: int, *tensors: Any) -> Any:
        """Start the allgather of ``tensors``, without blocking. Their numbers are ``first``, ``first + 1`` and so on.

        The result for each tensor has the rows of all members. Returns the same constant as ``send``.
        """
        self._bind()
        if tensors:
            self._begin(first)
        for number, tensor in enumerate(tensors, first):
            self._handles[number] = self._operations.allgather_async(
                tensor, name=f"{self._name}.{number}", process_set=self._kinds["process_set"], job=self.job
            )
        return TOKEN

    @property
    def begun(self) -> bool:
        """Whether tensors have been sent whose results have not been taken by ``take``."""
        return bool(self._begun)

    def _begin(self, first: int) -> None:
        """Record that a part of the tensors is sent now. The part begins with the tensor number ``first``.

        If that part was sent already, the previous run has not finished. Then this method ends the job.
        """
        if first in self._begun:
            give_up(self.job)
        self._begun.add(first)

    def _bind(self) -> None:
        """Change to the current job if the job of this exchange has ended.

        A graph may outlive the job in which it was built.
        """
        if self.job.closed:
            self.job = current_job()
            self._entries = [None] * len(self._entries)
            self._over()

    def _over(self) -> None:
        """Forget the run that has ended. None of its operations is in flight any more."""
        # A signal's handler may raise between any two of these lines. Then the flag stays set, and the next ``take``
        # gives the job up, because it could not tell which results belong to which run.
        self._unsure = True
        self._handles, self._outputs, self._failure = {}, [None] * len(self._entries), None
        self._begun.clear()
        self._unsure = False

    def _made_ready(self, number: int, tensor: Any) -> RequestStart:
        """Return the arguments of ``start_all`` for one tensor: its request, its address, and the owner of its memory.

        ``number`` is the number of ``tensor`` in this exchange. This method also sets the memory for the result.
        """
        entry = self._entries[number]
        address = None
        if entry is not None:
            if entry.pending:  # its tensor and result still belong to the previous run
                give_up(self.job)
            address = self._operations.adapter.address(tensor, entry.source)
        output = self._output(number, tensor)
        if address is None:
            entry = self._describe(number, tensor, output)
            address = entry.source.address
        else:
            # The request must hold the array while the engine may write to it. ``take`` clears this reference: if it
            # stayed, ``_output`` could never reuse the array.
            entry.set_target(self._address(output, entry), output)
        self._outputs[number] = output
        return entry, address, tensor

    def _describe(self, number: int, tensor: Any, output: Any) -> PersistentRequest:
        entry = self._operations.persistent_allreduce(
            tensor,
            name=f"{self._name}.{number}",
            job=self.job,
            output=output,
            part_of=self._part_of if number == 0 else "",
            **self._kinds,
        )
        self._entries[number] = entry
        return entry

    def _address(self, output: Any, entry: PersistentRequest) -> int:
        address = self._operations.adapter.address(output, entry.target)
        assert address is not None
        return address

    def _output(self, number: int, tensor: Any) -> Any:
        """Return memory for the result of ``tensor``, which has the number ``number`` in this exchange.

        The memory is a new array, or a pooled array to which nothing else refers any more. TensorFlow refers to an
        array as long as a tensor uses the array's memory, so a result that a user keeps is never overwritten.
        """
        pools = self._pools()
        if pools is None or not isinstance(tensor, np.ndarray):
            return self._operations.adapter.allocate(tensor)
        pool = pools.setdefault(number, [])
        # An array that nobody else uses has two references: the pool's, and the argument of getrefcount. A loop
        # variable would be a third one, hence the loop over indices. No other thread uses this pool: each number
        # has a pool of its own, and is sent by one operation.
        for i in range(len(pool)):
            if sys.getrefcount(pool[i]) == 2 and pool[i].shape == tensor.shape and pool[i].dtype == tensor.dtype:
                return pool[i]
        pool[:] = [array for array in pool if array.shape == tensor.shape and array.dtype == tensor.dtype]
        pool.append(self._operations.adapter.allocate(tensor))
        return pool[-1]

    # --- receiving

    @_explained
    def take(self) -> list[Any]:
        """Wait for all operations and return the results: first the reduced tensors by number, then the gathered ones.

        During the wait, this thread runs buckets that are ready. If operations failed, this method waits until all
        operations have ended, and then raises the first error. If a signal handler's exception interrupts this method,
        the caller may call it again.
        """
        if self._unsure:
            give_up(self.job)
        for entry in self._entries:
            try:
                entry.wait()
            except DdlInternalError as error:
                self._failure = self._failure or error
                if entry is self._entries[0] and self._part_of:  # ranks disagree: the other requests may never complete
                    self._entries = [None] * len(self._entries)
                    break
            except BaseException:
                # A signal's handler has raised, KeyboardInterrupt for example. If the request is still pending, the
                # next ``take`` waits for it again. If it is not, the outcome of the wait was lost with this exception,
                # and it may have been an error. So the next ``take`` must give the job up.
                self._unsure = not entry.pending
                raise
            entry.release_target()
        gathered: list[Any] = []
        failure: Exception | None = self._failure
        if failure is None:
            gathered, failure = wait_for_all(self._handles[number] for number in sorted(self._handles))
        results = [*self._outputs, *gathered]
        if self.check is not None and failure is None:
            self.check(self.job)
        self._over()
        if failure is not None:
            raise failure
        return results
