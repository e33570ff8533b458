"""What holds for every test of the tree: quick ones first, and nothing left behind.

A test that leaves a process, a thread of ours, a shared-memory file, a listening socket of ours or a
changed DDL_* variable fails, and so does a session at whose end a process that it started still runs.
Of two sessions that share the work (`pytest -n 2`) neither can tell whose a shared-memory file is, but
at their end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

__all__: list[str] = []

pytest_plugins = ("tests.cluster.fixtures", "ddlcore.testing.collecting")

_MARK = "PYTEST_LEAK_MARK"  # inherited by every process that the session starts, however far down
_GRACE_S = 10.0  # for what is ending by itself
_SERVANTS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch_shm_manager",
)  # live as long as we
_SLOW_ROOMS = ("tests/commands/", "tests/launch/", "tests/faults/", "tests/training/", "plugins/")
# An example may take any time: a busy machine is no defect of what is tested.
_AT_LEISURE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("usual", **_AT_LEISURE)
settings.register_profile("long", **_AT_LEISURE)  # for --hypothesis-profile=long; see tests/runtime/effort.py
settings.load_profile("usual")
_TOLD_BY = (
    "DDL_",
    "HOROVOD_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SLURM_",
    "TORCHELASTIC_",
)
_KTHREADD = 2  # the parent of the kernel's threads, which have no environment
_HAS_PROC = Path("/proc/self/environ").exists()
# Whether other processes run tests of this session, so that nobody can tell whose a shared-memory file is.
_HAS_NEIGHBOURS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_LEFT_BEHIND = 13  # a session's exit code of its own: tests that fail must not hide it
_there_before: set[str] = set()  # shared-memory files
_strangers: set[int] = set()  # processes that were there at the last look and are not ours


def pytest_configure(config: pytest.Config) -> None:
    os.environ[_MARK] = uuid.uuid4().hex
    _there_before.update(_segments())
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of a thousand processes would compile all modules
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it, and pass it on
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What thousands of collected tests are made of lives as long as we: the garbage collector need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Pure logic before processes: a mistake shows in seconds. Then the longest files, so that no worker ends alone.

    tests/seconds.json has what files took that take long (`pytest --durations=0`); nothing but the order depends on it.
    """
    seconds: dict[str, int] = json.loads((Path(__file__).parent / "tests" / "seconds.json").read_text())
    items.sort(key=lambda item: (slow := _is_slow(item), -seconds.get(item.nodeid.partition("::")[0], 0) * slow))


def _is_slow(item: pytest.Item) -> bool:
    in_slow_room = item.nodeid.startswith(_SLOW_ROOMS)
    return in_slow_room or any(item.get_closest_marker(mark) for mark in ("processes", "slow"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    _strangers.clear()  # the last look is at all
    shares_out = not _IS_WORKER and session.config.getoption("dist", "no") != "no"  # its children are the workers
    left = _after_grace(_segments if shares_out else _processes) - _there_before
    if left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = _LEFT_BEHIND
    for line in sorted(left):
        print(f"\nleft behind by the session: {line}")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = _own()
    variables = _variables()
    yield
    left = _after_grace(lambda: _own() - before)
    assert not left, f"the test left behind: {'; '.join(sorted(left))}"
    assert _variables() == variables, "the test changed variables of ddl or of launchers; use monkeypatch.setenv"


def _own() -> set[str]:
    """Of what may be left behind, all that is there and is surely this session's."""
    return _processes() | _threads() | _sockets() | (set() if _HAS_NEIGHBOURS else _segments())


def _after_grace(left: Callable[[], set[str]]) -> set[str]:
    deadline = time.monotonic() + _GRACE_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _processes() -> set[str]:
    """Running processes that are our children or bear the session's mark, ourselves and servants excepted."""
    if not _HAS_PROC:
        return set()
    pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    _strangers.intersection_update(pids)  # a number may come again
    return {found for pid in pids - _strangers - {os.getpid()} if (found := _if_ours(pid))}


def _if_ours(pid: int) -> str:
    """Its description if it runs and is ours, else "". Who can be neither now nor later is remembered as a stranger."""
    entry = Path(f"/proc/{pid}")
    try:
        for _ in range(50):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes()
            if environment or state == "Z" or _KTHREADD in (pid, int(parent)):
                break
            time.sleep(0.002)  # a process that is just becoming another program shows none
    except PermissionError:  # another user's
        return ""
    except OSError:  # ended
        _strangers.add(pid)
        return ""
    if int(parent) != os.getpid() and f"{_MARK}={os.environ[_MARK]}".encode() not in environment.split(b"\0"):
        _strangers.add(pid)
        return ""
    is_servant = any(servant in command for servant in _SERVANTS)
    return "" if state == "Z" or is_servant else f"process {pid} ({command.strip()[:100]})"


def _threads() -> set[str]:
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and (thread.name.startswith("ddl") or not thread.daemon)
    }


def _segments() -> set[str]:
    shm = Path("/dev/shm")
    return {str(path) for path in shm.glob("*ddl*")} if shm.is_dir() else set()


def _sockets() -> set[str]:
    """Named Unix sockets of ours, abstract ones (written with an @) included, that this very process holds.

    One that another process holds shows as that process; one that nobody holds is gone.
    """
    table = Path("/proc/net/unix")
    if not table.exists():
        return set()
    text = table.read_text()
    if "ddl" not in text:
        return set()
    rows = (line.split() for line in text.splitlines()[1:])
    named = {f"socket:[{row[6]}]": row[7] for row in rows if len(row) > 7 and "ddl" in row[7]}
    return {f"socket {named[link]}" for link in _links(Path("/proc/self/fd")) & set(named)}


def _links(folder: Path) -> set[str]:
    found = set()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(path))
    return found


def _variables() -> dict[str, str]:
    """Return the environment variables from which a later test's processes would learn their ranks and settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(_TOLD_BY)}
