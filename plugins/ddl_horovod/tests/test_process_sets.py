"""Process sets of horovod's packages: by ranks and by communicators, the same and different ones on the ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from ddl_horovod.process_sets import ProcessSet, add_process_set, register

from ddlcore.api import global_process_set, process_sets
from ddlcore.errors import InvalidArgument
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from plugins.ddl_horovod.tests.test_scripts import PROGRAMS, RUN, output_of
from tests.launch.foreign import why_no_mpich


def test_all_ranks_may_pass_the_same_sets() -> None:
    """The sets are numbered in the order of the list. A set that is registered already is found again."""

    def program(rank: int, job: Job) -> Any:
        sets = [ProcessSet([2, 0]), ProcessSet([1])]
        assert sets[0].included() is (rank != 1) and sets[0].size() is None
        register(sets, None)
        register(again := [ProcessSet([0, 2])], None)
        return [one.process_set_id for one in (*sets, *again)], sets[0].size(), process_sets()

    everyone = {0: [0, 1, 2], 1: [0, 2], 2: [1]}
    assert run_world(3, program) == [([1, 2, 1], 2, everyone)] * 3


def test_ranks_may_pass_different_sets() -> None:
    """This is so if a communicator was split. All ranks register each set, in the order of the places in the lists."""

    def program(rank: int, job: Job) -> Any:
        own = ProcessSet([one for one in range(4) if one % 2 == rank % 2])
        register([own, ProcessSet([0])], None)
        return own.process_set_id, own.rank(), process_sets()

    everyone = {0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 3], 3: [0]}
    assert run_world(4, program) == [(1 + rank % 2, rank // 2, everyone) for rank in range(4)]


def test_a_set_twice_is_an_error_and_the_job_goes_on() -> None:
    """The error names the place in the list. The other sets are registered."""

    def program(rank: int, job: Job) -> Any:
        first, second = ProcessSet([0]), ProcessSet([0])
        with pytest.raises(
            InvalidArgument, match=r"process_sets entry number 1 is a duplicate.*number 2 is a duplicate"
        ):
            register([first, second, ProcessSet([0, 1])], None)
        return first.process_set_id, second.process_set_id

    assert run_world(2, program) == [(1, None)] * 2


def test_texts_name_the_communicator() -> None:
    """This is true of the set of all ranks, and of sets that are registered by their ranks alone."""

    def program(rank: int, job: Job) -> list[str]:
        given, made = add_process_set(ProcessSet([1])), add_process_set([0])
        assert isinstance(made, ProcessSet) and made.included() is (rank == 0)
        return [str(one) for one in (global_process_set, given, made)]

    texts = [
        f"ProcessSet(process_set_id={number}, ranks={ranks}, mpi_comm=None)"
        for number, ranks in enumerate(([0, 1], [1], [0]))
    ]
    assert run_world(2, program) == [texts] * 2


def test_what_is_neither_ranks_nor_a_communicator_is_refused() -> None:
    """The error is raised when the set is made. The set of all ranks is a ProcessSet, too."""
    with pytest.raises(InvalidArgument, match="takes ranks or a communicator of MPI, not int"):
        ProcessSet(3)
    assert isinstance(global_process_set, ProcessSet) and not isinstance([0], ProcessSet)
    assert str(ProcessSet([1, 0])) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_mpich()), reason=why_no_mpich() or "there is MPI")
def test_sets_of_communicators() -> None:
    """Under horovodrun --mpi, process sets are made of a communicator of MPI that was split."""
    command = [*RUN, "-np", "4", "--mpi", sys.executable, str(PROGRAMS / "communicators.py")]
    code, out, err = output_of(command)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] sums {2 if rank % 2 == 0 else 4}" for rank in range(4)], err
