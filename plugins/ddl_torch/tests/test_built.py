"""Tests the functions by which Horovod scripts find out what is installed; most must answer before init."""

from __future__ import annotations

import ddl_torch as ddl
import pytest

from ddlcore.testing import run_world


@pytest.mark.parametrize("name", ["mpi", "gloo", "nccl", "ccl", "ddl"])
def test_what_is_not_installed_is_not_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no other plugin is allowed, none of these transports counts as built, even before init."""
    monkeypatch.setenv("DDL_PLUGINS", "torch")
    assert not getattr(ddl, f"{name}_built")()


def test_what_a_job_uses_is_known_within_it() -> None:
    """A world of threads uses neither MPI nor Gloo.

    Asking for MPI's thread support then raises an error that says what to do.
    """

    def program(rank: int, job: object) -> None:
        assert not ddl.mpi_enabled()
        assert not ddl.gloo_enabled()
        with pytest.raises(ValueError, match="--backend mpi"):
            ddl.mpi_threads_supported()

    run_world(2, program)
    with pytest.raises(ValueError, match="not been initialized"):
        ddl.mpi_enabled()
