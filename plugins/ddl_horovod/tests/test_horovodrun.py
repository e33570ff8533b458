"""Every flag of horovodrun and every HOROVOD_* variable is taken, or answered by one line that says what instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddl_horovod.command import horovodrun
from ddl_horovod.tables import FLAGS, NATIVE, SETTINGS_OF_NATIVE, VARIABLES, Foreign, read_variables

from ddlcore.commands.cli import run_program
from ddlcore.commands.run import command as run_module
from ddlcore.launch.job.launcher import JobDescription
from ddlcore.plug.settings import settings_of

# As `horovodrun --help` of release 0.28 lists them, with a value that each takes.
LISTED = """
-v --version -cb --check-build -np=2 --num-proc=2 --disable-cache --start-timeout=30
--network-interfaces=lo --network-interface=lo --output-filename=out --verbose --config-file=c.toml
-p=22 --ssh-port=22 -i=key --ssh-identity-file=key
--fusion-threshold-mb=64 --cycle-time-ms=1 --cache-capacity=1024
--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather
--torus-allreduce --no-torus-allreduce
--autotune --no-autotune --autotune-log-file=f --autotune-warmup-samples=3 --autotune-steps-per-sample=10
--autotune-bayes-opt-max-samples=20 --autotune-gaussian-process-noise=0.8
--min-np=2 --min-num-proc=2 --max-np=4 --max-num-proc=4 --slots-per-host=2 --elastic-timeout=600 --reset-limit=3
--blacklist-cooldown-range=1,2 --host-discovery-script=./s.sh
--timeline-filename=t.json --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds=60 --stall-check-shutdown-time-seconds=90
--mpi-threads-disable --no-mpi-threads-disable --mpi-args=--x --binding-args=--y --tcp --num-nccl-streams=1
--thread-affinity=1 --gloo-timeout-seconds=30
--log-level=TRACE --log-with-timestamp --log-without-timestamp --log-hide-timestamp --no-log-hide-timestamp
-prefix-timestamp --prefix-output-with-timestamp -H=localhost:2 --hosts=localhost:2 -hostfile=h --hostfile=h
--gloo --mpi --jsrun
"""
HOROVODRUN = LISTED.split()
LATER = ["--jsrun"]


def main(words: list[str]) -> int:
    """Run horovodrun with the arguments ``words``, and return its exit code."""
    return run_program(horovodrun, "horovodrun", words)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[JobDescription]:
    """What would have been started."""
    seen: list[JobDescription] = []

    def note(launch: JobDescription) -> int:
        seen.append(launch)
        return 7

    monkeypatch.setattr(run_module, "run_job", note)
    monkeypatch.setattr(run_module, "check_route", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h").write_text("localhost slots=2\n")
    (tmp_path / "c.toml").write_text("")
    (tmp_path / "s.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "s.sh").chmod(0o755)
    return seen


def words_of(flag: str) -> list[str]:
    name, _, value = flag.partition("=")
    if "," in value:
        return [name, *value.split(",")]
    return [name, value] if value else [name]


@pytest.mark.parametrize("flag", HOROVODRUN)
def test_every_flag_is_taken_or_answered(
    flag: str, launches: list[JobDescription], capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag starts the job, or the command ends with 2 and one line that names the flag. A value follows a space or =."""
    name = flag.partition("=")[0]
    here = [] if name in ("-np", "--num-proc", "-H", "--hosts", "-hostfile", "--hostfile") else ["-np", "2"]
    code = main([*here, *words_of(flag), "true"])
    out, err = capsys.readouterr()
    if name in ("-v", "--version", "-cb", "--check-build"):
        assert code == 0 and "0.28.1" in out
    elif flag in LATER:
        assert (code, launches, err.count("\n")) == (2, [], 1)
        assert err.startswith(f"horovodrun: {name}: "), err
    else:
        assert code == 7, err
        assert len(launches) == 1
        assert err.count("\n") <= 1
    if "=" in flag and "," not in flag and not name.startswith(("-np", "-p", "-i", "-H")):
        assert main([*here, flag, "true"]) == code


def test_the_table_has_every_flag_once() -> None:
    """Each flag in the table is a flag of horovodrun, and each row of the table has one effect."""
    listed = [*NATIVE, *(name for row in FLAGS for name in row.names)]
    assert sorted(listed) == sorted({flag.partition("=")[0] for flag in HOROVODRUN})
    known = {"", *settings_of({}, warns=False)[0]}
    for row in (*FLAGS, *VARIABLES, *SETTINGS_OF_NATIVE.values()):
        assert [bool(way) for way in (row.setting, row.environ, row.note, row.later)].count(True) == 1, row
        assert row.setting in known
    ours = {name for option in horovodrun.params for name in (*option.opts, *option.secondary_opts)}
    ours |= {f"--{no}{name.replace('_', '-')}" for name in known for no in ("", "no-")}  # those of plugins, too
    assert set(NATIVE.values()) <= ours


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        (["--gloo"], "backend", "gloo"),
        (["--mpi"], "backend", "mpi"),
        (["--fusion-threshold-mb", "2"], "fusion_bytes", 2 << 20),
        (["--autotune-steps-per-sample", "7"], "autotune_steps", 7),
        (["--autotune-bayes-opt-max-samples", "9"], "autotune_trials", 9),
        (["--autotune-log-file", "a.csv"], "autotune_log", "a.csv"),
        (["--start-timeout", "12"], "start_timeout_s", 12.0),
        (["--network-interfaces", "lo,eth0"], "network_interface", "lo,eth0"),
        (["--no-stall-check"], "stall_warning_s", 0.0),
        (["--stall-check-warning-time-seconds", "7"], "stall_warning_s", 7.0),
        (["--gloo-timeout-seconds", "8"], "open_timeout_s", 8.0),
        (["--log-level", "TRACE"], "log_level", "DEBUG"),
        (["--mpi-args", "--x 1", "--binding-args=--y"], "launcher_args", "--x 1 --y"),
        (["--stall-check-shutdown-time-seconds", "9"], "stall_shutdown_s", 9.0),
        (["--min-num-proc", "2"], "min_np", 2),
        (["--min-np", "1"], "min_np", 1),
        (["--elastic-timeout", "9"], "elastic_timeout_s", 9.0),
        (["--reset-limit", "4"], "reset_limit", 4),
        (["--timeline-filename", "t.json"], "timeline", "t.json"),
        (["--timeline-mark-cycles"], "timeline_mark_cycles", True),
        (["-p", "2200"], "ssh_port", 2200),
        (["-i", "key"], "ssh_identity_file", "key"),
    ],
)
def test_what_flags_become(flags: list[str], setting: str, value: object, launches: list[JobDescription]) -> None:
    """Horovod's flags become ddl's settings."""
    assert main(["-np", "2", *flags, "true"]) == 7
    assert launches[0].settings[setting] == value


def test_our_own_flags_and_variables_win(launches: list[JobDescription], monkeypatch: pytest.MonkeyPatch) -> None:
    """ddl's flags and variables count more than Horovod's flags, which count more than Horovod's variables."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "1")
    monkeypatch.setenv("DDL_STALL_WARNING_S", "2")
    assert main(["-np", "2", "--fusion-threshold-mb", "3", "true"]) == 7
    assert main(["-np", "2", "--fusion-threshold-mb", "3", "--fusion-bytes", "4", "true"]) == 7
    assert [launch.settings["fusion_bytes"] for launch in launches] == [3 << 20, 4]
    assert launches[0].settings["stall_warning_s"] == 2.0


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({"DISABLE": "1", "TIME_SECONDS": "9"}, {"stall_warning_s": 0.0}),
        ({"DISABLE": "0", "TIME_SECONDS": "9"}, {"stall_warning_s": 9.0}),
        ({"DISABLE": "0"}, {}),
    ],
)
def test_a_stall_check_that_is_off_stays_off(variables: dict[str, str], settings: dict[str, float]) -> None:
    """The times that are set have no effect then, as in Horovod."""
    assert read_variables({f"HOROVOD_STALL_CHECK_{name}": to for name, to in variables.items()}).settings == settings


def test_tcp_reaches_the_ranks(launches: list[JobDescription]) -> None:
    """The flag --tcp sets NCCL_IB_DISABLE for the ranks."""
    assert main(["-np", "2", "--tcp", "true"]) == 7
    assert launches[0].environ["NCCL_IB_DISABLE"] == "1"


def test_what_is_later_may_be_switched_off(launches: list[JobDescription]) -> None:
    """A value that turns something off needs no counterpart."""
    assert main(["-np", "2", "--max-np", "0", "true"]) == 7


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--fusion-threshold-mb", "-1"], "--fusion-threshold-mb -1: must be a number >= 0"),
        (["--fusion-threshold-mb", "much"], "--fusion-threshold-mb much: must be a number >= 0"),
        (["--log-level", "LOUD"], "is none of TRACE"),
    ],
)
def test_bad_values(
    flags: list[str], complaint: str, launches: list[JobDescription], capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad value ends the command with one line and the exit code 2."""
    assert main(["-np", "2", *flags, "true"]) == 2
    err = capsys.readouterr().err
    assert (launches, err.count("\n")) == ([], 1)
    assert complaint in err


@pytest.mark.parametrize("row", VARIABLES, ids=lambda row: row.names[0])
def test_every_variable_is_taken_or_answered(row: Foreign) -> None:
    """Each variable becomes a setting, or is named in one line. None is ignored without a word, and none is an error."""
    for name in row.names:
        given = read_variables({name: "debug" if row.setting == "log_level" else "1"})
        lines = [*given.notes, *given.refusals]
        if row.setting:
            assert set(given.settings) == {row.setting}
        else:
            assert len(lines) == 1 and lines[0].startswith(f"{name}: "), name


def test_variables_are_told_and_stop_nothing(
    launches: list[JobDescription], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variables without an effect, known and unknown ones, are named in a line, and the job starts."""
    monkeypatch.setenv("HOROVOD_TIMELINE", "t.json")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOROVOD_NO_SUCH", "5")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "debug")
    assert main(["-np", "2", "true"]) == 7
    told = sorted(line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines())
    assert told == ["HOROVOD_CYCLE_TIME", "HOROVOD_NO_SUCH"]
    assert launches[0].settings["timeline"] == "t.json"
    assert launches[0].settings["log_level"] == "DEBUG"
