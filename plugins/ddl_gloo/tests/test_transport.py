"""Tests of properties that this transport has and Gloo alone lacks.

They are the types, the order of rounding, long waits for slow ranks, the choice of the address, and a clean end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddl_conform.group import TransportGroup
from ddl_gloo import transport as module

from ddlcore.contracts.interfaces import interface_addresses
from ddlcore.contracts.store import Store
from ddlcore.contracts.transport import Transport, Work
from ddlcore.errors import DeadlineExceeded, PeerLost, TransportError
from ddlcore.testing import oracle
from ddlcore.types import DType, ReduceOp
from plugins.ddl_gloo.tests.worlds import buffer, call, ones, open_group, unopened

LARGE = 300_000  # elements: too large to be sent whole to all ranks

# --- values


def reduced(group: TransportGroup, sources: list[Any], op: ReduceOp) -> list[Any]:
    """Return the result on every rank."""
    targets = [np.zeros_like(source) for source in sources]
    group.run(call(lambda rank, transport: transport.allreduce(buffer(sources[rank]), buffer(targets[rank]), op)))
    return targets


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("op", [ReduceOp.Sum, ReduceOp.Product], ids=["sum", "product"])
@pytest.mark.parametrize("count", [10, LARGE])
def test_overflow_wraps(dtype: str, op: ReduceOp, count: int) -> None:
    """Integer overflow wraps around as in numpy, for every size of tensor."""
    random = np.random.default_rng(count)
    sources = [np.frombuffer(random.bytes(count * np.dtype(dtype).itemsize), dtype) for _ in range(3)]
    with open_group(3) as group:
        for target in reduced(group, sources, op):
            assert oracle.difference(target, oracle.reduce(sources, op)) == ""


@pytest.mark.parametrize("op", sorted(module.GlooTransport.capabilities.ops), ids=lambda op: op.name.lower())
@pytest.mark.parametrize("count", [10, 2_000_000])
def test_bool(op: ReduceOp, count: int) -> None:
    """Sum and maximum are logical or; product and minimum are logical and."""
    sources = [oracle.values(DType.BOOL, count, rank) for rank in range(3)]
    with open_group(3) as group:
        for target in reduced(group, sources, op):
            assert oracle.difference(target, oracle.reduce(sources, op)) == ""


def test_sizes_that_do_not_fit_are_told() -> None:
    """A tensor of a wrong size raises an error before Gloo gets it, because Gloo would kill the process."""
    with open_group(2) as group:
        transport = group.transports[0]
        four, five = buffer(ones(4)), buffer(ones(5))
        wrongs: list[Callable[[], Work]] = [
            lambda: transport.allreduce(four, five, ReduceOp.Sum),
            lambda: transport.allgatherv(four, five, [4, 2]),
            lambda: transport.allgatherv(five, five, [4, 1]),
            lambda: transport.reducescatterv(four, five, [2, 2], ReduceOp.Sum),
            lambda: transport.alltoallv(four, five, [[2, 1], [2, 1]]),
        ]
        for wrong in wrongs:
            with pytest.raises(ValueError, match="elements where"):
                wrong()


# --- patience

COUNTS = [LARGE] * 2
CALLS: dict[str, Callable[[Transport, Any, Any], Work]] = {
    "allreduce": lambda t, whole, part: t.allreduce(whole, whole, ReduceOp.Sum),
    "small": lambda t, whole, part: t.allreduce(replace(part, count=4), replace(part, count=4), ReduceOp.Sum),
    "broadcast": lambda t, whole, part: t.broadcast(whole, 1),
    "allgatherv": lambda t, whole, part: t.allgatherv(part, whole, COUNTS),
    "reducescatterv": lambda t, whole, part: t.reducescatterv(whole, part, COUNTS, ReduceOp.Sum),
    "alltoallv": lambda t, whole, part: t.alltoallv(whole, whole, [[LARGE] * 2] * 2),
    "barrier": lambda t, whole, part: t.barrier(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_slow_peer_is_not_a_dead_one(name: str) -> None:
    """A collective waits for a slow rank, even for longer than the timeout of ``open``."""

    def play(rank: int, transport: Transport) -> Work:
        if rank:
            time.sleep(1.0)
        return CALLS[name](transport, buffer(ones(2 * LARGE)), buffer(ones(LARGE)))

    with open_group(2, timeout_s=0.6) as group:
        group.run(call(play))


@pytest.mark.parametrize("barrier", [1, 8])
def test_a_barrier_of_gloos_own_is_as_patient(monkeypatch: pytest.MonkeyPatch, barrier: int) -> None:
    """A barrier waits for a slow rank, even for longer than the timeout of ``open``.

    This holds for Gloo's barrier, which is used for many ranks, and for this transport's own barrier for few ranks.
    """
    monkeypatch.setattr(module, "DIRECT_BARRIER", barrier)
    come: list[int] = []
    first = threading.Event()

    def play(rank: int, transport: Transport) -> Work:
        if rank:
            assert first.wait(15.0)  # else a rank 0 that gets no CPU core for a second would come later
            time.sleep(1.0)
        come.append(rank)
        first.set()
        return transport.barrier()

    def passed(rank: int, transport: Transport) -> None:
        call(play)(rank, transport)
        come.append(-1)

    with open_group(2, timeout_s=0.6) as group:
        group.run(passed)
    assert come == [0, 1, -1, -1]


def test_works_overlap() -> None:
    """A large collective returns at once and runs in the background. Collectives complete in the order of the calls."""
    with open_group(2) as group:
        halves, whole = [np.ones(LARGE, np.float16) for _ in range(2)], [ones(LARGE) for _ in range(2)]

        def play(rank: int, transport: Transport) -> None:
            started = [
                transport.allreduce(buffer(halves[rank]), buffer(halves[rank]), ReduceOp.Sum),
                transport.allreduce(buffer(whole[rank]), buffer(whole[rank]), ReduceOp.Sum),
                transport.barrier(),  # short, but it must complete after the others
            ]
            for work in reversed(started):
                while not work.wait(0.001):
                    pass
                assert work.wait(0.0)

        group.run(play)
        assert all((array == 2).all() for array in [*halves, *whole])


# --- addresses


@pytest.mark.parametrize("wanted", ["", "lo", "nothing0,lo", "::1"])
def test_where_it_listens(wanted: str) -> None:
    """The address is on the interface that was named, else on the route to the launcher, else the loopback address.

    IPv6 works too.
    """
    if ":" in wanted and wanted not in interface_addresses().get("lo", ()):
        pytest.skip("this host has no IPv6 loopback")
    routed = "127.0.0.3"  # a loopback address that nothing uses by default
    with open_group(2, settings={"network_interface": wanted}, address=routed) as group:
        group.run(call(lambda rank, transport: transport.barrier()))
        wires = group.transports[0]._wires  # type: ignore[attr-defined]  # what it is about
        ends: set[str] = set()
        for number in wires._wires:
            with socket.socket(fileno=os.dup(number)) as wire:
                ends |= {wire.getsockname()[0], wire.getpeername()[0]}
    assert routed in ends if not wanted else ends == {"::1" if ":" in wanted else "127.0.0.1"}


@pytest.mark.parametrize(
    ("settings", "address", "told"),
    [
        ({"network_interface": "nothing0"}, "", r"^gloo: no network interface is called nothing0 on .*there are lo"),
        ({}, "192.0.2.254", r"^gloo: no connection from 192\.0\.2\.254: "),
    ],
)
def test_no_such_address(settings: dict[str, str], address: str, told: str) -> None:
    """If this host lacks the interface or the address, ``open`` raises an error of one line on every rank.

    For an interface, the error lists the interfaces that exist.
    """
    group = unopened(2, settings=settings)

    def play(rank: int, transport: Transport) -> None:
        with pytest.raises(TransportError, match=told) as found:
            transport.open(replace(group.context(rank), address=address))
        assert "\n" not in str(found.value)
        transport.close()

    group.run(play)
    group.ranks.close()


# --- the end


class Losing(Store):
    """A store in which every wait reports that a rank has died."""

    def __init__(self, base: Store) -> None:
        self._base = base

    def set(self, key: str, value: bytes) -> None:
        self._base.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        try:
            return self._base.get(key, 0.1)
        except DeadlineExceeded:
            raise PeerLost([7], "killed by signal 9 (SIGKILL)") from None

    def add(self, key: str, amount: int) -> int:
        return self._base.add(key, amount)

    def delete(self, prefix: str) -> None:
        self._base.delete(prefix)


def test_a_loss_while_ranks_meet_is_told_as_it_is() -> None:
    """If a rank dies while Gloo connects the ranks, ``open`` raises the store's PeerLost, which names the rank."""
    group = unopened(2)

    def play(rank: int, transport: Transport) -> None:
        if rank == 0:
            with pytest.raises(PeerLost) as told:
                transport.open(replace(group.context(0), store=Losing(group.context(0).store)))
            assert told.value.ranks == (7,)
            transport.close()

    group.run(play)
    group.ranks.close()


def test_abort_ends_open() -> None:
    """``abort`` soon ends ``open`` on a rank that waits for another rank."""
    group = unopened(2)
    threading.Timer(0.2, group.transports[0].abort).start()

    def play(rank: int, transport: Transport) -> None:
        if rank == 0:
            begun_s = time.monotonic()
            with pytest.raises(TransportError, match="aborted"):
                transport.open(replace(group.context(0), timeout_s=60.0))
            assert time.monotonic() - begun_s < 20.0
            transport.close()

    group.run(play)
    group.ranks.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_peer_is_noticed(name: str) -> None:
    """If one rank closes its transport, the collective fails soon on all other ranks.

    This also holds for ranks that exchange no data with the closed rank in this collective. After that, every call
    fails.
    """
    gone_s: list[float] = []

    def play(rank: int, transport: Transport) -> None:
        if rank == 2:
            time.sleep(0.1)
            gone_s.append(time.monotonic())
            transport.close()
            return
        counts = [LARGE] * 3
        whole, part = buffer(ones(3 * LARGE)), buffer(ones(LARGE))
        calls: dict[str, Callable[[], Work]] = {
            "broadcast": lambda: transport.broadcast(whole, 2),
            "allgatherv": lambda: transport.allgatherv(part, whole, counts),
            "reducescatterv": lambda: transport.reducescatterv(whole, part, counts, ReduceOp.Sum),
            "alltoallv": lambda: transport.alltoallv(whole, whole, [counts] * 3),
        }
        with pytest.raises(TransportError, match=r"^gloo: .* failed: .*") as told:
            call(lambda r, t: calls[name]() if name in calls else CALLS[name](t, whole, part))(rank, transport)
        assert time.monotonic() - gone_s[0] < 20.0
        assert "\n" not in str(told.value) and ".cc" not in str(told.value)
        with pytest.raises(TransportError):
            call(lambda r, t: t.barrier())(rank, transport)

    with open_group(3) as group:
        group.run(play)


def test_what_comes_after_close() -> None:
    """A call on a transport that is not open raises an error; abort() after close() does nothing."""
    with open_group(2) as group:
        group.run(lambda rank, transport: transport.close())
        group.transports[0].abort()
    fresh = module.GlooTransport()
    with pytest.raises(TransportError, match="not open"):
        fresh.barrier()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", ["allreduce", "alltoallv"])
def test_abort_in_mid_message(name: str) -> None:
    """After an abort in the middle of a message, neither the collective nor the end of the process hangs.

    Gloo itself waits forever for the rest of a message if its connection was cut in the middle.
    """
    program = str(Path(__file__).parent / "programs" / "midway.py")
    done = subprocess.run([sys.executable, program, name], capture_output=True, text=True, timeout=220, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["done"]), done.stderr
