"""The check that tests leave nothing behind (conftest.py) bites."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.architecture.inner import project, run

SEGMENT = Path(f"/dev/shm/ddl-leak-{os.getpid()}")  # of this process: other runs of the tests may be in progress
LEAKS = {
    "process": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3)'])",
    "orphan": "subprocess.run(['sh', '-c', 'sleep 3 & exit'])",
    "thread": "threading.Thread(target=time.sleep, args=(3,), name='ddl-engine-0', daemon=True).start()",
    "socket": "kept.append(socket.socket(socket.AF_UNIX)); kept[0].bind(f'\\0ddl-leak-{os.getpid()}')",
    "folder": "tempfile.mkdtemp()",
    "file_of_a_child": "subprocess.run([sys.executable, '-c', 'import tempfile; tempfile.mkstemp()'])",
    "segment": f"open('{SEGMENT}', 'w').close()",
    "variable": "os.environ['DDL_LEAK'] = '1'",
    "path": "sys.path.append('/leak')",
    "handler": "signal.signal(signal.SIGUSR2, lambda *_: None)",
    "module": "(tmp_path / 'leak.py').touch(); sys.path.insert(0, str(tmp_path)); import leak; del sys.path[0]",
    "nothing": "subprocess.run([sys.executable, '-c', ''])",
}

HEAD = "import os, pytest, signal, socket, subprocess, sys, tempfile, threading, time\nkept = []\n"
GRACE_S = 0.2
LINUX = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")


@LINUX
def test_each_kind_of_leak_fails_the_test_that_leaves_it(tmp_path: Path) -> None:
    """What stays is an error at its test, whatever it is; where nothing does, there is none."""
    tests = [f"def test_{name}(tmp_path):\n    {leak}\n" for name, leak in LEAKS.items()]
    done = run(project(tmp_path, HEAD + "\n".join(tests), grace_s=GRACE_S))
    SEGMENT.unlink()
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
    done = run(project(tmp_path, HEAD + stays, grace_s=GRACE_S), "-n", str(workers))
    assert done.returncode == 13 and "left behind by the session: process" in done.stdout, done.stdout


@pytest.mark.parametrize("workers", [0, 2])
def test_no_temporary_file_is_left(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tests that have failed for it, and of what multiprocessing keeps until the process ends."""
    leaves = "import multiprocessing.util, tempfile\ndef test_it():\n    multiprocessing.util.get_temp_dir()\n"
    here = tmp_path / "tmp"
    here.mkdir()
    monkeypatch.setenv("TMPDIR", str(here))
    options = ("-n", str(workers), f"--basetemp={tmp_path / 'base'}")
    inner = project(tmp_path, leaves, grace_s=GRACE_S)
    assert run(inner, *options).returncode == 0 and not list(here.iterdir())
    (inner / "test_inner.py").write_text(leaves + "    tempfile.mkdtemp()\n")
    assert run(inner, *options).returncode == 1 and not list(here.iterdir())
