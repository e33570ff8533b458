"""The base classes of data loaders."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader, data_loader_base


class Numbers(BaseDataLoader):
    """Batches 0 to ``count`` - 1; after ``fails_at`` of them, an error."""

    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count = count
        self.fails_at = fails_at
        self.read = 0

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            self.read += 1
            yield number

    def _process_batch(self, batch: int) -> str:
        return f"batch {batch}"


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):  # type: ignore[misc]  # the mixin declares what it needs
    """The same, read in a thread."""


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ddl-read"]


@pytest.mark.parametrize("ahead", [0, 1, 2, 64])
def test_every_epoch_has_all_batches_in_order(ahead: int) -> None:
    """This holds for any number of batches that are read ahead, in a thread or not, and no thread stays."""
    loader = AsyncNumbers(async_loader_queue_size=ahead, count=5)
    assert (
        [list(loader) for _ in range(3)] == [[f"batch {number}" for number in range(5)]] * 3 == [list(Numbers(5))] * 3
    )
    assert len(loader) == 5 and readers() == []


def test_no_more_is_read_ahead_than_asked() -> None:
    """The thread holds one batch, the queue as many as are asked for, and the loop one more."""
    loader = AsyncNumbers(2, False, 100)
    batches = iter(loader)
    next(batches)
    until = time.monotonic() + 10
    while loader.read < 4 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)  # gives a thread that reads too much the time to do so
    assert loader.read == 4
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert readers() == []


def test_an_error_of_the_reader_is_raised_in_the_loop() -> None:
    """The loop first gets the batches that were read before the error. The next epoch meets the error again."""
    loader = AsyncNumbers(count=5, fails_at=2)
    for _ in range(2):
        batches = iter(loader)
        assert [next(batches), next(batches)] == ["batch 0", "batch 1"]
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
    assert readers() == []


def test_the_end_of_an_epoch_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not wait until it looks whether the thread has ended."""
    monkeypatch.setattr(data_loader_base, "_LOOK_S", 60.0)
    begun = time.monotonic()
    assert len(list(AsyncNumbers(2, count=5))) == 5
    assert time.monotonic() - begun < 30


def test_a_loop_that_is_closed_from_outside_ends() -> None:
    """The loop ends after the batches that were read before the end."""
    loader = AsyncNumbers(1, count=1000)
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 3:
            loader.close_async_loader()
    assert 3 <= len(seen) <= 6 and readers() == []
    loader.close_async_loader()  # nothing is left to close
