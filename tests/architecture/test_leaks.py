"""The check that tests leave nothing behind (conftest.py) bites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

LEAKS = {
    "process": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3)'])",
    "orphan": "subprocess.run(['sh', '-c', 'sleep 3 & exit'])",
    "thread": "threading.Thread(target=time.sleep, args=(3,), name='ddl-engine-0', daemon=True).start()",
    "socket": "kept.append(socket.socket(socket.AF_UNIX)); kept[0].bind(f'\\0ddl-leak-{os.getpid()}')",
    "segment": "open('/dev/shm/ddl-leak', 'w').close()",
    "variable": "os.environ['DDL_LEAK'] = '1'",
    "nothing": "subprocess.run([sys.executable, '-c', ''])",
}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
def test_each_kind_of_leak_fails_the_test_that_leaves_it(tmp_path: Path) -> None:
    """What stays is an error at its test, whatever it is; where nothing does, there is none."""
    rules = (ROOT / "conftest.py").read_text()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "seconds.json").write_text("{}")
    assert "_GRACE_S = 10.0" in rules
    (tmp_path / "conftest.py").write_text(rules.replace("_GRACE_S = 10.0", "_GRACE_S = 0.2"))
    tests = [f"def test_{name}():\n    {leak}\n" for name, leak in LEAKS.items()]
    head = "import os, socket, subprocess, sys, threading, time\nkept = []\n"
    (tmp_path / "test_leaky.py").write_text(head + "\n".join(tests))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rE",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")},
    )
    Path("/dev/shm/ddl-leak").unlink()
    failed = {line.partition("::test_")[2].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    assert failed == set(LEAKS) - {"nothing"}, done.stdout
