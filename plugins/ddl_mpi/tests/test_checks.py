"""`ddl doctor` names a release of Open MPI that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddl_mpi.checks import KnownBadMpi

from ddlcore.contracts.check import HostView, Seen

MPIRUN = "mpirun (Open MPI) {}\n\nReport bugs to http://www.open-mpi.org/community/help/\n"


def findings(view: HostView) -> dict[str, str]:
    check = KnownBadMpi()
    return {one.what: one.fix for one in check.judge([Seen("node1", 0, 0, check.look(view))])}


@pytest.mark.parametrize(("version", "bad"), [("3.1.3", True), ("3.1.2", False), ("4.0.0", False), ("5.0.11", False)])
def test_open_mpi(tmp_path: Path, version: str, bad: bool) -> None:
    """The release is found by the version that mpirun prints; only 3.1.3 hangs."""
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mpirun").write_text(MPIRUN.format(version))
    found = findings(HostView("node1", root=str(tmp_path)))
    assert list(found) == ([f"Open MPI {version} on node1"] if bad else [])
    assert all("3.1.2" in fix and "4.0.0" in fix for fix in found.values())


def test_mpirun_is_asked(tmp_path: Path) -> None:
    """On a real host, the mpirun on the rank's PATH is run."""
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\ntest \"$1\" = --version && echo 'mpirun (Open MPI) 3.1.3'\n")
    program.chmod(0o755)
    assert "Open MPI 3.1.3 on node1" in findings(HostView("node1", {"PATH": f"{tmp_path}:/bin:/usr/bin"}))
    program.write_text("#!/bin/sh\nexit 1\n")
    assert findings(HostView("node1", {"PATH": f"{tmp_path}:/bin:/usr/bin"})) == {}
