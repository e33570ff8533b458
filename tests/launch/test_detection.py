"""Ranks that another launcher has started are a job like any other: who they are, how they end, what they leave (nothing)."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.foreign import (
    Started,
    Starter,
    by_hand,
    finish,
    mpich,
    new_openmpi,
    torchrun,
    why_no_mpich,
    why_no_torchrun,
)
from tests.tiers import long

pytestmark = pytest.mark.processes
Until = Callable[[Callable[[], bool]], None]


@pytest.fixture(scope="session")
def openmpi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    try:
        with new_openmpi(tmp_path_factory.mktemp("own")) as starter:
            yield starter
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["mpich", "openmpi", "torchrun", "by hand"])
def starter(request: pytest.FixtureRequest, home: Path) -> Starter:
    """Each launcher in turn; a home of its own keeps files of other jobs out of sight."""
    name = request.param
    why = {"mpich": why_no_mpich, "torchrun": why_no_torchrun}.get(name, lambda: "")()
    if why:
        pytest.skip(why)
    made: Starter = request.getfixturevalue("openmpi") if name == "openmpi" else MADE[name]()
    return made


MADE: dict[str, Callable[[], Starter]] = {"mpich": mpich, "torchrun": torchrun, "by hand": by_hand}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, for the file by which the ranks meet; compiled kernels stay where they are."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def left_in(home: Path) -> list[str]:
    folder = home / ".ddl"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def wait_for_file(home: Path, until: Until) -> Path:
    """The file by which the ranks meet, once it is there."""
    until(lambda: bool([name for name in left_in(home) if name.startswith("ddl-")]))
    return next(path for path in (home / ".ddl").iterdir() if path.name.startswith("ddl-"))


@pytest.mark.long
def test_one_rank_warns_of_a_misspelt_variable(starter: Starter, home: Path) -> None:
    """No launcher of ddl does it before, and the other ranks have the same environment."""
    done = starter.run(2, "where", env={"DDL_FUSION_BITES": "1"})
    assert done.code == 0, done.text
    assert done.text.count("did you mean DDL_FUSION_BYTES?") == 1, done.text


def test_they_know_who_they_are(starter: Starter, home: Path) -> None:
    """Ranks and sizes, the route, and the variables that scripts of other libraries expect; the file is gone."""
    done = starter.run(2, "where")
    assert done.code == 0, done.text
    found = dict(
        re.findall(r"^rank (\d) (of 2 local \d of 2 cross 0 of 1 True sum 2 route .*) told", done.text, re.MULTILINE)
    )
    shm = "route shm (auto: 2 ranks on 1 host)"
    assert found == {str(rank): f"of 2 local {rank} of 2 cross 0 of 1 True sum 2 {shm}" for rank in range(2)}, done.text
    told = dict(re.findall(r"^rank (\d) .* told \1 2 \1 (\S+ \d+)", done.text, re.MULTILINE))
    assert len(told) == 2 and len(set(told.values())) == 1, done.text
    assert left_in(home) == []


@pytest.mark.long
def test_they_may_begin_again(starter: Starter, home: Path) -> None:
    """shutdown and init, several times."""
    done = starter.run(2, "again")
    assert done.code == 0, done.text
    assert sorted(line for line in done.lines if line.startswith("again")) == ["again 0", "again 1"]
    assert left_in(home) == []


@pytest.mark.long
def test_worlds_of_some_of_them(starter: Starter) -> None:
    """The even ranks and the odd ones, also where rank 0 is not among them, and then all again."""
    done = starter.run(3, "parts")
    assert done.code == 0, done.text
    expected = ["launched 0 rank 0 of 2 sum 2", "launched 1 rank 0 of 1 sum 1", "launched 2 rank 1 of 2 sum 2"]
    assert sorted(line for line in done.lines if line.startswith("launched")) == expected


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
def test_one_leaves_before_the_others(starter: Starter, home: Path, who: int) -> None:
    """Rank 0, in whose process the coordinator lives, too: the others end their scripts, with code 0."""
    done = starter.run(3, "leave", str(who))
    assert done.code == 0, done.text
    assert sorted(line for line in done.lines if line.startswith("left")) == ["left 0", "left 1", "left 2"]
    assert left_in(home) == []


@pytest.mark.parametrize("who", [1, *long(0)])
@pytest.mark.parametrize("how", ["kill", *long("raise", "term")])
def test_one_ends_in_the_middle(starter: Starter, home: Path, how: str, who: int) -> None:
    """The others hear of it within 2 s; under a launcher the job ends soon, not with 0, and nothing is left."""
    done = starter.run(2, how, str(who))
    assert done.code != 0, done.text
    ended = re.search(r"ends at ([\d.]+)", done.text)
    assert ended is not None, done.text
    assert done.ended_s - float(ended[1]) < 20.0, done.text
    lost = re.search(r"rank (\d) lost \((\d),\) at ([\d.]+): (.*)", done.text)
    if lost is None:  # the launcher was quicker; alone, it must not have been
        assert starter.kills, done.text
    else:
        assert (int(lost[1]), int(lost[2])) == (1 - who, who)
        assert float(lost[3]) - float(ended[1]) < 20.0
        if how == "raise":
            assert lost[4].startswith("raised RuntimeError: boo")
        elif how == "kill" and who == 0:
            assert lost[4].startswith("the coordinator in the process of rank 0 is gone: ")
    assert left_in(home) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_is_interrupted(starter: Starter, home: Path, number: int, until: Until) -> None:
    """Ctrl-C and SIGTERM: it ends soon, not with 0, and nothing is left."""
    if starter.hand:
        pytest.skip("there is no launcher")
    (process,) = starter.begin(2, "endless", "9", str(home))
    until(lambda: len(list(home.glob("rank.*"))) == 2)
    sent_s = time.time()
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    done = finish([process])
    assert done.code != 0
    assert done.ended_s - sent_s < 20.0, done.text
    assert left_in(home) == []


@pytest.mark.long
def test_what_a_rank_starts_is_no_rank(starter: Starter) -> None:
    """Although it inherits what the launcher has set; and a forked child's end ends nothing."""
    done = starter.run(2, "child")
    assert done.code == 0, done.text
    assert done.text.count("1 ddlcore.errors.DdlInternalError: init() was called in a process that a rank") == 2, (
        done.text
    )
    done = starter.run(2, "fork")
    assert done.code == 0, done.text
    assert done.text.count("child 5") == 2, done.text


def test_rank_0_is_interrupted_while_it_waits_for_the_others(home: Path, until: Until) -> None:
    """It ends soon, not with 0, and takes the file with it by which they would find it."""
    first = alone(0, "where")
    wait_for_file(home, until)
    first.send_signal(signal.SIGINT)
    done = finish([first])
    assert done.code not in (0, -signal.SIGKILL), done.text
    assert left_in(home) == []


@pytest.mark.long
def test_two_jobs_at_once(starter: Starter, home: Path) -> None:
    """Of the same launcher, side by side: each has ranks of its own."""
    jobs = [starter.begin(2, "where") for _ in range(2)]
    for job in jobs:
        done = finish(job)
        assert done.code == 0, done.text
        assert len(re.findall(r"of 2 local . of 2 .* sum 2 ", done.text)) == 2, done.text
    assert left_in(home) == []


# --- the file by which they meet


NAMED = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "4711"}  # two launches of the same name


def alone(rank: int, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """One rank of a launch by hand."""
    (process,) = Starter("alone").begin(1, *arguments, env={**NAMED, "RANK": str(rank), **(env or {})})
    return process


def test_the_file_is_the_users_alone_while_they_meet(home: Path, until: Until) -> None:
    """0600 in a directory of 0700; gone as soon as all have come; named by what tells the launch."""
    first = alone(0, "where")
    path = wait_for_file(home, until)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert re.fullmatch(r"ddl-plain-.*_4711-[0-9a-f]{12}\.rendezvous", path.name)
    done = finish([first, alone(1, "where")])
    assert done.codes == [0, 0], done.text
    assert left_in(home) == []


@pytest.mark.long
def test_a_stale_file_is_never_taken(home: Path, until: Until) -> None:
    """Rank 0 was killed before anybody came: a rank of the next launch of that name passes its file by, in either order."""
    for late in (0, 1):
        dead = alone(0, "where")
        wait_for_file(home, until)
        dead.kill()
        dead.communicate(timeout=80)
        assert len(left_in(home)) == 1
        begun = [alone(1 - late, "where")]
        time.sleep(0.5)  # so that it has seen the stale file
        done = finish([*begun, alone(late, "where")])
        assert done.codes == [0, 0], done.text
        assert left_in(home) == []


@pytest.mark.long
def test_two_launches_of_one_name_take_turns(home: Path, until: Until) -> None:
    """A rank 0 that meets another's file waits until that launch is complete; no rank ends up with strangers."""
    first = alone(0, "where")
    wait_for_file(home, until)
    second = alone(0, "where")
    others = [alone(1, "where"), alone(1, "where")]
    done = finish([first, second, *others])
    assert done.codes == [0, 0, 0, 0], done.text
    assert done.text.count("sum 2 ") == 4
    assert left_in(home) == []


@pytest.mark.long
def test_the_directory_can_be_chosen(home: Path, tmp_path: Path, until: Until) -> None:
    """DDL_RENDEZVOUS_DIR before SLURM_SUBMIT_DIR before the home; it is made where it is missing."""
    chosen, submitted = tmp_path / "chosen" / "here", tmp_path / "submitted"
    submitted.mkdir()
    for env, folder in (
        ({"SLURM_SUBMIT_DIR": str(submitted)}, submitted),
        ({"SLURM_SUBMIT_DIR": str(submitted), "DDL_RENDEZVOUS_DIR": str(chosen)}, chosen),
    ):
        first = alone(0, "where", env=env)
        until(lambda folder=folder: folder.exists() and any(folder.glob("ddl-*")))  # type: ignore[misc]  # a default
        assert left_in(home) == []
        assert finish([first, alone(1, "where", env=env)]).codes == [0, 0]
        assert list(folder.iterdir()) == []


def last_line(done: Started) -> str:
    return done.lines[-1]


@pytest.mark.long
def test_a_part_that_comes_when_rank_0_s_has_ended(home: Path) -> None:
    """Rank 0, in which the coordinator is, stays for it: it may come as long as start_timeout_s."""
    done = finish([alone(rank, "apart", env={"WORLD_SIZE": "2"}) for rank in (0, 1)])
    assert done.codes == [0, 0], done.text
    assert all(f"launched {rank} rank 0 of 1 sum 1" in done.text for rank in (0, 1))
    assert left_in(home) == []


@pytest.mark.long
def test_rank_0_does_not_stay_longer_than_others_may_come(home: Path) -> None:
    """Who has not called init within start_timeout_s would be told that it is late."""
    begun_s = time.monotonic()
    done = finish([alone(0, "apart", env={"WORLD_SIZE": "2", "DDL_START_TIMEOUT_S": "2"})])
    assert done.codes == [0], done.text
    assert 1.5 < time.monotonic() - begun_s < 20.0
    assert left_in(home) == []


@pytest.mark.long
def test_who_does_not_come_is_named(home: Path) -> None:
    """After start_timeout_s, by rank 0 and by the others; and where rank 0 itself does not."""
    env = {"DDL_START_TIMEOUT_S": "3", "WORLD_SIZE": "3"}
    done = finish([alone(rank, "where", env=env) for rank in (0, 1)])
    assert done.codes == [1, 1]
    text = "rank 2 has not called init within 3 s (DDL_START_TIMEOUT_S); these have: rank 0 on"
    assert done.text.count(text) >= 2, done.text
    for first in (0, 1):  # whose patience ends first: both give up then, for the same reason
        patience = {first: "2", 1 - first: "40"}
        begun_s = time.monotonic()
        done = finish([alone(rank, "where", env={**env, "DDL_START_TIMEOUT_S": patience[rank]}) for rank in (0, 1)])
        assert done.codes == [1, 1] and time.monotonic() - begun_s < 30.0
        assert done.text.count("DeadlineExceeded: init: rank 2 has not called init within 2 s") == 2, done.text
        assert "PeerLost" not in done.text, done.text
    done = finish([alone(1, "where", env={**env, "DDL_START_TIMEOUT_S": "1"})])
    assert "rank 1 has not found rank 0 within 1 s (DDL_START_TIMEOUT_S): it has not called init" in last_line(done)
    assert "DDL_RENDEZVOUS_DIR" in last_line(done)
    assert left_in(home) == []


@pytest.mark.long
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_holds_the_interpreter_lock_is_not_lost(home: Path, who: int) -> None:
    """Rank 0 forwards the connections of all by a thread of Python, which then cannot run, as while it imports torch."""
    env = {"DDL_CONTROL_ADDRESS": "tcp://127.0.0.1:0"}
    done = finish([alone(rank, "hold", str(who), env=env) for rank in (0, 1)])
    assert done.codes == [0, 0], done.text
    assert done.text.count("held ") == 2


def test_variables_that_contradict_each_other(home: Path) -> None:
    """One line that names the variable, at init, and no job half started."""
    done = finish([alone(5, "where")])
    assert done.codes == [1]
    assert last_line(done).startswith("ValueError: RANK=5 is not below WORLD_SIZE=2")
    (process,) = Starter("nameless").begin(1, "where", env={"RANK": "0", "WORLD_SIZE": "2"})
    assert "nothing names this launch; set DDL_RENDEZVOUS_DIR" in last_line(finish([process]))
    assert left_in(home) == []


def test_a_batch_script_is_a_world_of_one(home: Path) -> None:
    """Slurm's variables outside of a step: one warning, and the script runs."""
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    (process,) = Starter("batch").begin(1, "where", env=env)
    done = finish([process])
    assert done.code == 0, done.text
    assert "WARNING ddl: SLURM_NTASKS=4, but this process is no task of a job step: it is a world of one" in done.text
    assert "rank 0 of 1 " in done.text


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"DDL_AUTOTUNE": "1", "DDL_AUTOTUNE_LOG": "/nowhere/at/all.csv"},
            "--autotune-log /nowhere/at/all.csv: No such",
        ),
        ({"DDL_AUTOTUNE": "1", "DDL_REPLAY": "0"}, "replay is off"),
        ({"DDL_FUSION_POLICY": "none"}, "no fusion policy is called 'none'"),
    ],
)
def test_settings_that_rank_0_cannot_use_are_refused_on_every_rank(
    variables: dict[str, str], said: str, home: Path
) -> None:
    """It alone builds what they are of; the others would wait for it until the end of their patience."""
    begun_s = time.monotonic()
    done = by_hand().run(2, "where", env=variables)
    assert all(done.codes), done.text
    told = [line for line in done.lines if said in line]
    assert len(told) == 2 and all(line.startswith("ddlcore.errors.DdlInternalError: ") for line in told), done.text
    assert time.monotonic() - begun_s < 20
