"""Ranks that are threads of one process: right values, and an end for everybody when one gives up."""

from __future__ import annotations

import threading
import time
from typing import Any

import ddl_conform.world
import numpy as np
import pytest
from ddl_conform import threads
from ddl_conform.store import ThreadStore
from ddl_conform.threads import ThreadsTransport

from ddlcore.contracts.transport import Context, Transport
from ddlcore.errors import DeadlineExceeded, TransportError
from ddlcore.types import Member, ReduceOp
from tests.builtin.worlds import World, buffer, random_collectives

UNUSED: Any = None


@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_random_collectives(size: int) -> None:
    """Programs of all collectives, the same on every rank."""
    with World(ThreadsTransport, size) as world:
        for seed in range(3):
            world.run(random_collectives(seed, size, 8, 20_000))


def test_abort_wakes_everybody_at_once() -> None:
    """Three wait for a fourth; one abort from outside, and all have raised long before a second is over."""
    with World(ThreadsTransport, 4) as world:
        raised: list[float] = []

        def body(transport: Transport, rank: int) -> None:
            if rank == 3:
                time.sleep(0.2)
                start = time.monotonic()
                transport.abort()
                raised.append(start)
                return
            with pytest.raises(TransportError, match="rank 3"):
                transport.barrier()
            raised.append(time.monotonic())

        world.run(body)
        assert max(raised) - min(raised) < 0.5
        with pytest.raises(TransportError):
            world.transports[0].barrier()


def test_a_rank_that_does_not_come() -> None:
    """open says that ranks are missing when its time is over."""
    context = Context(0, (Member(0, 0), Member(1, 0)), ThreadStore(), UNUSED, {}, 0.2)
    with pytest.raises(DeadlineExceeded, match="1 of 2"):
        ThreadsTransport().open(context)


def test_rank_0_in_another_process() -> None:
    """A token that nobody here knows: the message says what to use between processes."""
    store = ThreadStore()
    store.set(threads.KEY, b"of another process")
    context = Context(1, (Member(0, 0), Member(1, 0)), store, UNUSED, {}, 0.2)
    with pytest.raises(TransportError, match="shm"):
        ThreadsTransport().open(context)


def test_nothing_is_kept_of_a_closed_world() -> None:
    """Meetings go with their ranks, and so does the token."""
    before = set(threads.MEETINGS)  # of worlds of other tests that the garbage collector has not found yet
    with World(ThreadsTransport, 2) as world:
        world.run(lambda transport, rank: transport.barrier())
        assert len(set(threads.MEETINGS) - before) == 1
    assert set(threads.MEETINGS) <= before
    with pytest.raises(DeadlineExceeded):
        world.store.get(threads.KEY, 0.01)
    with pytest.raises(TransportError, match="not open"):
        world.transports[0].barrier()


def test_two_worlds_at_once() -> None:
    """Communicators of one process do not disturb each other."""
    with World(ThreadsTransport, 3) as one, World(ThreadsTransport, 2) as other:
        side = threading.Thread(target=other.run, args=(random_collectives(1, 2, 20, 3000),))
        side.start()
        one.run(random_collectives(2, 3, 20, 3000))
        side.join(160)
        assert not side.is_alive()


def test_large_tensors_in_shares() -> None:
    """More than one share a rank, in place."""
    with World(ThreadsTransport, 2) as world:

        def body(transport: Transport, rank: int) -> None:
            x = np.full(3 * threads.SHARE_BYTES // 4 + 5, rank + 1, np.float32)
            transport.allreduce(buffer(x), buffer(x), ReduceOp.Sum)
            assert (x == 3).all()

        world.run(body)


@pytest.mark.parametrize("lists", [{"plugins": "ddl-shm"}, {"plugins_off": "ddl-conform"}])
def test_it_serves_whatever_the_lists_of_plugins_say(lists: dict[str, object]) -> None:
    """The user's lists may exclude ddl-conform, but a program that makes a world of threads already uses ddl-conform."""
    with ddl_conform.world.World(2, settings=lists) as world:
        routes = world.run(lambda rank, job: job.stats()["routes"][0])
    assert all(route.startswith("threads") for route in routes), routes
