"""What bad calls are told, and that nothing else happens: memory that must not be written, names, both error classes."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import arrays
from ddlcore.errors import DdlInternalError
from ddlcore.messages.coding import decode_to_coordinator, encode
from ddlcore.messages.to_coordinator import Bye
from ddlcore.process.job import Job
from ddlcore.testing import World, run_world

pytestmark = pytest.mark.timeout(60)

COUNT = 2048  # a page and more of float32


@pytest.fixture(params=["threads", "shm"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def read_only(tmp_path: Path) -> Callable[[float], Any]:
    """Makes an array in memory that the kernel lets nobody write: to write it ends the process."""

    def make(value: float) -> Any:
        file = tmp_path / f"{value}.{threading.get_ident()}"
        file.write_bytes(np.full(COUNT, value, np.float32).tobytes())
        with open(file, "rb") as opened:
            return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.float32)

    return make


WRITING: list[tuple[str, Callable[[Any], Any]]] = [
    ("allreduce_", lambda a: ddl.allreduce_(a)),
    ("allreduce_ by name", lambda a: ddl.allreduce_(a, name="n")),
    ("allreduce_async_", lambda a: ddl.allreduce_async_(a)),
    ("grouped_allreduce_", lambda a: ddl.grouped_allreduce_([np.ones(3, np.float32), a])),
    ("broadcast_", lambda a: ddl.broadcast_(a, 0)),
    ("output", lambda a: arrays._ops.allreduce_async(np.ones(COUNT, np.float32), output=a)),
    ("request", lambda a: arrays._ops.persistent_allreduce(a, name="r")),
]


@pytest.mark.parametrize("write", [one for _, one in WRITING], ids=[name for name, _ in WRITING])
def test_read_only_memory_is_not_written(read_only: Callable[[float], Any], write: Callable[[Any], Any]) -> None:
    """Every verb that writes says what to do; the job goes on, and its order of calls is as it was."""

    def program(rank: int, job: Job) -> None:
        for array in (read_only(1.0), np.frombuffer(bytes(4 * COUNT), np.float32)):
            with pytest.raises(ddl.InvalidArgument, match=r"is read-only, and this call writes to it; pass a copy"):
                write(array)
        assert ddl.allreduce(np.full(2, float(rank)), op=ddl.Sum).tolist() == [1, 1]

    run_world(2, program)


def test_read_only_memory_is_read(backend: str, read_only: Callable[[float], Any]) -> None:
    """No verb that makes new arrays uses its argument as scratch memory, with factors, compression and in replay too."""

    def program(rank: int, job: Job) -> None:
        array = read_only(float(rank + 1))
        for _ in range(6):
            assert (ddl.allreduce(array, name="a") == 1.5).all()
            assert (ddl.allreduce(array, name="s", op=ddl.Sum, prescale_factor=2.0) == 6).all()
            assert (ddl.allreduce(array, name="c", compression="fp16") == 1.5).all()
            assert (ddl.reducescatter(array, name="r", prescale_factor=2.0) == 3).all()
            assert (ddl.reducescatter(array, name="rc", compression="fp16") == 1.5).all()
            assert (ddl.broadcast(array, 1, name="b") == 2).all()
            assert ddl.allgather(array, name="g").sum() == 3 * COUNT
            assert ddl.alltoall(array, name="t").sum() == 1.5 * COUNT
            assert (ddl.grouped_allreduce([array, array[:7]], name="gr")[1] == 1.5).all()

    with World(2, backend=backend) as world:
        world.run(program)


def test_an_array_that_became_read_only() -> None:
    """Under one name, at one address: it is refused also where the writable one is known from step to step."""

    def program(rank: int, job: Job) -> None:
        array = np.full(16, float(rank))
        for _ in range(8):
            ddl.allreduce_(array, name="x")
        array.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            ddl.allreduce_(array, name="x")
        assert (array == 0.5).all()
        array.flags.writeable = True
        array[:] = rank
        assert (ddl.allreduce_(array, name="x", op=ddl.Sum) == 1).all()

    run_world(2, program)


def _overlapping() -> list[tuple[str, Callable[[], Any]]]:
    base = np.arange(32, dtype=np.float32)
    ops = arrays._ops
    return [
        ("output", lambda: ops.allreduce_async(base[:8], output=base[4:12])),
        ("output of a broadcast", lambda: ops.broadcast_async(base[4:12], 0, output=base[:8])),
        ("twice", lambda: ddl.grouped_allreduce_([base, base])),
        ("a view of it", lambda: ddl.grouped_allreduce_([base, base[:2]])),
        ("a view of it, first", lambda: ddl.grouped_allreduce_([base[30:], base[:4], base])),
        (
            "one's output, another's input",
            lambda: ops.grouped_allreduce_async([base[:4], base[8:12]], outputs=[base[16:20], base[2:6]]),
        ),
        ("outputs", lambda: ops.grouped_allreduce_async([base[:4], base[8:12]], outputs=[base[16:20], base[18:22]])),
    ]


@pytest.mark.parametrize("name", [name for name, _ in _overlapping()])
def test_memory_that_overlaps_is_refused(name: str) -> None:
    """Where some of it is written; nothing is."""

    def program(rank: int, job: Job) -> None:
        with pytest.raises(ddl.InvalidArgument, match="overlap in memory"):
            dict(_overlapping())[name]()
        assert ddl.allreduce(np.ones(2), op=ddl.Sum).tolist() == [2, 2]

    run_world(2, program)


def test_memory_that_may_overlap() -> None:
    """What is only read; neighbours; nothing; a tensor and its own output in one place."""

    def program(rank: int, job: Job) -> None:
        base, ops = np.ones(16), arrays._ops
        assert [len(one) for one in ddl.grouped_allreduce([base, base[:2], base])] == [16, 2, 16]
        ddl.grouped_allreduce_([base[:8], base[8:], base[:0], base[3:3]], op=ddl.Sum)
        assert (base == 2).all()
        ops.grouped_allreduce_async([base[:8], base[8:]], outputs=[base[:8], base[8:]], op=ddl.Sum).wait()
        assert (base == 4).all()
        assert ddl.allreduce_(np.array(3.0)) == 3  # of no dimension

    run_world(2, program)


BAD: list[tuple[str, Callable[[Any], Any]]] = [
    ("op", lambda x: ddl.allreduce(x, op=17)),
    ("adasum", lambda x: ddl.allreduce(x, op=ddl.Adasum)),
    ("type", lambda x: ddl.allreduce([1.0])),
    ("dtype", lambda x: ddl.allreduce(x.astype(np.uint32))),
    ("byte order", lambda x: ddl.allreduce(x.astype(">f4"))),
    ("layout", lambda x: ddl.allreduce(x[::2])),
    ("compression", lambda x: ddl.allreduce(x, compression="zip")),
    ("bool", lambda x: ddl.allreduce(x > 0)),
    ("empty group", lambda x: ddl.grouped_allreduce([])),
    ("empty group in place", lambda x: ddl.grouped_allreduce_([])),
    ("outputs", lambda x: arrays._ops.grouped_allreduce_async([x, x], outputs=[x])),
    ("root", lambda x: ddl.broadcast(x, 5)),
    ("root of an object", lambda x: ddl.broadcast_object(1, 5)),
    ("splits", lambda x: ddl.alltoall(x, splits=[1])),
    ("rows", lambda x: ddl.allgather(np.float32(x.sum()).reshape(()))),
    ("process set", lambda x: ddl.allreduce(x, process_set=ddl.ProcessSet([0]))),
    ("handle", lambda x: ddl.synchronize(7)),  # type: ignore[arg-type]
    ("in flight", lambda x: [ddl.allreduce_async(x, name="f") for _ in range(2)]),
    ("surrogate", lambda x: ddl.allreduce(x, name="a\ud800")),
    ("surrogate in place", lambda x: ddl.allreduce_(x, name="a\ud800")),
    ("surrogate of a group", lambda x: ddl.grouped_allreduce([x], name="a\ud800")),
    ("surrogate of an object", lambda x: ddl.allgather_object(1, name="a\ud800")),
    ("name of another type", lambda x: ddl.allgather(x, name=5)),  # type: ignore[arg-type]
    ("long name", lambda x: ddl.broadcast(x, 0, name="ä" * 2049)),
]


@pytest.mark.parametrize("call", [one for _, one in BAD], ids=[name for name, _ in BAD])
def test_a_bad_argument_is_a_value_and_a_runtime_error(call: Callable[[Any], Any]) -> None:
    """On the rank that made the call, and it alone: what all call next has its result."""

    refused = threading.Event()

    def program(rank: int, job: Job) -> None:
        x = np.ones(4, np.float32)
        if rank == 0:
            with pytest.raises(ddl.InvalidArgument) as told:
                call(x)
            assert isinstance(told.value, ValueError) and isinstance(told.value, RuntimeError)
            assert DdlInternalError not in type(told.value).__mro__
            refused.set()
        assert refused.wait(40)  # before that, the other rank's call would end the one that is in flight
        if any(one is call for name, one in BAD if name == "in flight"):
            assert rank == 0 or (ddl.allreduce(x, name="f") == 1).all()
        assert (ddl.allreduce(x, name="after", op=ddl.Sum) == 2).all()
        assert (ddl.allreduce(x, op=ddl.Sum) == 2).all()  # without a name: none was used up

    run_world(2, program)


def test_names_at_the_limits() -> None:
    """The longest one, and any text; an empty name is none, as in Horovod: such calls are paired by their order."""

    def program(rank: int, job: Job) -> None:
        for name in ("ä" * 2048, "\0", "a b/c:d[0]", "名前"):
            for _ in range(5):
                assert ddl.allreduce_(np.ones(2), name=name, op=ddl.Sum).tolist() == [2, 2]
            assert ddl.allgather_object(rank, name=name) == [0, 1]
        first, second = (ddl.allreduce_async(np.full(2, float(i)), name="", op=ddl.Sum) for i in range(2))
        assert second.wait().tolist() == [2, 2] and first.wait().tolist() == [0, 0]
        assert ddl.allreduce_(np.ones(2), name="", op=ddl.Sum).tolist() == [2, 2]
        assert ddl.allgather_object(rank, name="") == [0, 1]

    run_world(2, program)


def test_text_that_is_no_unicode_travels_escaped() -> None:
    """As in the message of an exception of the user's, which ends up in a Bye."""
    said = decode_to_coordinator(encode(Bye("it raised ValueError: \ud800", broken=True)))
    assert said == Bye("it raised ValueError: \\ud800", broken=True)
