"""The work objects that the process group returns: they wait for operations of ddl, as torch's own wait for theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddl_torch.distributed.uncompiled import uncompiled
from ddlcore.api import Handle

_LEAST_S = 1e-6  # the shortest timeout of a work: 0 would be none


class _Landing:
    """Copies the results of an operation to the tensors that it could not write itself, once, on any thread."""

    def __init__(self, land: Callable[[Any], None] | None) -> None:
        self._land = land
        self._lock = threading.RLock()  # a signal handler may call ``wait`` while this thread copies

    def __call__(self, result: Any) -> None:
        """Copy ``result``, and return when it has been copied. Another thread may be copying it already."""
        if self._land is not None:
            with self._lock:
                if self._land is not None:
                    self._land(result)  # again if a signal interrupts it: a copy does no harm twice
                    self._land = None


@uncompiled
class DdlWork(dist.Work):  # type: ignore[misc]  # torch's class has no types
    """An operation in flight. Any thread may wait for it, for at most ``limit_s`` seconds or what ``wait`` is given.

    ``outputs`` are the tensors that the operation writes. ``land`` is called once when the operation has ended without
    an error, before anybody sees the outputs: it copies the results to outputs that the operation could not write itself.
    """

    def __init__(
        self,
        handle: Handle,
        outputs: Sequence[torch.Tensor],
        land: Callable[[Any], None] | None,
        limit_s: float,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._outputs = list(outputs)
        self._land = _Landing(land)
        self._limit_s = limit_s
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs have the results. Raises the error of the operation.

        Raises DeadlineExceeded if it has not ended after ``timeout``; 0 or None means the timeout of the call or group.
        """
        self._land(self._handle.wait(timeout.total_seconds() if timeout else self._limit_s))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the outputs have the results, or the operation has failed."""
        if not self._handle.poll():
            return False
        if self._handle.failure is None:
            self.wait()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._handle.failure is None

    def exception(self) -> BaseException | None:
        return self._handle.failure

    def result(self) -> list[torch.Tensor]:
        """Return the outputs. Only after ``wait`` do they have the results."""
        return self._outputs

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() is for recv only")

    def get_future(self) -> Any:
        """Return a future whose value are the outputs. It ends together with the operation.

        If the operation fails, the future raises RuntimeError with the name and the text of the error.
        """
        if self._future is None:
            ended: Any = torch.futures.Future()
            # ``set_exception`` would make the exception object the value of the future in torch's C++ code.
            # DistributedDataParallel would use this value as tensors, and the process would crash. If a callback raises
            # an error, it is an error in C++, too.
            self._future = ended.then(self._landed)
            self._handle.then(partial(ended.set_result, None))  # on the thread that ends the operation
        return self._future

    def _landed(self, _: Any) -> list[torch.Tensor]:
        self.wait()
        return self._outputs


@uncompiled
class DoneWork(dist.Work):  # type: ignore[misc]
    """Work that was done at the call."""

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


DONE = DoneWork()  # of a call that waits for its end itself, and whose work nobody keeps


def together(works: Sequence[Any], outputs: Any) -> Any:
    """Return one work for several."""
    return works[0] if len(works) == 1 else Works(works, outputs)


@uncompiled
class Works(dist.Work):  # type: ignore[misc]
    """Several works that are waited for together. ``land`` is called once when all have ended, see DdlWork."""

    def __init__(self, works: Sequence[Any], outputs: Any, land: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self._works = list(works)
        self._outputs = list(outputs)
        self._land = _Landing(land)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all have ended. ``timeout``, if it is not None or 0, limits the time for all of them together."""
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), _LEAST_S)
            work.wait(None if left_s is None else timedelta(seconds=left_s))
        self._land(None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        if self.exception() is None:
            self.wait()
        return True

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(self._landed)

    def _landed(self, ended: Any) -> Any:
        ended.wait()  # raises the error of a work that has failed
        self._land(None)
        return self._outputs
