"""Helpers that Horovod's packages export."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from ddl_horovod.timelines import start_timeline, stop_timeline
from horovod.common import util
from horovod.common.basics import HorovodBasics
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from horovod.runner.common.util.env import get_env_rank_and_size

from ddlcore.api import arrays, init, shutdown
from ddlcore.types import Average, Sum


def test_lists_are_split_evenly() -> None:
    """The first parts are longer, and the last ones may be empty."""
    assert util.split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    assert util.split_list([1], 3) == [[1], [], []]


@pytest.mark.parametrize(("ranks", "answer"), [(0, False), (1, True), (2, True), (3, False), (8, True), (12, False)])
def test_powers_of_two(ranks: int, answer: bool) -> None:
    """1, 2, 4 and so on are powers of two; 0 is not."""
    assert util.num_rank_is_power_2(ranks) is answer


def test_versions_are_compared_as_versions() -> None:
    """As texts, 2.10.0 would come before 2.9.1."""
    assert util.is_version_greater_equal_than("2.10.0", "2.9.1") is True
    assert util.is_version_greater_equal_than("2.9.0", "2.9.1") is False
    for wrong in (("2.9", "2.9"), (2, "2.9.1")):
        with pytest.raises(ValueError, match="two versions are compared"):
            util.is_version_greater_equal_than(*wrong)


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ``with`` block, also after an error, the variables are as they were before."""
    monkeypatch.setenv("DDL_TEST_OLD", "1")
    monkeypatch.delenv("DDL_TEST_NEW", raising=False)
    seen: list[str | None] = []

    def look() -> None:
        with util.env(DDL_TEST_OLD=None, DDL_TEST_NEW="2"):
            seen.extend(os.environ.get(name) for name in ("DDL_TEST_OLD", "DDL_TEST_NEW"))
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert seen == [None, "2"]
    assert os.environ["DDL_TEST_OLD"] == "1" and "DDL_TEST_NEW" not in os.environ


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework counts as installed only if ddl's package for it is installed, too."""
    assert util.extension_available("torch") and not util.extension_available("jax")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "ddl_torch" else name)
    with pytest.raises(ImportError, match=r"horovod\.torch needs ddl-torch"):
        util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    assert not util.gpu_available("torch")
    assert (util.ddl_built(), util.ccl_built()) == (False, False)
    assert util.get_extension_full_path("/a/b.py", "c", "lib").startswith("/a/c/lib.")


def test_the_operation_of_two_arguments() -> None:
    """The operation is ``op``, or what the older argument ``average`` says."""
    resolve = util.get_average_backwards_compatibility_fun(HorovodBasics())
    assert (resolve(Sum, None), resolve(None, None)) == (Sum, Average)
    with pytest.warns(DeprecationWarning, match="average"):
        assert resolve(None, False) == Sum


def test_another_version_is_an_import_error() -> None:
    """The ImportError names both versions."""
    error = HorovodVersionMismatchError("torch", "2.0", "1.9")
    assert isinstance(error, ImportError) and (error.name, error.version, error.installed_version) == (
        "torch",
        "2.0",
        "1.9",
    )
    assert str(error) == get_version_mismatch_message("torch", "2.0", "1.9")


def test_the_environment_knows_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are those of horovodrun or of an MPI. A rank without a size is an error."""
    for launcher in ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_"):
        monkeypatch.delenv(f"{launcher}RANK", raising=False)
        monkeypatch.delenv(f"{launcher}SIZE", raising=False)
    assert get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "2")
    with pytest.raises(RuntimeError, match="only one of PMI_RANK and PMI_SIZE"):
        get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "4")
    assert get_env_rank_and_size() == (2, 4)
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    assert get_env_rank_and_size() == (1, 3)


def test_basics_are_those_of_the_job() -> None:
    """The methods of HorovodBasics describe the current job."""
    basics = HorovodBasics(__file__, "library")
    assert not basics.is_initialized()
    basics.init(process_sets=[])
    try:
        assert (basics.rank(), basics.size(), basics.local_rank(), basics.local_size()) == (0, 1, 0, 1)
        assert (basics.cross_rank(), basics.cross_size(), basics.is_homogeneous()) == (0, 1, True)
        assert (basics.Average, basics.Sum) == (Average, Sum)
        assert basics.gloo_enabled() is False and basics.rocm_built() is False and basics.ddl_built() is False
    finally:
        basics.shutdown()
    assert not basics.is_initialized()


def test_a_timeline_follows_another(tmp_path: Path) -> None:
    """A call with another file ends the first timeline, and a call with the same file changes nothing."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    init()
    try:
        for number, file in enumerate((first, first, second)):
            start_timeline(str(file))
            arrays.allreduce(np.ones(1), f"tensor{number}")
        stop_timeline()
        stop_timeline()
        start_timeline(str(tmp_path / "third.json"), mark_cycles=True)
    finally:
        shutdown()
    assert "tensor0" in first.read_text() and "tensor1" in first.read_text() and "tensor2" not in first.read_text()
    assert "tensor2" in second.read_text() and "tensor1" not in second.read_text()
    assert (tmp_path / "third.json").exists()


def test_a_state_of_ones_own_trains() -> None:
    """A class that is derived from State works with the function that Horovod's run_fn makes."""

    class Count(State):
        def __init__(self) -> None:
            super().__init__(bcast_object=lambda value: value, get_rank=lambda: 0)
            self.count = self.saved = 0

        def save(self) -> None:
            self.saved = self.count

        def restore(self) -> None:
            self.count = self.saved

        def sync(self) -> None:
            self.count = self._bcast_object(self.count) + self._rank()

    def train(state: Count, to: int) -> int:
        while state.count < to:
            state.count += 1
            state.commit()
        return state.saved

    init()
    try:
        assert run_fn(train, lambda: None)(Count(), 3) == 3
        objects = ObjectState(lambda value: value, lambda: 0, epoch=4)
        assert run_fn(lambda state: state.epoch, lambda: None)(objects) == 4
    finally:
        shutdown()
