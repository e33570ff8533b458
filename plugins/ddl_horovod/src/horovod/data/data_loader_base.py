"""Base classes of loaders, which may read batches in a thread while a step computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

log = logging.getLogger("ddl")
_LOOK_S = 0.1  # how often a thread that waits for room in its queue looks whether it is still wanted
_CLOSE_S = 60.0  # how long the end of a thread is waited for, which may be in the middle of a user's read


class BaseDataLoader:
    """A loader of batches. A subclass defines ``_iterate``, a generator of one epoch's batches, and ``__len__``."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return what the loop gets in the place of ``batch``. A subclass may override this."""
        return batch


class AsyncDataLoaderMixin:
    """Makes a loader read its batches in a thread: ``class Mine(AsyncDataLoaderMixin, MyLoader)``.

    ``async_loader_queue_size``: how many batches are read ahead; 0: none, and there is no thread. ``debug_data_loader``:
    whether each batch that is read is logged. All other arguments are those of the loader. An exception in ``_iterate``
    is raised in the loop, after the batches that were read before.
    """

    _iterate: Callable[[], Iterable[Any]]
    _process_batch: Callable[[Any], Any]

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readers: set[_Reader] = set()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the threads that read batches. A loop that is under way ends after the batches that were read."""
        for reader in list(self._readers):
            reader.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        reader = _Reader(self._iterate, self.async_loader_queue_size, self.debug_data_loader)
        self._readers.add(reader)
        try:
            for batch in reader.batches():
                yield self._process_batch(batch)
        finally:  # also if the loop is left early
            reader.close()
            self._readers.discard(reader)


_END = object()  # comes after the last batch of an epoch


class _Reader:
    """One epoch's batches, read by a thread. Only the thread of the loop calls the methods but ``close``."""

    def __init__(self, iterate: Callable[[], Iterable[Any]], ahead: int, logs: bool) -> None:
        self._iterate = iterate
        self._logs = logs
        self._queue: Queue[Any] = Queue(ahead)
        self._unwanted = Event()
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._read, name="ddl-read", daemon=True)
        self._thread.start()

    def batches(self) -> Iterator[Any]:
        """Yield the batches as they arrive. Raises the exception that ended the thread, if one did."""
        while True:
            try:
                batch = self._queue.get(timeout=_LOOK_S)
            except Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    break  # it was told to end
                continue
            if batch is _END:
                break
            yield batch
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Tell the thread to end, and wait until it has. Any thread may call this."""
        self._unwanted.set()
        self._thread.join(_CLOSE_S)

    def _read(self) -> None:
        try:
            for number, batch in enumerate(self._iterate()):
                if self._logs:
                    log.info("data loader: batch %d was read", number)
                if not self._put(batch):
                    return
        except BaseException as error:
            self._failure = error
        finally:
            self._put(_END)

    def _put(self, batch: Any) -> bool:
        """Put ``batch`` into the queue when there is room. Return whether more batches are wanted."""
        while not self._unwanted.is_set():
            try:
                self._queue.put(batch, timeout=_LOOK_S)
                return True
            except Full:
                continue
        return False
