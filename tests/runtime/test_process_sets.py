"""Communicators of process sets, as far as no world is needed to see it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ddl_conform.store import ThreadStore
from ddl_conform.threads import ThreadsTransport

from ddlcore.contracts.solo import SoloTransport
from ddlcore.contracts.transport import Context
from ddlcore.errors import DdlInternalError, DeadlineExceeded, TransportError
from ddlcore.hooks import TransportProvider
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.runtime.process_sets import Opener, ProcessSets, abort_all
from ddlcore.runtime.routes import Route
from ddlcore.types import Member


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


def test_the_route_is_known_while_a_communicator_is_opened_anew() -> None:
    """A user's thread may ask for it at any moment, for example by ``ddl.stats()`` during a search."""
    asked: list[Callable[[], object]] = []
    told: list[object] = []

    def build(route: Route) -> SoloTransport:
        told.extend(ask() for ask in asked)
        return SoloTransport()

    route = Route(TransportProvider("solo", "x:Solo"), "asked for")
    members = (Member(0, 0),)
    opener = Opener(0, members, ThreadStore(), CpuKernels(), {}, 5.0, lambda members: route, build)
    sets = ProcessSets(opener)
    sets.add(0, (0,))
    sets.add(3, (0,))
    asked += [sets.routes, lambda: sets.transports(0)]
    sets.reopen(replace(opener, generation=1))
    known = {0: "solo (asked for)", 3: "solo (asked for)"}
    assert told == [known, {"solo"}] * 2
    sets.remove(3)
    assert sets.routes() == {0: "solo (asked for)"}
    sets.close()
    assert sets.routes() == {}
    with pytest.raises(DdlInternalError, match="process set 0 has no open communicator"):
        sets.transports(0)


def opening(rank: int, route: str, store: ThreadStore) -> ProcessSets:
    """The process sets of one of two ranks on a host, which takes ``route``, and whose transport connects at once."""

    class Instantly(ThreadsTransport):
        def open(self, context: Context) -> None:
            self.context = context

    members = (Member(0, 0), Member(1, 0))
    taken = Route(TransportProvider(route, f"x:{route}"), "auto")
    return ProcessSets(
        Opener(rank, members, store, CpuKernels(), {}, 30.0, lambda members: taken, lambda route: Instantly())
    )


def test_ranks_of_different_routes_do_not_wait_for_each_other() -> None:
    """As where one host lacks a plugin. Each set is compared, and each time anew."""
    store = ThreadStore()
    first, second = opening(0, "shm", store), opening(1, "gloo", store)
    first.add(0, (0, 1))
    expected = r"process set 0: rank 0 takes the transport shm, and rank 1 takes gloo; .*`ddl info`"
    with pytest.raises(TransportError, match=expected):
        second.add(0, (0, 1))
    second.add(1, (1,))  # alone
    same = opening(1, "shm", store)
    same.add(0, (0, 1))
    first.add(2, (0, 1))
    again = threading.Thread(target=first.reopen, args=(replace(opening(0, "gloo", store).opener, generation=1),))
    threading.Timer(0.2, again.start).start()  # the other rank waits for it: the routes of before are no longer valid
    with pytest.raises(TransportError, match="rank 0 takes the transport gloo, and rank 1 takes shm"):
        same.reopen(replace(same.opener, generation=1))
    again.join(20.0)
    with pytest.raises(DeadlineExceeded):
        store.get("set1.route", 0.0)
    known = {key: store.get(key, 0.0) for key in ("set0.route", "set2.route", "set0.1.route", "set2.1.route")}
    assert known == dict.fromkeys(("set0.route", "set2.route"), b"shm") | dict.fromkeys(
        ("set0.1.route", "set2.1.route"), b"gloo"
    )


def test_a_first_rank_that_does_not_come_is_named() -> None:
    sets = opening(1, "shm", ThreadStore())
    sets.opener = replace(sets.opener, timeout_s=0.3)
    with pytest.raises(DeadlineExceeded, match=r"process set 5: rank 0 has chosen no transport within 0.3 s"):
        sets.add(5, (0, 1))


def test_an_abort_ends_the_comparison() -> None:
    """The first rank may never come."""
    sets = opening(1, "shm", ThreadStore())
    sets.abort()
    with pytest.raises(TransportError, match="aborted while a communicator was opened"):
        sets.add(0, (0, 1))


@pytest.mark.parametrize("end", ["abort", "close"])
@pytest.mark.parametrize("late", [False, True])
def test_what_handles_devices_ends_with_the_job_however_late_it_comes(end: str, late: bool) -> None:
    """A user's thread may make its first tensor on a device while another thread ends the job."""
    ended: list[str] = []

    class Devices:
        def abort(self) -> None:
            ended.append("abort")

        def close(self, patience_s: float) -> None:
            ended.append("close")

    devices: Any = Devices()
    opener: Any = None  # nothing is opened
    sets = ProcessSets(opener)
    if not late:
        sets.use_for_devices(devices)
    getattr(sets, end)()
    if late:
        sets.use_for_devices(devices)
    assert ended == [end]
