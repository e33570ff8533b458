"""What holds for every test of the tree: quick ones first, in any order if asked for, and nothing left behind.

A test fails if it leaves a process, a thread of ours, a shared-memory file, a listening socket of ours, a file in the
folder for temporary files, a changed DDL_* variable, a signal handler, a changed sys.path or a module from its temporary
folder. A session fails if a process that it has started still runs at its end. Of two sessions that share the work
(`pytest -n 2`), neither can tell which of them has made a shared-memory file, so these files are only looked at when both
have ended; for temporary files, each has a folder of its own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing.util
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

__all__: list[str] = []

pytest_plugins = ("tests.cluster.fixtures", "ddl_conform.collecting", "tools.file_scheduling")

_MARK = "PYTEST_LEAK_MARK"  # inherited by every process that the session starts, however far down
_SHARE_S = 600.0  # the sum over the tests of a share; several run at a time, so the share takes less
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
# SIGALRM is not among them: pytest-timeout sets its handler, and removes it when a test fails.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
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
_LEFT_BEHIND = 13  # a session's exit code of its own: tests that fail must not hide it
# What others keep in the folder for temporary files until the process ends, or for ever: code of PyTorch and TensorFlow,
# folders for sockets of multiprocessing (of a process that was killed, they stay), torchrun's for logs, and pytest's.
_OF_OTHERS = ("torchinductor_", "__autograph_generated_file", "__pycache__", "pymp-", "torchelastic_", "pytest-of-")
_there_before: set[str] = set()  # shared-memory files
_strangers: set[int] = set()  # processes that were there at the last look and are not ours
_not_of_tests: set[str] = set()  # what has been started for several tests, or is known to be left behind
_left_by_workers: list[str] = []  # what the workers of this session have reported


def pytest_configure(config: pytest.Config) -> None:
    os.environ[_MARK] = uuid.uuid4().hex
    _there_before.update(_segments())
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":  # not if this process runs no test
        _take_own_folder_for_temporary_files()
    if config.getoption("random_order_bucket", None) == "default:module":
        # Tests of a class stay together, because they share what a fixture of the class has started.
        config.option.random_order_bucket = "default:parent"
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of a thousand processes would compile all modules
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it, and pass it on
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_own_folder_for_temporary_files() -> None:
    """Make a folder in which this process and all that it starts put their temporary files, so that no test leaves any.

    ``tmp_path`` of pytest is elsewhere, because its folders stay, to be looked at when a test has failed.
    """
    place = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", place)
    folder = tempfile.mkdtemp(prefix="w-", dir=place)  # a short name: the paths of Unix sockets may have 108 characters
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing has removed its own at the end of this process, which has the priority -100.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Switch off garbage collection while tests are collected. It finds nothing then, and takes a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What thousands of collected tests are made of lives as long as we: the garbage collector need not look at it."""
    gc.collect()
    gc.freeze()
    _not_of_tests.update(_own())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="WORD", help="run ten minutes' worth of the tests; another WORD chooses others")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If only tests with the mark ``alone`` are to run, leave out the files without this mark.

    There are few such tests, and it takes 20 s to import all files. tools/run_tests.py begins its mark expression with
    "alone and" for this. The mark must stand in the file that pytest collects, not in a class that the file imports.
    """
    of_those = config.option.markexpr.startswith("alone and") and collection_path.suffix == ".py"
    return True if of_those and "pytest.mark.alone" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Pure logic before processes: a mistake shows in seconds. Then the longest files, so that no worker ends alone.

    tests/seconds.json says how long the slower tests have taken (`tools/run_tests.py --seconds` writes it). Only the order
    of the tests and the size of a share depend on it. If pytest-random-order has chosen an order, it stays.
    """
    if unsaid := [item.nodeid for item in items if (mark := item.get_closest_marker("slow")) and not mark.args]:
        raise pytest.UsageError(f"the mark slow needs a reason: {', '.join(unsaid)}")
    seconds: dict[str, float] = json.loads((Path(__file__).parent / "tests" / "seconds.json").read_text())
    if (word := config.getoption("share")) is not None:
        chosen = _share(word, items, seconds)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid.partition("[")[0] not in chosen])
        items[:] = [item for item in items if item.nodeid.partition("[")[0] in chosen]
    if _has_random_order(config):
        return
    files: defaultdict[str, float] = defaultdict(float)
    for item in items:
        files[item.nodeid.partition("::")[0]] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: (slow := _is_slow(item), -files[item.nodeid.partition("::")[0]] * slow))


def _has_random_order(config: pytest.Config) -> bool:
    chosen = (config.getoption(f"random_order_{option}", "default:") for option in ("bucket", "seed"))
    by_option = any(not value.startswith("default:") for value in chosen)
    return by_option or bool(config.getoption("random_order_enabled", False))


def _share(word: str, items: list[pytest.Item], seconds: dict[str, float]) -> set[str]:
    """Choose test functions at random until they take ten minutes together. The same word gives the same choice.

    All tests of a function are chosen together, because they may share a job that takes long.
    """
    taken: defaultdict[str, float] = defaultdict(float)
    for item in items:
        taken[item.nodeid.partition("[")[0]] += seconds.get(item.nodeid, 0.1)
    functions = sorted(taken)
    random.Random(word).shuffle(functions)
    total_s = itertools.accumulate(taken[function] for function in functions)
    return {function for function, until_s in zip(functions, total_s) if until_s <= _SHARE_S}


def _is_slow(item: pytest.Item) -> bool:
    in_slow_room = item.nodeid.startswith(_SLOW_ROOMS)
    return in_slow_room or any(item.get_closest_marker(mark) for mark in ("processes", "long", "slow"))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    _left_by_workers.extend(getattr(node, "workeroutput", {}).get("left", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    _strangers.clear()  # the last look is at all
    is_worker = hasattr(session.config, "workeroutput")
    shares_out = not is_worker and session.config.getoption("dist", "no") != "no"  # its children are the workers
    left = _after_grace(_segments if shares_out else _processes) - _there_before
    if is_worker:  # its controller fails
        session.config.workeroutput["left"] = sorted(left)  # type: ignore[attr-defined]
        return
    left.update(_left_by_workers)
    if left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = _LEFT_BEHIND
    for line in sorted(left):
        print(f"\nleft behind by the session: {line}")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Remember what a fixture of a class, a module or a session has started: no single test has left it behind."""
    before = set() if fixturedef.scope == "function" else _own()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _not_of_tests.update(_own() - before)


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    variables, path, handlers, modules = _variables(), _path(), _handlers(), set(sys.modules)
    yield
    left = _after_grace(lambda: _own() - _not_of_tests)
    _not_of_tests.update(left)  # it fails this test, and not the next one
    assert not left, f"the test left behind: {'; '.join(sorted(left))}"
    assert _variables() == variables, "the test changed variables of ddl or of launchers; use monkeypatch.setenv"
    assert _path() == path, "the test changed sys.path; use monkeypatch.syspath_prepend"
    assert _handlers() == handlers, "the test left a signal handler"
    forgotten = _modules_in(str(tmp_path_factory.getbasetemp()), set(sys.modules) - modules)
    assert not forgotten, f"the test left modules that its successors would find: {', '.join(forgotten)}"


def _path() -> list[str]:
    """Return sys.path without what setuptools adds when the first test imports a library that needs it."""
    return [folder for folder in sys.path if not folder.endswith("setuptools/_vendor")]


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def _modules_in(folder: str, names: set[str]) -> list[str]:
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return sorted(name for name, file in files.items() if (file or "").startswith(folder))


def _own() -> set[str]:
    """Return what may be left behind, of all that is there and is surely this session's."""
    return _processes() | _threads() | _sockets() | _files() | (set() if _HAS_NEIGHBOURS else _segments())


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


def _files() -> set[str]:
    """Temporary files and folders, without those of others."""
    names = os.listdir(tempfile.gettempdir())
    return {f"temporary file {name}" for name in names if not name.startswith(_OF_OTHERS)}


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
