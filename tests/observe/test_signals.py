"""A signal that asks for the flight recorder: taken where it is free, left alone where it is not."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.observe.signals import listen

pytestmark = pytest.mark.timeout(240)


def test_a_free_signal_is_taken_and_given_back() -> None:
    """And calls what was said."""
    called: list[int] = []
    undo = listen("SIGUSR2", lambda: called.append(1))
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert called == [1]
    finally:
        undo()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_signal_of_the_script_is_left_to_it() -> None:
    """Before and after."""
    mine: list[int] = []
    signal.signal(signal.SIGUSR2, lambda *_: mine.append(1))
    try:
        undo = listen("SIGUSR2", lambda: mine.append(2))
        os.kill(os.getpid(), signal.SIGUSR2)
        undo()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert mine == [1, 1]
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_what_is_no_signal_is_refused() -> None:
    """By name."""
    with pytest.raises(ValueError, match="flight_signal='SIGNOTHING'"):
        listen("SIGNOTHING", lambda: None)
    listen("", lambda: None)()


def test_a_signal_writes_what_the_rank_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of one; training goes on, and afterwards the signal is free again."""
    monkeypatch.setenv("DDL_FLIGHT_DIR", str(tmp_path))
    path = tmp_path / "rank0.signal.json"
    ddl.init()
    try:
        ddl.allreduce(np.ones(2), name="x")
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline_s = time.monotonic() + 80
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert json.loads(path.read_text())["entries"][0]["names"] == ["allreduce.x"]
    finally:
        ddl.shutdown()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
