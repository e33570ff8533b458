"""Run pytest on a small project that has the conftest.py of this repository, to test this conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.architecture.source import ROOT

__all__ = ["project", "run"]


def project(folder: Path, tests: str, seconds: str = "{}", grace_s: float = 10.0) -> Path:
    """Write a project with one file of tests. ``grace_s``: how long may what a test leaves take to end by itself."""
    rules = (ROOT / "conftest.py").read_text()
    assert "_GRACE_S = 10.0" in rules
    (folder / "conftest.py").write_text(rules.replace("_GRACE_S = 10.0", f"_GRACE_S = {grace_s}"))
    (folder / "tests").mkdir()
    (folder / "tests" / "seconds.json").write_text(seconds)
    (folder / "test_inner.py").write_text(tests)
    return folder


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of the project, as if no other pytest were running."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    return subprocess.run([*command, str(folder), *options], capture_output=True, text=True, timeout=200, env=environ)
