"""What Horovod's scripts ask before they choose a way: answered before init, and honestly."""

from __future__ import annotations

import ddl_torch as ddl
import pytest

from ddlcore.testing import run_world


@pytest.mark.parametrize("name", ["mpi", "gloo", "nccl", "ccl", "ddl"])
def test_what_is_not_installed_is_not_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no other plugin allowed, no such transport is there; nobody needs to be initialized."""
    monkeypatch.setenv("DDL_PLUGINS", "torch")
    assert not getattr(ddl, f"{name}_built")()


def test_what_a_job_uses_is_known_within_it() -> None:
    """A world of threads uses neither; asking for MPI's threads then is an error that says what to do."""

    def program(rank: int, job: object) -> None:
        assert not ddl.mpi_enabled()
        assert not ddl.gloo_enabled()
        with pytest.raises(ValueError, match="--backend mpi"):
            ddl.mpi_threads_supported()

    run_world(2, program)
    with pytest.raises(ValueError, match="not been initialized"):
        ddl.mpi_enabled()
