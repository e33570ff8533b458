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
    "path": "sys.path.append('/leak')",
    "handler": "signal.signal(signal.SIGUSR2, lambda *_: None)",
    "module": "(tmp_path / 'leak.py').touch(); sys.path.insert(0, str(tmp_path)); import leak; del sys.path[0]",
    "nothing": "subprocess.run([sys.executable, '-c', ''])",
}


HEAD = "import os, pytest, signal, socket, subprocess, sys, threading, time\nkept = []\n"
LINUX = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")


def run(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``tests`` in a folder of their own, with the conftest.py of this repository and less patience."""
    rules = (ROOT / "conftest.py").read_text()
    (folder / "tests").mkdir()
    (folder / "tests" / "seconds.json").write_text("{}")
    assert "_GRACE_S = 10.0" in rules
    (folder / "conftest.py").write_text(rules.replace("_GRACE_S = 10.0", "_GRACE_S = 0.2"))
    (folder / "test_leaky.py").write_text(HEAD + tests)
    command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    return subprocess.run([*command, str(folder), *options], capture_output=True, text=True, timeout=200, env=environ)


@LINUX
def test_each_kind_of_leak_fails_the_test_that_leaves_it(tmp_path: Path) -> None:
    """What stays is an error at its test, whatever it is; where nothing does, there is none."""
    done = run(tmp_path, "\n".join(f"def test_{name}(tmp_path):\n    {leak}\n" for name, leak in LEAKS.items()))
    Path("/dev/shm/ddl-leak").unlink()
    failed = {line.partition("::test_")[2].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    assert failed == set(LEAKS) - {"nothing"}, done.stdout


@LINUX
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_session_leaves_behind_fails_it(workers: int, tmp_path: Path) -> None:
    """Also if a worker has left it: its controller ends with the exit code."""
    stays = """
@pytest.fixture(scope="session", autouse=True)
def stays():
    subprocess.Popen(["sleep", "3"])

def test_one(): pass
"""
    done = run(tmp_path, stays, "-n", str(workers))
    assert done.returncode == 13 and "left behind by the session: process" in done.stdout, done.stdout
