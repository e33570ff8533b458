"""A store is asked for a key while somebody may end the wait."""

from __future__ import annotations

import threading
import time

import pytest
from ddl_conform.store import ThreadStore

from ddlcore.contracts.store import PrefixStore
from ddlcore.errors import DeadlineExceeded, TransportError


def test_a_checked_wait_ends_at_its_deadline() -> None:
    """As ``get`` does, also if it is longer than the time between two checks."""
    checks: list[float] = []
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="'p/absent'"):
        PrefixStore("p/", ThreadStore()).get_checked("absent", 1.2, lambda: checks.append(time.monotonic()))
    assert 1.2 <= time.monotonic() - begun_s < 10.0
    assert len(checks) == 2


def test_a_checked_wait_ends_by_its_check() -> None:
    """The error of the check is raised soon, and long before the deadline."""

    def check() -> None:
        raise TransportError("aborted")

    begun_s = time.monotonic()
    with pytest.raises(TransportError, match="aborted"):
        ThreadStore().get_checked("absent", 60.0, check)
    assert time.monotonic() - begun_s < 30.0


def test_a_checked_wait_finds_what_comes_later() -> None:
    """And what is there already, without a check."""
    store = ThreadStore()
    threading.Timer(0.8, store.set, ("late", b"v")).start()
    checks: list[int] = []
    assert store.get_checked("late", 60.0, lambda: checks.append(1)) == b"v"
    assert checks
    assert store.get_checked("late", 60.0, lambda: pytest.fail("it was there")) == b"v"
