"""The tensors of one reduction on their way: sent off group by group, never blocking, and taken home.

It sees numpy arrays (what TensorFlow shows of its tensors inside a graph, without a copy) or eager tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from ddl_tf.adapter import TfAdapter, brought
from ddlcore.api import Job, Operations, current_job
from ddlcore.contracts.transport import Memory
from ddlcore.errors import DdlInternalError, NotInitialized

__all__ = ["Exchange", "Pools", "give_up"]

TOKEN = np.int32(0)
P = ParamSpec("P")
R = TypeVar("R")

_given_up: weakref.WeakKeyDictionary[Job, str] = weakref.WeakKeyDictionary()  # why; see ``_explained``


def give_up(job: Job) -> NoReturn:
    """Ends the job: the peers may have what this rank has sent in a step that it did not finish.

    To go on would leave this rank with other values than theirs. Raises DdlInternalError; the peers, which wait or
    will wait for this rank, raise PeerLost with the same text.
    """
    text = (
        f"a step of rank {job.rank} was interrupted, or begun again, after it had sent gradients off and before it "
        "came to its end: by a signal's handler, by another operation's error, or by a loop that runs several steps "
        "at once (give it parallel_iterations=1); call init() again on all ranks, and load a checkpoint"
    )
    _given_up[job] = text  # first: other threads see the job closed while ``shutdown`` is still under way
    job.shutdown(text)
    raise DdlInternalError(text)


def _explained(function: Callable[Concatenate[Exchange, P], R]) -> Callable[Concatenate[Exchange, P], R]:
    """Wrap ``function`` so that it raises the reason why this rank has given up a job, not only that the job is closed.

    The parts of one run go off on several threads. Where one gives up, the others find a closed job, and may be done
    before it; TensorFlow shows the first error of a run, which would say no more than that init() is to be called.
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
    """Memory for the results of one exchange, by number."""


class Exchange:
    """``count`` tensors that are allreduced, and some that are gathered, once a step under the same names.

    ``send``, ``gather`` and ``take`` may be called by any thread, one run of a step at a time.
    """

    def __init__(
        self,
        operations: Operations,
        job: Job,
        name: str,
        count: int,
        kinds: Mapping[str, Any],
        part_of: str,
        pools: Pools | None,
    ) -> None:
        """``part_of``: what the ranks must agree upon. ``pools``: those of arrays, whose memory comes again for as
        long as the caller holds them; the outputs of other tensors, and without pools of all, are new each time."""
        self.job = job
        self._operations = operations
        self._name = name
        self._kinds = dict(kinds)
        self._part_of = part_of
        self._entries: list[Any] = [None] * count  # persistent allreduce
        self._outputs: list[Any] = [None] * count
        self._pools = (lambda: None) if pools is None else weakref.ref(pools)
        self._handles: dict[int, Any] = {}  # of what is gathered
        self._begun: set[int] = set()  # what has been sent off since the last ``take`` came to its end, by first number
        self._failure: DdlInternalError | None = None  # of one of these
        self._unsure = False  # whether an exception has struck where nobody can say what had been done
        self.check: Callable[[Job], None] | None = None  # looks at what the results are to change, before they do

    # --- off

    @_explained
    def send(self, first: int, *tensors: Any) -> Any:
        """Sends off the tensors with the numbers ``first`` and up; they are kept until they are no longer needed."""
        self._bind()
        if tensors:  # the others are there, too, when the first is
            cast("TfAdapter", self._operations.adapter).settle(tensors[0])
        started = [self._made_ready(number, tensor) for number, tensor in enumerate(tensors, first)]
        self._begin(first)
        try:
            self.job.start_all(started, waits=False)  # who waits is another thread, and may come late
        except DdlInternalError:  # the job is over
            self._over()
            raise
        return TOKEN

    @_explained
    def lift(self, first: int, *tensors: Any) -> None:
        """As ``send``, of eager tensors on a GPU; where the present job does not reach that, their copies on the host."""
        self._bind()
        self.send(first, *brought(cast("TfAdapter", self._operations.adapter), self.job, tensors))

    @_explained
    def gather(self, first: int, *tensors: Any) -> Any:
        """The same for tensors whose rows are gathered from all members."""
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
        """Whether something has been sent off that has not been taken."""
        return bool(self._begun)

    def _begin(self, first: int) -> None:
        """Notes that this part goes off now; if it has already, the run before this one has not come to its end."""
        if first in self._begun:
            give_up(self.job)
        self._begun.add(first)

    def _bind(self) -> None:
        """A graph may outlive the job that it was built in: then it goes over to the present one."""
        if self.job.closed:
            self.job = current_job()
            self._entries = [None] * len(self._entries)
            self._over()

    def _over(self) -> None:
        """Nothing is under way."""
        self._unsure = True  # if an exception strikes in here
        self._handles, self._outputs, self._failure = {}, [None] * len(self._entries), None
        self._begun.clear()
        self._unsure = False

    def _made_ready(self, number: int, tensor: Any) -> tuple[Any, int, Any]:
        """What starts it: its entry, where it lies, and what keeps it there."""
        entry = self._entries[number]
        address = None
        if entry is not None:
            if entry.pending:  # its tensor and its result are those of a run that is not over
                give_up(self.job)
            address = self._operations.adapter.address(tensor, entry.source)
        output = self._output(number, tensor)
        if address is None:
            entry = self._describe(number, tensor, output)
            address = entry.source.address
        else:
            entry.target.address = self._address(output, entry)
        entry.target.owner = output  # kept as long as somebody may write it, and by nobody behind ``take``
        self._outputs[number] = output
        return entry, address, tensor

    def _describe(self, number: int, tensor: Any, output: Any) -> Any:
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

    def _address(self, output: Any, entry: Any) -> int:
        address = self._operations.adapter.address(output, entry.target)
        assert address is not None
        return address

    def _output(self, number: int, tensor: Any) -> Any:
        """Memory for the result: new, or what nobody refers to any more.

        TensorFlow refers to an array as long as a tensor lies in it, so what a user keeps is never written again.
        """
        pools = self._pools()
        if pools is None or not isinstance(tensor, np.ndarray):
            return self._operations.adapter.allocate(tensor)
        pool = pools.setdefault(number, [])
        for i in range(len(pool)):
            if sys.getrefcount(pool[i]) == 2 and pool[i].shape == tensor.shape and pool[i].dtype == tensor.dtype:
                return pool[i]
        pool[:] = [array for array in pool if array.shape == tensor.shape and array.dtype == tensor.dtype]
        adapter = self._operations.adapter
        dtype = adapter.buffer(tensor, elementwise=True).dtype
        # TensorFlow takes memory over without a copy where it begins on 64 bytes, as ours does.
        pool.append(adapter.adopt(Memory(max(tensor.nbytes, 1)), tensor.shape, dtype, tensor))
        return pool[-1]

    # --- home

    @_explained
    def take(self) -> list[Any]:
        """Waits, and returns the results by number. Raises the error of the first that has one, when all are over.

        What is ready is run by this thread meanwhile. Interrupted, it may be called again.
        """
        if self._unsure:
            give_up(self.job)
        for entry in self._entries:
            try:
                entry.wait()
            except DdlInternalError as error:
                self._failure = self._failure or error
                if entry is self._entries[0] and self._part_of:  # the ranks disagree: the others may never come
                    self._entries = [None] * len(self._entries)
                    break
            except BaseException:  # of a signal's handler, for one: who calls again, waits on
                self._unsure = not entry.pending
                raise
            entry.target.owner = None
        gathered = []
        for number in sorted(self._handles) if self._failure is None else ():
            try:
                gathered.append(self._handles[number].wait())
            except DdlInternalError as error:
                self._failure = self._failure or error
        results, failure = [*self._outputs, *gathered], self._failure
        if self.check is not None and failure is None:
            self.check(self.job)
        self._over()
        if failure is not None:
            raise failure
        return results
