"""Handing out shared memory: to the members only, within the deadline, leaving no name behind."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ddl_conform.store import ThreadStore
from ddl_shm import segment

from ddlcore.errors import DeadlineExceeded, TransportError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")


def never() -> bool:
    return False


def _in_thread(function: Callable[[], segment.Segment]) -> tuple[threading.Thread, list[segment.Segment]]:
    got: list[segment.Segment] = []
    thread = threading.Thread(target=lambda: got.append(function()))
    thread.start()
    return thread, got


def _address(store: ThreadStore) -> str:
    return "\0" + store.get(segment.KEY, 5.0)[segment.TOKEN_BYTES + 8 :].decode()


def _is_listening(address: str) -> bool:
    return f"@{address[1:]}" in Path("/proc/net/unix").read_text()


def test_all_see_the_same_memory() -> None:
    """Three ranks; what one writes the others read; name and key are gone."""
    store = ThreadStore()
    makers, made = _in_thread(lambda: segment.make(1 << 16, 2, store, 10.0, never))
    address = _address(store)
    assert _is_listening(address)
    others = [segment.receive(rank, store, 10.0, never) for rank in (1, 2)]
    makers.join(40)
    ranks = [*made, *others]
    ctypes.memmove(ranks[1].address + 5, b"hello", 5)
    assert all(ctypes.string_at(each.address + 5, 5) == b"hello" for each in ranks)
    assert ctypes.string_at(ranks[0].address + 100, 1000) == bytes(1000)
    assert len({each.address for each in ranks}) == 3
    assert not _is_listening(address)
    with pytest.raises(DeadlineExceeded):
        store.get(segment.KEY, 0.01)
    for each in ranks:
        each.close()
        each.close()


def test_strangers_get_nothing() -> None:
    """A wrong token, silence, or half a token: no descriptor for them, and the member still gets its memory."""
    store = ThreadStore()
    makers, made = _in_thread(lambda: segment.make(4096, 1, store, 60.0, never))
    for said in (bytes(segment.TOKEN_BYTES + 4), b"", b"half"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(40.0)
            stranger.connect(_address(store))
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            answer, descriptors, _, _ = socket.recv_fds(stranger, 100, 4)
            assert (answer, descriptors) == (b"", [])
    member = segment.receive(1, store, 60.0, never)
    makers.join(40)
    member.close()
    made[0].close()


def test_a_stranger_that_stays_silent_delays_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 turns to the next one soon."""
    monkeypatch.setattr(segment, "STRANGER_S", 0.1)
    store = ThreadStore()
    makers, made = _in_thread(lambda: segment.make(4096, 1, store, 60.0, never))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(_address(store))
        start = time.monotonic()
        member = segment.receive(1, store, 60.0, never)
        assert time.monotonic() - start < 20.0
    makers.join(40)
    member.close()
    made[0].close()


def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer of another user gets nothing from rank 0, and is not trusted as rank 0."""
    monkeypatch.setattr(segment, "_peer_uid", lambda connection: os.getuid() + 1)
    store = ThreadStore()
    failures: list[BaseException] = []

    def make() -> None:
        try:
            segment.make(4096, 1, store, 0.5, never)
        except DeadlineExceeded as error:
            failures.append(error)

    maker = threading.Thread(target=make)
    maker.start()
    with pytest.raises(TransportError, match="belongs to user"):
        segment.receive(1, store, 5.0, never)
    maker.join(40)
    assert "1 of 1 ranks" in str(failures[0])


def test_members_that_do_not_come() -> None:
    """Rank 0 says how many are missing and closes everything."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeadlineExceeded, match="2 of 2 ranks"):
        segment.make(4096, 2, ThreadStore(), 0.2, never)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_rank_0_that_does_not_come() -> None:
    """The others wait no longer than they were told to."""
    with pytest.raises(DeadlineExceeded):
        segment.receive(1, ThreadStore(), 0.2, never)


def test_rank_0_that_is_gone() -> None:
    """A published name that nobody listens on is an error that says so, at once."""
    store = ThreadStore()
    store.set(segment.KEY, bytes(segment.TOKEN_BYTES) + (4096).to_bytes(8, "little") + b"ddl-nobody")
    with pytest.raises(TransportError, match="cannot reach rank 0"):
        segment.receive(1, store, 5.0, never)


def test_an_abort_ends_the_wait() -> None:
    """Rank 0 that waits for members, and a member that waits for rank 0's answer, end soon when they are told."""
    for wait in (_make_alone, _receive_from_nobody):
        told = threading.Event()
        timer = threading.Timer(0.1, told.set)
        timer.start()
        start = time.monotonic()
        with pytest.raises(TransportError, match="aborted while opening"):
            wait(told.is_set)
        assert time.monotonic() - start < 20.0
        timer.join()


def _make_alone(stop: Callable[[], bool]) -> None:
    segment.make(4096, 1, ThreadStore(), 30.0, stop)


def _receive_from_nobody(stop: Callable[[], bool]) -> None:
    store = ThreadStore()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0ddl-silent-{os.getpid()}")
        silent.listen(1)
        store.set(
            segment.KEY,
            bytes(segment.TOKEN_BYTES) + (4096).to_bytes(8, "little") + f"ddl-silent-{os.getpid()}".encode(),
        )
        segment.receive(1, store, 30.0, stop)
