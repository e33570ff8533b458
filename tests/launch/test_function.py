"""``ddlcore.run`` calls a function on many processes, from wherever it is written."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ddlcore
from ddlcore.errors import RankFailed
from ddlcore.launch.job import arguments, function
from tests.launch.starting import environment

pytestmark = pytest.mark.processes


def my_rank(base: int = 0, *, times: int = 1) -> int:
    return base + times * int(os.environ["RANK"])


class Odd(Exception):
    """Cannot be pickled back: it wants two arguments and keeps one."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


def test_results_come_in_rank_order() -> None:
    """Arguments and keywords reach the function."""
    assert ddlcore.run(my_rank, (100,), {"times": 2}, num_proc=3) == [100, 102, 104]
    assert ddlcore.run(my_rank) == [0, 1]
    assert ddlcore.run(my_rank, hosts="localhost:1") == [0]


def test_closures_and_lambdas_and_large_values() -> None:
    """What pickle refuses and what no pipe holds."""
    offset = 5
    values = ddlcore.run(lambda: bytes(3_000_000) + bytes([offset]), num_proc=2)
    assert [(len(value), value[-1]) for value in values] == [(3_000_001, 5)] * 2


def test_environment_is_added() -> None:
    """`env` reaches the ranks."""
    assert ddlcore.run(lambda: os.environ["COLOUR_OF_TEST"], env={"COLOUR_OF_TEST": "red"}, num_proc=1) == ["red"]


def test_settings_are_taken_from_it_too() -> None:
    """What is wrong in `env` is said before anything is started."""
    with pytest.raises(ValueError, match="DDL_GRACE_S"):
        ddlcore.run(my_rank, env={"DDL_GRACE_S": "soon"})


def test_output_carries_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """It comes out where Python's own output goes, here a captured one as in a notebook."""
    ddlcore.run(lambda: print("hello"), num_proc=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello", "[1] hello"]


def test_a_remote_error_comes_with_its_rank_and_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception itself is the cause; its cause is the other process's traceback."""
    monkeypatch.setenv("DDL_GRACE_S", "0.2")

    def fails_in_1() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("the weights")
        time.sleep(20)

    with pytest.raises(RankFailed, match="rank 1 raised KeyError: 'the weights'") as raised:
        ddlcore.run(fails_in_1)
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, KeyError)
    assert "in fails_in_1" in str(raised.value.__cause__.__cause__)
    assert "rank 0: ended by the launcher" in str(raised.value)


def test_an_error_that_cannot_be_pickled_comes_as_text() -> None:
    """Nothing is lost but the object."""

    def fails() -> None:
        raise Odd(1, 2)

    with pytest.raises(RankFailed, match=r"raised .*Odd: 1") as raised:
        ddlcore.run(fails, num_proc=1)
    assert "in fails" in str(raised.value.__cause__)


def test_a_lost_peer_does_not_mask_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """PeerLost on rank 0, though it ends first, is only what rank 1 caused."""
    monkeypatch.setenv("DDL_GRACE_S", "3")

    def fails() -> None:
        if os.environ["RANK"] == "0":
            raise ddlcore.PeerLost([1], "raised ValueError")
        time.sleep(0.5)
        raise ValueError("the cause")

    with pytest.raises(RankFailed, match="rank 1 raised ValueError: the cause"):
        ddlcore.run(fails)


def test_a_rank_that_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no traceback: its end and its last lines must do."""

    def dies() -> None:
        print("so far", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed, match=r"(?s)rank 0 killed by signal 9 \(SIGKILL\).*\| so far"):
        ddlcore.run(dies, num_proc=1)


def test_a_result_that_cannot_be_pickled() -> None:
    """The error says so, from the rank that has it."""
    with pytest.raises(RankFailed, match="pickle"):
        ddlcore.run(lambda: sys.stdout.buffer, num_proc=1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"func": 3}, "func is of type int"),
        ({"func": my_rank, "args": "ab"}, "args is of type str"),
        ({"func": my_rank, "kwargs": [1]}, "kwargs is of type list"),
        ({"func": my_rank, "num_proc": 0}, "at least one rank"),
        ({"func": my_rank, "num_proc": 2.0}, "num_proc is of type float"),
        ({"func": my_rank, "num_proc": 3, "hosts": "localhost:2"}, "too few slots"),
        ({"func": my_rank, "num_proc": 2, "np": 3}, "different things"),
        ({"func": my_rank, "start_timeout_s": -1}, "--start-timeout-s"),
        ({"func": my_rank, "args": (sys.stdout.buffer,)}, "cannot be sent"),
        ({"func": my_rank, "use_gloo": True, "use_mpi": True}, "use_gloo and use_mpi name different"),
        ({"func": my_rank, "hosts": "localhost:1", "hostfile": "h"}, "hosts and hostfile both say where"),
        ({"func": my_rank, "start_timeout": "soon"}, "start-timeout-s: 'soon' is not of type float"),
        ({"func": my_rank, "executable": "/opt/other/python"}, "the ranks run .*start this script with the other"),
        ({"func": my_rank, "output_filename": "/proc/nowhere"}, "--output-dir /proc/nowhere"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], complaint: str) -> None:
    """They are ValueErrors, and nothing is started."""
    with pytest.raises(ValueError, match=complaint):
        ddlcore.run(**arguments)


def test_np_is_deprecated() -> None:
    """Horovod's old name works, with a warning."""
    with pytest.warns(DeprecationWarning, match="pass num_proc"):
        assert ddlcore.run(my_rank, np=1) == [0]


def test_from_a_script_that_guards_nothing(tmp_path: Path) -> None:
    """A function of __main__ is sent by value: the script is not run again in the ranks."""
    (tmp_path / "script.py").write_text(
        "import ddlcore, os\n"
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "def f(): return Point(int(os.environ['RANK']))\n"
        "print('script', [p.x for p in ddlcore.run(f, num_proc=2)])\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment(None)
    )
    assert done.stdout == "script [0, 1]\n", done.stderr


def test_from_a_thread_and_from_a_prompt(tmp_path: Path) -> None:
    """Code without a file, in a thread that is not the main one, as a notebook's may be."""
    code = (
        "import ddlcore, os, threading\n"
        "def f(): return int(os.environ['RANK'])\n"
        "t = threading.Thread(target=lambda: print(ddlcore.run(f)))\n"
        "t.start(); t.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=code,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment(None),
    )
    assert done.stdout == "[0, 1]\n", done.stderr


def test_ctrl_c_ends_the_ranks(tmp_path: Path) -> None:
    """KeyboardInterrupt comes through, and nothing stays."""
    code = (
        "import ddlcore, os, time\n"
        "def f():\n    print('up', flush=True)\n    time.sleep(60)\n"
        "ddlcore.run(f, num_proc=1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(None)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] up\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=80)
    assert "KeyboardInterrupt" in err


# In the order of Horovod's release 0.28, with a value for each.
HOROVOD: dict[str, Any] = {
    "func": my_rank,
    "args": (),
    "kwargs": None,
    "num_proc": 1,
    "min_num_proc": 2,
    "max_num_proc": 4,
    "slots": 2,
    "reset_limit": 3,
    "cooldown_range": (1, 2),
    "hosts": "localhost:1",
    "hostfile": "h",
    "host_discovery_script": "echo localhost:3",
    "start_timeout": 30,
    "ssh_port": 22,
    "ssh_identity_file": "key",
    "disable_cache": True,
    "output_filename": "out",
    "verbose": 2,
    "use_gloo": True,
    "use_mpi": True,
    "mpi_args": "--x",
    "network_interface": "lo",
    "network_interfaces": ["lo", "eth0"],
    "executable": sys.executable,
    "np": 1,
    "min_np": 2,
    "max_np": 4,
}
ELASTIC = ("max_num_proc", "max_np", "host_discovery_script")  # they need min_num_proc
BECOME = {
    "start_timeout": ("start_timeout_s", 30.0),
    "ssh_port": ("ssh_port", 22),
    "ssh_identity_file": ("ssh_identity_file", "key"),
    "use_gloo": ("backend", "gloo"),
    "use_mpi": ("backend", "mpi"),
    "mpi_args": ("launcher_args", "--x"),
    "network_interface": ("network_interface", "lo"),
    "network_interfaces": ("network_interface", "lo,eth0"),
    "min_num_proc": ("min_np", 2),
    "min_np": ("min_np", 2),
    "max_num_proc": ("max_np", 4),
    "max_np": ("max_np", 4),
    "slots": ("slots_per_host", 2),
    "reset_limit": ("reset_limit", 3),
    "cooldown_range": ("host_cooldown_s", "1 2"),
    "host_discovery_script": ("host_discovery_script", "echo localhost:3"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What would have been run: where the ranks are, their settings, and what follows."""
    seen: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> list[Any]:
        seen.append(arguments)
        return []

    monkeypatch.setattr(function, "run_placed", note)
    monkeypatch.setattr(arguments, "check_route", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h").write_text("localhost slots=3\n")
    return seen


def test_positional_arguments_are_horovods() -> None:
    """Names and order; ddl's own come behind them, by keyword only."""
    parameters = inspect.signature(ddlcore.run).parameters
    assert [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD] == list(HOROVOD)


@pytest.mark.parametrize("name", [name for name in HOROVOD if name != "func"])
def test_every_keyword_of_horovod_is_taken_or_answered(name: str, asked: list[tuple[Any, ...]]) -> None:
    """It has its meaning, or an error or a warning names it."""
    call = {name: HOROVOD[name]}
    if name in ELASTIC:
        with pytest.raises(ValueError, match="elastic jobs; add --min-np"):
            ddlcore.run(my_rank, **call)
        call["min_num_proc"] = 1
    warns = {"np": DeprecationWarning, "disable_cache": UserWarning}.get(name)
    with pytest.warns(warns, match=f"^run: {name}") if warns else contextlib.nullcontext():
        ddlcore.run(my_rank, **call)
    ((placed, settings, _, _, _, verbose, _, directory, _),) = asked
    if name in BECOME:
        setting, value = BECOME[name]
        assert (settings[setting], settings.source(setting)) == (value, "flag")
    assert placed.layout.size == {"num_proc": 1, "np": 1, "hosts": 1, "hostfile": 3, "host_discovery_script": 3}.get(
        name, 2
    )
    assert verbose is (name == "verbose")
    assert directory == (Path("out") if name == "output_filename" else None)


def test_ddls_own_keywords_win(asked: list[tuple[Any, ...]]) -> None:
    """Over Horovod's names for the same."""
    ddlcore.run(my_rank, use_gloo=True, start_timeout=9, backend="shm", start_timeout_s=7)
    assert (asked[0][1]["backend"], asked[0][1]["start_timeout_s"]) == ("shm", 7.0)


def test_output_is_written_to_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One directory for each rank."""
    ddlcore.run(lambda: print("hello"), num_proc=2, output_filename=str(tmp_path / "out"))
    assert [(tmp_path / f"out/rank.{rank}/stdout").read_text() for rank in range(2)] == ["hello\n"] * 2
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello", "[1] hello"]


def test_torchs_variables_are_left_out_if_wanted() -> None:
    """ddl still knows its rank."""

    def told() -> tuple[list[str], str]:
        return [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ], os.environ["DDL_RANK"]

    assert ddlcore.run(told, env={"RANK": "7"}, torch_env=False) == [([], "0"), ([], "1")]
