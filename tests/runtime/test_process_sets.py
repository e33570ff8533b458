"""Communicators of process sets, as far as no world is needed to see it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ddlcore.runtime.process_sets import abort_all


class Waiting:
    """A transport whose abort ends when those of the others have begun."""

    def __init__(self, meeting: threading.Barrier) -> None:
        self._meeting = meeting

    def abort(self) -> None:
        self._meeting.wait(40.0)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_no_abort_waits_for_another(count: int) -> None:
    """They run at once, and all have ended when it returns."""
    transports: list[Any] = [Waiting(threading.Barrier(max(count, 1)))] * count
    abort_all(transports)
    assert all(transport._meeting.n_waiting == 0 for transport in transports)
    assert not [thread for thread in threading.enumerate() if thread.name == "ddl-abort"]


def test_where_no_thread_starts_any_more_they_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the interpreter ends."""
    called = []

    class Quick:
        def abort(self) -> None:
            called.append(self)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    transports: list[Any] = [Quick(), Quick(), Quick()]
    abort_all(transports)
    assert sorted(map(id, called)) == sorted(map(id, transports))
