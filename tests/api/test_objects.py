"""Objects that ranks send to each other: how they are pickled, and which of them need a digest."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import objects
from ddlcore.api.objects import _pickled, _stays_on_host
from ddlcore.hooks import TransportProvider
from ddlcore.process.job import Job
from ddlcore.runtime.routes import Route
from ddlcore.testing import World
from ddlcore.types import Kind


class Own:
    """A class that other ranks could import."""


PLAIN: list[Any] = [
    None,
    True,
    -(2**70),
    1.5,
    "text",
    b"bytes",
    [1, (2, {3: {4}})],
    {"a": [None], "b": frozenset({1})},
]
OTHERS: list[Any] = [Own, Own(), lambda: 1, np.float32(1.0), np.arange(3), [1, {"f": len}], ValueError("x"), 1 + 2j]


def test_plain_data_needs_no_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The received object is equal, and keeps its shared parts and its cycles."""
    import cloudpickle

    monkeypatch.setattr(cloudpickle, "dumps", None)
    shared = [1]
    recursive: list[Any] = [shared, shared]
    recursive.append(recursive)
    back = pickle.loads(_pickled(recursive))
    assert back[0] is back[1]
    assert back[2] is back
    for one in PLAIN:
        assert pickle.loads(_pickled(one)) == one


@pytest.mark.parametrize("one", OTHERS, ids=lambda one: type(one).__name__)
def test_everything_else_is_left_to_cloudpickle(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """cloudpickle pickles functions and classes by value if other ranks cannot import them."""
    import cloudpickle

    calls: list[Any] = []
    real = cloudpickle.dumps

    def counted(given: Any) -> bytes:
        calls.append(given)
        return bytes(real(given))

    monkeypatch.setattr(cloudpickle, "dumps", counted)
    assert type(pickle.loads(_pickled(one))) is not None
    assert len(calls) == 1


def test_what_cannot_be_pickled_raises_as_before() -> None:
    with pytest.raises(TypeError, match="generator"):
        _pickled(one for one in [1])


@pytest.mark.parametrize(
    ("providers", "size", "stays"),
    [
        ({"shm": {"one_host": True}}, 2, True),
        ({"threads": {"in_process": True}}, 2, True),
        ({"gloo": {}}, 2, False),
        ({"gloo": {}}, 1, True),
        ({"hierarchical": {}, "shm": {"one_host": True}, "gloo": {}}, 4, False),
    ],
)
def test_only_memory_of_the_job_s_own_needs_no_digest(
    providers: Mapping[str, Mapping[str, Any]], size: int, stays: bool
) -> None:
    """Sockets need a digest even on one host, because other users may be able to reach them."""
    first, *others = (replace(TransportProvider(name, "a:B"), **flags) for name, flags in providers.items())
    route = Route(first, "a test", tuple(Route(one, "a part") for one in others))
    sets = SimpleNamespace(route=lambda set_id: route, members=lambda set_id: tuple(range(size)))
    assert _stays_on_host(cast("Any", SimpleNamespace(sets=sets)), 0) is stays


def test_the_transport_of_allgathers_decides() -> None:
    shm, gloo = TransportProvider("shm", "a:B", one_host=True), TransportProvider("gloo", "a:B")
    for one, other, stays in ((shm, gloo, False), (gloo, shm, True)):
        route = Route(one, "a test", kinds={Kind.ALLGATHER: Route(other, "a test")})
        sets = SimpleNamespace(route=lambda set_id, route=route: route, members=lambda set_id: (0, 1))
        assert _stays_on_host(cast("Any", SimpleNamespace(sets=sets)), 0) is stays


@pytest.mark.parametrize("announced", [False, True], ids=["on a host", "announced"])
def test_names_are_kept_apart_from_tensors(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object and a tensor may have the same name. Each call returns the object of this call."""
    monkeypatch.setattr(objects, "_stays_on_host", lambda job, set_id: not announced)

    def train(rank: int, job: Job) -> None:
        for step in range(8):
            assert ddl.broadcast_object({"s": step} if rank else None, 1, name="x") == {"s": step}
            assert ddl.broadcast_object("y" * step if not rank else None, 0, name="x") == "y" * step
            assert ddl.allgather_object((rank, step), name="x") == [(0, step), (1, step)]
            assert ddl.allgather(np.array([rank], np.uint8), name="x").tolist() == [0, 1]

    with World(2, settings={"replay": True}) as world:
        world.run(train)
