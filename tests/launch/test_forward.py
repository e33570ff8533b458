"""An agent passes the launcher's standard input to the rank that reads it, whole and in order, and without waiting."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ddlcore.launch.agents.forward import Input
from ddlcore.launch.agents.wire import CHUNK_BYTES

PATIENCE_S = 40.0
TEXT = b"".join(b"%d\n" % number for number in range(90_000))  # 530 kB: far more than a pipe holds
PIECES = [TEXT[at : at + CHUNK_BYTES] for at in range(0, len(TEXT), CHUNK_BYTES)]


class Used:
    """How many bytes of the input need no memory any more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._nbytes = 0

    def __call__(self, nbytes: int) -> None:
        with self._changed:
            self._nbytes += nbytes
            self._changed.notify_all()

    def reaches(self, nbytes: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._nbytes >= nbytes, PATIENCE_S) and self._nbytes == nbytes


def with_deadline(action: Callable[[], bytes]) -> bytes:
    """Return the result of ``action``, which is called in a thread; fail if it takes too long."""
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "the input has no end"
    return found[0]


def test_the_input_of_a_rank_is_whole_and_ends() -> None:
    """``put`` does not wait for the reader, although a pipe holds less; each byte is acknowledged once."""
    used = Used()
    given = Input(used)
    for piece in (*PIECES, b""):
        given.put(piece)
    with open(given.reader, "rb") as file:
        assert with_deadline(file.read) == TEXT
    assert used.reaches(len(TEXT))


def test_a_rank_that_does_not_read_its_input_holds_nothing_up() -> None:
    """All that comes after the rank has closed its standard input is acknowledged and discarded."""
    used = Used()
    given = Input(used)
    given.put(PIECES[0])
    assert os.read(given.reader, 4) == TEXT[:4]
    os.close(given.reader)
    for piece in (*PIECES[1:], b""):
        given.put(piece)
    assert used.reaches(len(TEXT))
