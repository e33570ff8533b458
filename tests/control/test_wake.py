"""The wake-up descriptor, on systems with and without eventfd."""

from __future__ import annotations

import os
import select
import threading

import pytest

from ddlcore.control.wake import Wake


@pytest.fixture(params=["eventfd", "pipe"])
def wake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wake:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("this system has no eventfd")
    return Wake()


def readable(wake: Wake, timeout_s: float = 0.0) -> bool:
    return bool(select.select([wake], [], [], timeout_s)[0])


def test_set_until_clear(wake: Wake) -> None:
    """Readable from the first set to the clear, however many sets; then anew."""
    assert not readable(wake)
    for _ in range(2):
        for _ in range(100_000):  # more than a pipe holds
            wake.set()
        assert readable(wake)
        wake.clear()
        assert not readable(wake)
    wake.close()


def test_no_set_is_lost(wake: Wake) -> None:
    """Sets of several threads against clears of one: after the last set it is readable, or was cleared after it."""
    done = []

    def work() -> None:
        for _ in range(2000):
            wake.set()
        done.append(True)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(done) < 3:
        if readable(wake, 0.01):
            wake.clear()
    for thread in threads:
        thread.join()
    wake.clear()
    wake.set()
    assert readable(wake)
    wake.close()


def test_closed_is_quiet(wake: Wake) -> None:
    """A late set does nothing to whoever has the number of the descriptor now."""
    number = wake.fileno()
    wake.close()
    wake.close()
    reader, writer = os.pipe()
    wake.set()
    wake.clear()
    assert wake.fileno() == -1
    assert not select.select([reader], [], [], 0.0)[0]
    assert number in (reader, writer) or number >= 0
    os.close(reader)
    os.close(writer)


def test_a_forked_child_wakes_nobody(wake: Wake) -> None:
    """Its copy of the descriptor is the parent's."""
    child = os.fork()
    if child == 0:
        wake.set()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not readable(wake)
    wake.close()


def test_a_handler_in_the_middle_of_a_set_blocks_nobody(wake: Wake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler waits for another thread, which may hold a lock and call ``set``."""
    write, came = os.write, []

    def interrupted(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        other = threading.Thread(target=wake.set, daemon=True)
        other.start()
        other.join(5.0)
        came.append(not other.is_alive())
        return write(fd, data)

    monkeypatch.setattr(os, "write", interrupted)
    wake.set()
    assert came == [True]
    assert readable(wake)
    wake.close()


def test_no_other_file_gets_the_number_during_a_set(wake: Wake, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pipes = os.write, []

    def late(fd: int, data: bytes) -> int:
        wake.close()
        pipes.append(os.pipe())
        return write(fd, data)

    monkeypatch.setattr(os, "write", late)
    descriptor = wake.fileno()
    wake.set()
    monkeypatch.undo()
    ((reader, writer),) = pipes
    assert not select.select([reader], [], [], 0.0)[0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)  # the set has closed it
    os.close(reader)
    os.close(writer)
