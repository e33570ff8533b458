"""The command line: ours up to the first word that is no option, the ranks' from there on."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlcore.commands import provided
from ddlcore.commands.cli import main
from ddlcore.commands.run import command as run_module
from ddlcore.errors import PluginError
from ddlcore.hooks import CommandProvider
from ddlcore.launch.job.launcher import JobDescription
from ddlcore.plug import Distribution, Registry
from ddlcore.plug.registry import Refusal


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[JobDescription]:
    """What would have been started."""
    seen: list[JobDescription] = []

    def note(launch: JobDescription) -> int:
        seen.append(launch)
        return 7

    monkeypatch.setattr(run_module, "run_job", note)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return seen


@pytest.mark.parametrize(
    ("arguments", "size", "command"),
    [
        (["-np", "2", "true", "-np", "9", "--help"], 2, ["-np", "9", "--help"]),
        (["-np=2", "true", "--", "x"], 2, ["--", "x"]),
        (["--num-proc", "2", "--", "true", "-a"], 2, ["-a"]),
        (["-H", "localhost:3", "true"], 3, []),
        (
            ["-np", "2", "--verbose", "-m", "pkg.mod", "--verbose", "-np", "4"],
            2,
            ["-m", "pkg.mod", "--verbose", "-np", "4"],
        ),
        (["-np", "2", "--grace-s", "1", "-m", "mod"], 2, ["-m", "mod"]),
        (["-np", "2", "--", "-m", "mod", "-x"], 2, ["-m", "mod", "-x"]),
        (["-np", "2", "train.py", "-m", "x"], 2, ["train.py", "-m", "x"]),
        (["-np", "2", "--prefix-output-with-timestamp", "--output-dir", "-m", "true"], 2, []),
    ],
)
def test_where_the_command_begins(
    arguments: list[str], size: int, command: list[str], launches: list[JobDescription]
) -> None:
    """Options of the command are never taken for ours, `-m` begins a command, a value of ours never does."""
    assert main(["run", *arguments]) == 7
    assert launches[0].size == size
    assert list(launches[0].command[1:]) == command


def test_flags_win_over_environment_over_file_over_default(
    launches: list[JobDescription], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one table of settings, from all its sources."""
    (tmp_path / "ddl.toml").write_text("fusion_bytes = 1\ngrace_s = 2.0\nstall_warning_s = 3\n")
    monkeypatch.setenv("DDL_GRACE_S", "20")
    monkeypatch.setenv("DDL_STALL_WARNING_S", "30")
    assert main(["run", "-np", "2", "--config", "ddl.toml", "--stall-warning-s", "300", "true"]) == 7
    settings = launches[0].settings
    found = {
        name: (settings[name], settings.source(name))
        for name in ("fusion_bytes", "grace_s", "stall_warning_s", "backend")
    }
    assert found == {
        "fusion_bytes": (1, "file"),
        "grace_s": (20.0, "env"),
        "stall_warning_s": (300.0, "flag"),
        "backend": ("auto", "default"),
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["true"], "how many ranks"),
        (["-np", "two", "true"], "not a valid integer"),
        (["-np", "2"], "no command"),
        (["-np", "2", "--no-such-option", "true"], "--no-such-option"),
        (["-np", "2", "no-such.py"], "no-such.py: no such file"),
        (["-np", "2", "python", "no-such.py"], "no-such.py: no such file"),
        (["-np", "3", "-H", "localhost:2", "true"], "too few slots"),
        (["-np", "2", "-H", "h:2", "--hostfile", "h", "true"], "-H and --hostfile both say where"),
        (["-np", "2", "--hostfile", "absent", "true"], "--hostfile absent: No such file"),
        (["-np", "2", "--launcher", "pigeon", "-H", "h:2", "true"], "no launcher is called 'pigeon'; there are "),
        (["-np", "2", "--backend", "nonsense", "true"], "no transport is called 'nonsense'"),
        (
            ["-np", "2", "--plugins-off", "ddl-nccl", "--backend", "nccl", "true"],
            "no transport is called 'nccl'; ddl-nccl 0.1.0 is off",
        ),
        (["-np", "2", "--compression", "fp61", "true"], "no compressor is called 'fp61'; did you mean 'fp16'?"),
        (["-np", "2", "--tuner", "gird", "true"], "no tuner is called 'gird'; did you mean 'grid'?"),
        (["-np", "2", "--overlap", "onn", "true"], "--overlap: 'onn' is not one of auto, on, off"),
        (["-np", "2", "--backend", "threads", "true"], "threads of one process"),
        (["-np", "2", "--backend", "threads+threads", "true"], "threads of one process"),
        (["-np", "2", "--backend", "shm,alltoall=threads", "true"], "threads of one process"),
        (["-np", "2", "--backend", "solo", "true"], "1 to 1 ranks, not 2"),
        (["-np", "2", "--backend", "shm+", "true"], "a name is missing"),
        (["-np", "2", "--backend", "shm+nonsense", "true"], "no transport is called 'nonsense'"),
        (["-np", "2", "--backend", "shm,gather=shm", "true"], "'gather' is no kind of operation"),
        (["-np", "2", "--backend", "hierarchical", "true"], "is made of two others"),
        (["-np", "2", "--fusion-bytes", "-1", "true"], "--fusion-bytes: '-1' is below"),
        (["-np", "2", "--grace-s", "soon", "true"], "--grace-s: 'soon' is not of type float"),
        (["-np", "2", "--fusion-policy", "none", "true"], "no fusion policy is called 'none'"),
        (["-np", "2", "--config", "absent.toml", "true"], "absent.toml: No such file"),
        (["-np", "2", "--config", "bad.toml", "true"], "bad.toml: "),
        (["-np", "2", "--config", "old.yaml", "true"], "old.yaml: YAML is for horovodrun"),
        (["-np", "2", "--config", "key.toml", "true"], "no setting is called speed"),
        (["-np", "2", "--output-dir", "train.py", "true"], "--output-dir train.py"),
        (["-np", "2", "--rank-variables", "R=place", "true"], "rank_variables: 'R=place' is not of the form NAME=FACT"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    arguments: list[str],
    complaint: str,
    launches: list[JobDescription],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one line on stderr that begins with the command, and nothing is started."""
    (tmp_path / "bad.toml").write_text("= 3")
    (tmp_path / "key.toml").write_text("speed = 3")
    (tmp_path / "old.yaml").write_text("params:\n  fusion_threshold_mb: 32\n")
    assert main(["run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert complaint in err
    assert err.startswith("ddl run: ")
    assert (err.count("\n"), out, launches) == (1, "", [])


def test_variables_of_another_command_are_named(
    launches: list[JobDescription], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says which command reads them, and the job starts."""
    monkeypatch.setenv("HOROVOD_TIMELINE", "t.json")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "much")
    assert main(["run", "-np", "2", "true"]) == 7
    said = "ddl run: HOROVOD_CYCLE_TIME, HOROVOD_TIMELINE: not read here. horovodrun reads such variables: pip install "
    assert capsys.readouterr().err.startswith(said) and launches[0].settings["timeline"] == ""


@pytest.mark.parametrize("arguments", [["no-such-command"], ["--no-such-option"]])
def test_unknown_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused too."""
    assert main(arguments) == 2
    assert arguments[0] in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Both exit with 0; every setting has its flag in the help."""
    from ddlcore.config.table import SETTINGS

    assert main(["run", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert all(row.flag in text for row in SETTINGS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ddl 0.")


def test_a_misspelt_command_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """With the one that was meant, if there is one like it."""
    assert main(["rnu"]) == 2
    assert "No such command 'rnu'; did you mean 'run'?" in capsys.readouterr().err
    assert main(["xyzzy"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "doctor", "timeline"])
def test_a_command_whose_package_is_not_there(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says why, as for transports: the package is off; one that is not installed has the command that installs it."""
    monkeypatch.setenv("DDL_PLUGINS_OFF", "ddl-doctor")
    assert main([command, "--help"]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    assert err.startswith(f"ddl {command}: no command is called '{command}'; ddl-doctor 0.1.0 is off: DDL_PLUGINS_OFF")
    with pytest.raises(PluginError, match=f"no command is called '{command}'; install it: pip install .*ddl_doctor"):
        Registry().named(Registry.commands, command)
    assert main([command[:-1]]) == 2
    assert f"did you mean '{command}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("surely_not_there:command", "cannot be loaded: ModuleNotFoundError: No module named 'surely_not_there'"),
        ("ddlcore.errors:PluginError", "ddlcore.errors:PluginError is no Command"),
    ],
)
def test_a_command_that_cannot_be_loaded_breaks_no_other(
    target: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help shows it with the reason, and whoever calls it is told in one line."""
    registry = Registry()
    registry.offer(CommandProvider("hello", target), Distribution("ddl-hello", "1.0"))
    assert registry.problems == []
    monkeypatch.setattr(provided, "loaded", lambda: registry)
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "hello" in out and "(broken)" in out and "info" in out
    assert main(["hello", "--name", "x"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("ddl hello: command 'hello' of ddl-hello 1.0: ") and words in err


def test_a_command_of_a_plugin_that_is_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not called unknown without the reason."""
    registry = Registry()
    off = Refusal(Distribution("ddl-hello", "1.0"), "hello", "", "DDL_PLUGINS_OFF names it", off=True)
    registry.refusals.append(off)
    monkeypatch.setattr(provided, "loaded", lambda: registry)
    assert main(["hello"]) == 2
    expected = "ddl hello: there is no such command; ddl-hello 1.0 is off: DDL_PLUGINS_OFF names it"
    assert capsys.readouterr().err.strip() == expected


@pytest.mark.parametrize("command", ["run", "info", "tune"])
def test_the_help_of_an_own_command_does_not_wait_for_plugins(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for them takes longer than the rest."""
    monkeypatch.setattr(provided, "loaded", lambda: pytest.fail("it looks for plugins"))
    assert main([command, "--help"]) == 0


@pytest.mark.parametrize("command", [["doctor"], ["conform", "shm"], ["bench"]])
def test_a_wrong_variable_is_told_by_the_command(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has one line. `ddl --help` still works, although no plugin can be found with such a variable."""
    monkeypatch.setenv("DDL_GRACE_S", "soon")
    assert main(command) == 2
    assert capsys.readouterr().err == f"ddl {command[0]}: DDL_GRACE_S: 'soon' is not of type float\n"
    assert main(["--help"]) == 0
    assert command[0] in capsys.readouterr().out
