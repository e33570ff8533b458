"""The table of known-bad versions: what meets a row, what does not, and what every row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlcore.builtin.checks.known import KNOWN_BAD
from ddlcore.builtin.checks.versions import KnownBadCheck, VersionsCheck
from ddlcore.contracts.check import HostView, Seen

MPIRUN = "mpirun (Open MPI) {}\n\nReport bugs to http://www.open-mpi.org/community/help/\n"


def findings(view: HostView) -> dict[str, str]:
    check = KnownBadCheck()
    return {one.what: one.cure for one in check.judge([Seen("node1", 0, 0, check.look(view))])}


@pytest.mark.parametrize(("version", "bad"), [("3.1.3", True), ("3.1.2", False), ("4.0.0", False), ("5.0.11", False)])
def test_open_mpi(tmp_path: Path, version: str, bad: bool) -> None:
    """By what mpirun says of itself; only 3.1.3 hangs."""
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mpirun").write_text(MPIRUN.format(version))
    found = findings(HostView("node1", root=str(tmp_path)))
    assert list(found) == ([f"Open MPI {version} on node1"] if bad else [])
    assert all("3.1.2" in cure and "4.0.0" in cure for cure in found.values())


def test_mpirun_is_asked(tmp_path: Path) -> None:
    """On a host that is no record: the one on the rank's PATH."""
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\ntest \"$1\" = --version && echo 'mpirun (Open MPI) 3.1.3'\n")
    program.chmod(0o755)
    assert "Open MPI 3.1.3 on node1" in findings(HostView("node1", {"PATH": f"{tmp_path}:/bin:/usr/bin"}))
    program.write_text("#!/bin/sh\nexit 1\n")
    assert findings(HostView("node1", {"PATH": f"{tmp_path}:/bin:/usr/bin"})) == {}


INSTALLED = {
    "two-nccl-wheels": ({"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.7"}, "nvidia-nccl-cu12 2.27.3 beside"),
    "two-tensorflows": ({"tensorflow": "2.21.0", "tensorflow-cpu": "2.20.0"}, "tensorflow 2.21.0 beside"),
    "mxnet-numpy": ({"mxnet": "1.8.0", "numpy": "1.26.4"}, "mxnet 1.8.0 beside numpy 1.26.4"),
    "scikit-optimize-np-int": ({"scikit-optimize": "0.9.0"}, "scikit-optimize 0.9.0"),
}


@pytest.mark.parametrize("name", INSTALLED)
def test_what_is_installed(name: str) -> None:
    """Each row is met by its own versions, and says what to type."""
    distributions, words = INSTALLED[name]
    found = findings(HostView("node1", distributions=distributions))
    assert [what.startswith(words) for what in found] == [True]
    assert all("pip " in cure for cure in found.values())


def test_every_row_was_met() -> None:
    """No row of the table is without a test."""
    assert {row.name for row in KNOWN_BAD} == {*INSTALLED, "openmpi-3.1.3"}


def test_what_is_fine() -> None:
    """One wheel of each kind, and versions from which on it is repaired."""
    fine = {"nvidia-nccl-cu12": "2.27.3", "tensorflow-cpu": "2.21.0", "mxnet": "1.9.1", "numpy": "1.26.4"}
    assert findings(HostView("node1", distributions={**fine, "scikit-optimize": "0.10.2"})) == {}


def test_two_versions_of_a_framework() -> None:
    """The majority's version is what the other host is told to install."""
    check = VersionsCheck()
    views = [
        HostView(name, frameworks={"numpy": version}, python="3.11.7", ddl="0.1.0")
        for name, version in (("node1", "2.1.0"), ("node2", "1.26.4"), ("node3", "2.1.0"))
    ]
    found = list(check.judge([Seen(view.name, i, 0, check.look(view)) for i, view in enumerate(views)]))
    assert [(one.what, one.cure) for one in found] == [
        ("numpy differs: 2.1.0 on node1, node3; 1.26.4 on node2", "on node2: pip install numpy==2.1.0")
    ]


def test_what_was_looked_for_is_said() -> None:
    """An empty line would leave open whether anything was."""
    check = KnownBadCheck()
    assert check.line([Seen("host0", 0, 0, {})]) == f"none of {len(KNOWN_BAD)}"
    assert check.line([Seen("host0", 0, 0, {"openmpi-3.1.3": "Open MPI 3.1.3"})]) == ""
