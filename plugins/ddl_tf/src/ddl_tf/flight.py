"""The tensors of one reduction on their way: sent off group by group, never blocking; waited for in slices; taken home.

It sees numpy arrays (what TensorFlow shows of its tensors inside a graph, without a copy) or eager tensors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddlcore.api import Job, Operations
from ddlcore.contracts.transport import Memory

__all__ = ["Flight"]

SLICE_S = 0.01  # how long one of TensorFlow's threads is held at a time
STRAY_S = 60.0  # how long a step waits for what one before it, which failed in the midst, left under way
TOKEN = np.int32(0)


class Flight:
    """``count`` tensors that are allreduced, and some that are gathered, once a step under the same names.

    ``send``, ``settle`` and ``take`` may be called by any thread, one run of a step at a time.
    """

    def __init__(
        self,
        operations: Operations,
        job: Job,
        name: str,
        count: int,
        kinds: Mapping[str, Any],
        part_of: str,
        reuse: bool,
    ) -> None:
        """``part_of``: what the ranks must agree upon. ``reuse``: outputs are arrays, whose memory comes again."""
        self.job = job
        self._operations = operations
        self._name = name
        self._kinds = dict(kinds)
        self._part_of = part_of
        self._entries: list[Any] = [None] * count  # recurring allreduces
        self._outputs: list[Any] = [None] * count
        self._pools: list[list[Any]] | None = [[] for _ in range(count)] if reuse else None
        self._handles: dict[int, Any] = {}  # of what is gathered
        self._since_s = 0.0

    # --- off

    def send(self, first: int, *tensors: Any) -> Any:
        """Sends off the tensors with the numbers ``first`` and up; they are kept until they are no longer needed."""
        for number, tensor in enumerate(tensors, first):
            self._send(number, tensor)
        self._since_s = time.monotonic()
        return TOKEN

    def gather(self, first: int, *tensors: Any) -> Any:
        """The same for tensors whose rows are gathered from all members."""
        for number, tensor in enumerate(tensors, first):
            self._handles[number] = self._operations.allgather_async(
                tensor, name=f"{self._name}.{number}", process_set=self._kinds["process_set"], job=self.job
            )
        self._since_s = time.monotonic()
        return TOKEN

    def _send(self, number: int, tensor: Any) -> None:
        entry = self._entries[number]
        address = None
        if entry is not None:
            if entry.pending:
                self._end_stray(entry)
            address = self._operations.adapter.address(tensor, entry.source)
        output = self._output(number, tensor)
        if address is None:
            entry = self._describe(number, tensor, output)
            address = entry.source.address
        else:
            entry.target.address = self._address(output, entry)
        self._outputs[number] = output
        self.job.again(entry, address, tensor)

    def _describe(self, number: int, tensor: Any, output: Any) -> Any:
        entry = self._operations.recurring_allreduce(
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

    def _end_stray(self, entry: Any) -> None:
        """A run before this one went wrong after it had sent something off: the others' results are due."""
        since_s = time.monotonic()
        if not entry.settle(STRAY_S, since_s):
            raise ValueError(
                f"{entry.name!r} is still under way from an earlier run of this step; "
                "run one step at a time, and the same steps on every rank"
            )

    def _output(self, number: int, tensor: Any) -> Any:
        """Memory for the result: new, or what nobody refers to any more.

        TensorFlow refers to an array as long as a tensor lies in it, so what a user keeps is never written again.
        """
        if self._pools is None:
            return self._operations.adapter.allocate(tensor)
        pool = self._pools[number]
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

    def settle(self) -> Any:
        """Whether all that was sent is over, after a while at most. What is ready is run by this thread meanwhile."""
        since_s = self._since_s
        if self._part_of and self._entries[0].error is not None:  # the ranks disagree: the others may never come
            return np.True_
        for entry in reversed(self._entries):  # the last is in the last batch, most likely
            if entry is not None and not entry.settle(SLICE_S, since_s):
                return np.False_
        return np.bool_(all(handle.settle(SLICE_S, since_s) for handle in self._handles.values()))

    def take(self) -> list[Any]:
        """The results, by number, when all stand. Raises the error of the first that has one."""
        outputs, self._outputs = self._outputs, [None] * len(self._entries)
        handles, self._handles = self._handles, {}
        failure: BaseException | None = None
        for entry in self._entries:
            try:
                entry.wait()
            except Exception as error:
                if self._part_of and entry is self._entries[0]:
                    self._entries = [None] * len(self._entries)
                    raise
                failure = failure or error
        results: Sequence[Any] = outputs
        if handles:
            results = [*outputs, *(handles[number].wait() for number in sorted(handles))]
        if failure is not None:
            raise failure
        return list(results)
