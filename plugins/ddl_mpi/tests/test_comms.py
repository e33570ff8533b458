"""Which ranks of a job are in a communicator of mpi4py, and which communicators ``init`` refuses.

A stand-in takes the place of mpi4py, because importing mpi4py.MPI would initialize MPI in the process of the tests.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from ddl_mpi.comms import MpiCommunicators

import ddlcore as ddl
from ddlcore.plug.settings import settings_of


class Comm:
    """A communicator whose processes have the ranks ``ranks`` in the job, in the order of their ranks in MPI."""

    def __init__(self, ranks: Sequence[int] = (), is_inter: bool = False) -> None:
        self._ranks = ranks
        self._is_inter = is_inter

    def Get_size(self) -> int:  # mpi4py's name
        return len(self._ranks)

    def Is_inter(self) -> bool:
        return self._is_inter

    def Allgather(self, mine: Sequence[Any], everyone: Sequence[Any]) -> None:
        assert mine[1:] == everyone[1:] == [1, "INT64_T"]
        assert mine[0].itemsize == everyone[0].itemsize == 8
        assert mine[0].tolist() == [self.own]
        everyone[0][:] = array("q", self._ranks)

    own = -1  # the rank of the process that calls, in the job


Comm.__module__ = "mpi4py.MPI"


class Freed(Comm):
    """A communicator after ``Free()``, which equals COMM_NULL and allows no call."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Freed)

    __hash__ = None  # type: ignore[assignment]

    def Is_inter(self) -> bool:
        raise AssertionError("MPI would end the process")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that puts a stand-in of mpi4py in place, whose COMM_WORLD has so many processes."""

    def begin(size: int) -> None:
        mpi4py, mpi = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
        parts = {"COMM_NULL": Freed(), "COMM_WORLD": Comm(range(size)), "INT64_T": "INT64_T"}
        vars(mpi).update(parts)
        mpi4py.__spec__ = ModuleSpec("mpi4py", None)  # so that it counts as installed
        vars(mpi4py).update(MPI=mpi)
        monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)

    return begin


def ranks_of(comm: Comm, rank: int, size: int) -> list[int]:
    comm.own = rank
    return list(MpiCommunicators().ranks_of(comm, rank, size))


@pytest.mark.parametrize("ranks", [(0, 2), (3, 1), (2, 3, 0, 1), (1,)])
def test_ranks_come_in_the_order_of_the_communicator(begun: Callable[[int], None], ranks: tuple[int, ...]) -> None:
    """Every process of a communicator gets the same ranks, as the job numbers them, in the order of MPI's ranks."""
    begun(4)
    for rank in ranks:
        assert ranks_of(Comm(ranks), rank, 4) == list(ranks)


@pytest.mark.parametrize(
    ("comm", "world", "words"),
    [
        (Freed(), 2, r"comm is MPI\.COMM_NULL, to which no process belongs"),
        (Comm((0, 1), is_inter=True), 2, r"comm is an intercommunicator; .*comm\.Merge\(\)"),
        (Comm((0,)), 1, r"MPI did not start this process, and knows none of the other 1; .*ddl run --backend mpi"),
        (Comm((0, 0)), 2, r"not ranks of one job \(their ranks are \[0, 0\]\)"),
    ],
    ids=["null or freed", "intercommunicator", "not started by MPI", "of two jobs"],
)
def test_a_wrong_communicator_gives_one_line(begun: Callable[[int], None], comm: Comm, world: int, words: str) -> None:
    """The error says what is wrong and what to do."""
    begun(world)
    with pytest.raises(ValueError, match=f"^init: [^\n]*{words}[^\n]*$"):
        ranks_of(comm, 0, 2)


def test_a_process_alone_may_pass_its_own_communicator(begun: Callable[[int], None]) -> None:
    begun(1)
    assert ranks_of(Comm((0,)), 0, 1) == [0]


def test_the_types_of_mpi4py_belong_to_this_plugin() -> None:
    """The core finds the plugin by the module of the communicator's class, and asks it about no other object."""
    _, registry = settings_of({}, warns=False)
    provider = registry.communicators_of(Comm())
    assert provider is not None
    assert registry.load(provider) is MpiCommunicators
    assert registry.communicators_of(object()) is None


def test_init_takes_a_communicator_after_it_has_refused_another(begun: Callable[[int], None]) -> None:
    """A refused communicator leaves no job behind. The process alone then begins a job by its own communicator."""
    begun(1)
    own = Comm((0,))
    own.own = 0
    for comm, words in ((Freed(), "COMM_NULL"), (Comm(is_inter=True), "intercommunicator"), (own.Get_size, "a list")):
        with pytest.raises(ValueError, match=words):
            ddl.init(comm=comm)
        assert not ddl.is_initialized()
    ddl.init(comm=own)
    try:
        assert (ddl.rank(), ddl.size()) == (0, 1)
    finally:
        ddl.shutdown()
