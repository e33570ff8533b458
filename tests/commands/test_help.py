"""The helps: short ones that fit a screen, whole ones that leave nothing out, and the options of plugins."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from ddl_doctor.bench.command import bench
from ddl_doctor.doctor.command import doctor

from ddlcore.commands.cli import main
from ddlcore.commands.help import OPTIONS, Option
from ddlcore.commands.run import command as run_module
from ddlcore.commands.run.command import run
from ddlcore.commands.tune.command import tune
from ddlcore.config.setting import GROUPS
from ddlcore.config.table import SETTINGS
from ddlcore.launch.job.launcher import JobDescription
from tests.plug.conftest import Site, site

__all__ = ["site"]

LARGE = {"run": run, "tune": tune, "doctor": doctor, "bench": bench}
SMALL = (["info"], ["conform"], ["plugins"], ["plugins", "new"], ["timeline"], ["timeline", "summary"])
# What `ddl run` took before its help had groups. Command lines in scripts use these: none may be lost.
FLAGS = """
--dry-run --top --check-build -cb -v --version -np --num-proc -H --hosts --hostfile -hostfile -p --ssh-port -i
--ssh-identity-file --config --config-file --output-dir --output-filename --prefix-output-with-timestamp
-prefix-timestamp --verbose --backend --device-dense --device-sparse --fusion-bytes --first-bucket-bytes
--overlap --replay --no-replay --control-address --network-interface --network-interfaces
--rendezvous-dir --launcher --launcher-args --silence-s --compression --autotune --no-autotune --autotune-log
--autotune-trials --autotune-steps --autotune-warmup-steps --autotune-compression --no-autotune-compression --tuner
--fusion-policy --start-timeout-s --open-timeout-s --leave-timeout-s --stall-warning-s --stall-shutdown-s --verify-every
--verify-first-step --no-verify-first-step --stall-stacks --no-stall-stacks --flight-dir --flight-records
--flight-signal --timeline --profiler-ranges --no-profiler-ranges --timeline-mark-cycles --no-timeline-mark-cycles
--grace-s --metrics-port --metrics-address --pulse-s --sample-ms --log-level --cache-dir --switch-interval-ms
--plugins --plugins-off -h --help
"""

PLUGIN = """
@hookimpl
def ddl_adapters():
    return [AdapterProvider('mine', 'a:B', settings=(
        Setting('mine_rate_s', float, 1.5, 'how often it looks', brief='How often.'),
        Setting('mine_safe', bool, True, 'whether it is careful'),
        Setting('mine_place', str, '', 'where it looks', group='hosts'),
        Setting('prefix_output_with_timestamp', str, '', 'ddl run has a flag of this name'),
    ))]
"""


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[JobDescription]:
    """What would have been started."""
    seen: list[JobDescription] = []

    def note(launch: JobDescription) -> int:
        seen.append(launch)
        return 0

    monkeypatch.setattr(run_module, "run_job", note)
    return seen


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What ``ddl`` prints, which must succeed."""
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out


def names_in(text: str) -> set[str]:
    """All words of a help that are names of options, at the beginning of a row."""
    rows = re.findall(r"^  (-.*?)(?:   .*)?$", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", row)}


def options_of(command: click.Command) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option) and not one.hidden]


def sections(text: str) -> dict[str, str]:
    """The groups of a help: title -> its rows."""
    parts = re.split(r"^(\w[^\n:]*): [^\n]*\n", text, flags=re.MULTILINE)
    return dict(zip(parts[3::2], parts[4::2]))  # the first heading is the usage


def test_the_help_of_run_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """About twenty options, each in one row."""
    lines = shown(capsys, "run", "--help").splitlines()
    assert 24 <= len(lines) <= 50
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.startswith("  -")]
    assert 18 <= len(rows) <= 25
    assert all(re.search(r"\S  +[A-Z]", row) for row in rows), "the text of each begins in its row"


@pytest.mark.parametrize("name", LARGE)
def test_the_help_of_every_command_fits_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 24 <= len(shown(capsys, name, "--help").splitlines()) <= 50


@pytest.mark.parametrize("name", LARGE)
def test_every_option_is_in_a_group(name: str) -> None:
    """Which has a title and says what it is for."""
    options = options_of(LARGE[name])
    assert len(options) > len(SETTINGS)
    for one in options:
        assert isinstance(one, Option), one.name
        assert one.group != OPTIONS, one.name
        assert one.group.title, one.name
        assert one.group.doc, one.name


def test_every_setting_names_a_group() -> None:
    """One of those that exist, and none of these is empty."""
    assert {row.group for row in SETTINGS} == set(GROUPS)


def test_groups_have_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    """What a user needs first comes first, in both helps."""
    titles = [name.capitalize() for name in GROUPS]
    assert list(sections(shown(capsys, "run", "--help"))) == [*titles, "Help"]
    whole = list(sections(shown(capsys, "run", "--help-all")))
    assert [title for title in whole if not title.startswith("Plugin ")] == [*titles, "Help"]
    assert next(iter(sections(shown(capsys, "tune", "--help")))) == "Search"


@pytest.mark.parametrize("name", LARGE)
def test_help_all_shows_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Under all its names, with the variable of each setting; the short help shows some of them."""
    text = shown(capsys, name, "--help-all")
    names = {flag for one in options_of(LARGE[name]) for flag in (*one.opts, *one.secondary_opts)}
    assert names - names_in(text) == set()
    words = " ".join(text.split())
    assert [row.env for row in SETTINGS if f"; {row.env}]" not in words] == []
    assert names_in(shown(capsys, name, "--help")) < names_in(text)


def test_no_option_of_run_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """The help shows each that it showed before."""
    assert set(FLAGS.split()) - names_in(shown(capsys, "run", "--help-all")) == set()


def test_both_names_of_a_switch_are_in_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, "run", "--help-all").splitlines()
    for row in SETTINGS:
        if row.type is bool:
            assert sum(line.startswith(f"  {row.flag} / --no-{row.flag[2:]}") for line in rows) == 1
    assert "  --autotune / --no-autotune  " in shown(capsys, "run", "--help")


def test_a_default_is_shown_as_a_user_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A switch is on or off, and an empty text is none; a number is not taken for a switch."""
    words = " ".join(shown(capsys, "run", "--help-all").split())
    assert "[default on; DDL_REPLAY]" in words
    assert "[default off; DDL_AUTOTUNE]" in words
    assert "[default: none; DDL_TIMELINE]" in words
    assert "[default 0; DDL_VERIFY_EVERY]" in words
    assert "[default 60; DDL_STALL_WARNING_S]" in words


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_examples_are_at_the_end(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One in a line, and each begins with ddl."""
    _, _, after = shown(capsys, name, option).rpartition("Examples:\n")
    assert len(after.splitlines()) >= 2
    assert all(re.match(r"    ddl (run|tune|doctor|bench)\b", line) for line in after.splitlines())


@pytest.mark.parametrize("arguments", SMALL, ids=" ".join)
def test_small_commands_have_one_group(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With everything in it, so they have no other help."""
    text = shown(capsys, *arguments, "--help")
    assert "\nOptions:\n" in text
    assert "-h, --help" in text
    assert "--help-all" not in text
    assert len(text.splitlines()) <= 24


def test_settings_of_a_plugin_are_options(
    site: Site, capsys: pytest.CaptureFixture[str], launches: list[JobDescription]
) -> None:
    """In a group of the plugin, or the core's group that the row names; the short help stays as it is."""
    before = shown(capsys, "run", "--help")
    site.install("ddl-mine", PLUGIN)
    assert shown(capsys, "run", "--help") == before
    groups = sections(shown(capsys, "run", "--help-all"))
    assert "Plugin ddl-mine" in groups, site.problems()
    assert names_in(groups["Plugin ddl-mine"]) == {"--mine-rate-s", "--mine-safe", "--no-mine-safe"}
    assert "--mine-place" in names_in(groups["Hosts"])
    assert "Plugin ddl-mine" in groups and "a flag of this name" not in "".join(groups.values())
    words = ["--mine-rate-s", "0.5", "--mine-place=here", "--no-mine-safe", "-m", "timeit", "--mine-safe"]
    assert main(["run", "-np", "2", *words]) == 0
    settings = launches[0].settings
    assert [settings[name] for name in ("mine_rate_s", "mine_place", "mine_safe")] == [0.5, "here", False]
    assert settings.source("mine_safe") == "flag"
    assert launches[0].command[1:] == ("-m", "timeit", "--mine-safe")
    assert "--mine-rate-s" in shown(capsys, "bench", "--help-all")


def test_a_bad_value_of_a_plugins_option_is_refused(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """By one line that names it, as for the core's."""
    site.install("ddl-mine", PLUGIN)
    assert main(["run", "-np", "2", "--mine-rate-s", "soon", "true"]) == 2
    assert capsys.readouterr().err == "ddl run: --mine-rate-s: 'soon' is not of type float\n", site.problems()


def test_plugins_are_not_asked_for_options_without_need(
    launches: list[JobDescription], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither options of the core nor those of the script make the start slower."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    asked: list[str] = []
    monkeypatch.setattr("ddlcore.commands.completion.installed", lambda: asked.append("plugins"))
    assert main(["run", "-np", "2", "--no-replay", "--grace-s=1", "train.py", "--epochs", "3"]) == 0
    assert main(["run", "-np", "2", "-m", "timeit", "--epochs", "3"]) == 0
    assert (len(launches), asked) == (2, [])
    assert main(["run", "-np", "2", "--surely-not-there", "train.py"]) == 2
    assert asked == ["plugins"]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("--stall-warning", "--stall-warning-s"), ("--no-repaly", "--no-replay"), ("--mine-rate", "--mine-rate-s")],
)
def test_an_unknown_option_is_told_what_is_near(
    wrong: str, meant: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of a plugin, too, and where all options are listed."""
    site.install("ddl-mine", PLUGIN)
    assert main(["run", "-np", "2", wrong, "1", "true"]) == 2
    err = capsys.readouterr().err
    assert meant in err, site.problems()
    assert "`ddl run --help-all` lists what there is" in err


def test_help_all_is_shown_where_a_variable_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what a user reads to find out what the variable may be."""
    monkeypatch.setenv("DDL_GRACE_S", "soon")
    assert "--grace-s" in shown(capsys, "run", "--help-all")
