"""``ddl tune`` and `ddl run --autotune`: what is written, what is said, what is refused."""

from __future__ import annotations

import itertools
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.builtin.tuners.grid import GridTuner
from ddlcore.commands.cli import main
from ddlcore.commands.search_bar import Bar
from ddlcore.commands.search_lines import SearchLines, outcome
from ddlcore.commands.tune.command import _read_warm, tune
from ddlcore.commands.tune.report import best_so_far, draw, draw_panels, html_text, write_report
from ddlcore.commands.tune.results import about_text, config_text, settings_found, write_config
from ddlcore.config.file import read_toml
from ddlcore.config.loading import load_settings
from ddlcore.launch.job.launcher import JobDescription
from ddlcore.launch.ranks.exit_status import NotStarted
from ddlcore.plug.loader import load_plugins
from ddlcore.plug.settings import settings_of
from ddlcore.process.search import chosen_tuner, plan_search
from ddlcore.tune.driver import SearchDriver
from ddlcore.tune.session import Phase, Session, TimedSteps
from ddlcore.tune.space import CORE
from ddlcore.types import Value
from tests.tiers import long

DEFAULT: dict[str, Value] = {"fusion_bytes": 8 << 20, "first_bucket_bytes": 1 << 20, "overlap": "off"}

# Pictures take nearly all the time of these tests.
PICTURES = pytest.mark.parametrize("pictures", [False, *long(True)], ids=["text", "pictures"], indirect=True)

SCRIPT = """
import sys, time
import numpy as np
import ddlcore as ddl
ddl.init()
for step in range(int(sys.argv[1])):
    handles = [ddl.allreduce_async(np.full(512, step, np.float32), name=f"t{i}", op=ddl.Sum) for i in range(6)]
    for handle in handles:
        assert (ddl.synchronize(handle) == step * ddl.size()).all()
    time.sleep(0.012)
"""


def finished(
    gain: float, names: Sequence[str] = ("overlap",), watch: Callable[[Session], None] = lambda session: None
) -> Session:
    """A search in which each of ``names`` at its other value saves so much. ``watch`` is called after each sample."""

    class Told(GridTuner):
        def ask(self) -> dict[str, Value] | None:
            other: dict[str, Value] = {"fusion_bytes": 1 << 20, "first_bucket_bytes": 64 << 10, "overlap": "on"}
            return {knob.name: other[knob.name] if knob.name in names else DEFAULT[knob.name] for knob in self.knobs}

    session = Session(CORE, DEFAULT, Told, 4)
    taken = 0
    while session.phase is not Phase.DONE:
        values = session.next()
        taken += 1
        cost = 0.010 * (1 - gain) ** sum(values[name] != DEFAULT[name] for name in names)
        session.measured([cost * (1 + 0.001 * (taken % 3))] * 5)
        watch(session)
    return session


@pytest.fixture
def pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a report has pictures. If not, this test has no matplotlib."""
    if not request.param:
        monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    return bool(request.param)


# --- what is written


def test_a_config_holds_what_is_worth_a_change(tmp_path: Path) -> None:
    """`ddl run --config` takes it; it says what it is for and what is gained."""
    session = finished(0.2)
    text = config_text(session, "python train.py, 2 ranks on 1 host")
    (tmp_path / "tuned.toml").write_text(text)
    assert read_toml(tmp_path / "tuned.toml") == {"overlap": "on"}
    assert "python train.py, 2 ranks" in text and "20.0 % faster" in text


def test_sizes_say_what_overlap_was(tmp_path: Path) -> None:
    """A size that somebody chose turns overlap=auto on: what was measured had it off."""
    (tmp_path / "tuned.toml").write_text(config_text(finished(0.1, ["fusion_bytes"]), "x"))
    file = read_toml(tmp_path / "tuned.toml")
    assert file == {"fusion_bytes": 1 << 20, "overlap": "off"}
    assert load_settings({}, file).overlaps(1) is False


def test_sizes_say_what_an_auto_overlap_was(tmp_path: Path) -> None:
    """Also where the config file that it was tuned with said auto itself."""
    base: dict[str, Value] = {"overlap": "auto"}
    (tmp_path / "tuned.toml").write_text(config_text(finished(0.1, ["fusion_bytes"]), "x", base))
    file = read_toml(tmp_path / "tuned.toml")
    assert file == {"fusion_bytes": 1 << 20, "overlap": "off"}
    (tmp_path / "tuned.toml").write_text(config_text(finished(0.0), "x", base))
    assert read_toml(tmp_path / "tuned.toml") == base


@PICTURES
def test_any_command_and_any_value_can_be_written(pictures: bool, tmp_path: Path) -> None:
    """A comment ends with its line, a file holds no half characters, and TOML's strings are not quite JSON's."""
    about = about_text(["python", "-c", "a = 1\nbackend = 'shm'", "caf\xe9", "\udcff", "$\\foo$"], 2, 1)
    base: dict[str, Value] = {"cache_dir": '/tmp/\U0001f600\x7f\n"\\', "silence_s": float("inf")}
    session = finished(0.2)
    write_config(tmp_path / "tuned.toml", session, about, base)
    assert read_toml(tmp_path / "tuned.toml") == {**base, "overlap": "on"}
    write_report(tmp_path / "r.html", session, about)
    assert "caf\xe9" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_what_it_was_tuned_with_stays(tmp_path: Path) -> None:
    """The settings of the config file that it began with, but for what is changed; also where nothing is."""
    base: dict[str, Value] = {"first_bucket_bytes": 4096, "backend": "shm", "overlap": "off"}
    (tmp_path / "tuned.toml").write_text(config_text(finished(0.2), "x", base))
    assert read_toml(tmp_path / "tuned.toml") == {**base, "overlap": "on"}
    (tmp_path / "tuned.toml").write_text(config_text(finished(0.0), "x", base))
    assert read_toml(tmp_path / "tuned.toml") == base


def test_nothing_is_written_without_a_gain(tmp_path: Path) -> None:
    """The file is a valid one, and empty but for what it says."""
    session = finished(0.0)
    (tmp_path / "tuned.toml").write_text(config_text(session, "x"))
    assert read_toml(tmp_path / "tuned.toml") == {}
    assert outcome(session) == "nothing beats the default beyond noise; going on with the default"


def test_an_unfinished_search_writes_no_setting(tmp_path: Path) -> None:
    """It says what it has, as a comment, and what it lacks."""
    session = Session(CORE, DEFAULT, GridTuner, 9)
    session.measured([0.01])
    session.measured([0.005])
    assert settings_found(session) == {}
    (tmp_path / "tuned.toml").write_text(config_text(session, "x"))
    assert read_toml(tmp_path / "tuned.toml") == {}
    assert "Still to do: 7 of 9 trials" in (tmp_path / "tuned.toml").read_text()
    assert "the best so far: fusion_bytes" in (tmp_path / "tuned.toml").read_text()


@pytest.mark.long
def test_the_report_is_one_file_and_a_picture(tmp_path: Path) -> None:
    """Everything in it is there without another file, text is escaped, and the picture is a PNG."""
    pytest.importorskip("matplotlib", reason="pip install 'ddlcore[tune]': pictures need matplotlib")
    session = finished(0.2, ["overlap", "fusion_bytes"])
    files = write_report(tmp_path / "r.html", session, "python <train>.py")
    assert files == [tmp_path / "r.html", tmp_path / "r.png"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "r.html").read_text()
    assert "python &lt;train&gt;.py" in text and "data:image/png;base64," in text
    assert "tuned, without and with fusion_bytes" in text
    assert not re.search(r'(src|href)="(?!data:)', text)


@pytest.mark.long
def test_a_report_of_what_has_just_begun(tmp_path: Path) -> None:
    """One sample is enough to draw, and no matplotlib to write."""
    session = Session(CORE, DEFAULT, GridTuner, 9)
    session.measured([0.01])
    assert draw(session, "x") is None or draw(session, "x")
    assert "Pictures need matplotlib" in html_text(session, "x", None)


def test_a_report_without_matplotlib_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, which says how pictures come. One sample is enough."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    session = Session(CORE, DEFAULT, GridTuner, 9)
    session.measured([0.01])
    assert (draw(session, "x"), draw_panels(session)) == (None, None)
    assert write_report(tmp_path / "r.html", session, "x <y>") == [tmp_path / "r.html"]
    text = (tmp_path / "r.html").read_text()
    assert "Pictures need matplotlib" in text and "<p>x &lt;y&gt;</p>" in text
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_the_bar_stays_below_what_others_write() -> None:
    """It is taken away before a line is written and drawn again after it; a line that has begun is left alone."""
    seen: list[bytes] = []
    bar = Bar()
    above = bar.beneath(seen.append)
    above(b"one\n")
    session = Session(CORE, DEFAULT, GridTuner, 9)
    session.measured([0.01])
    bar.sampled(session, session.samples[0], 1)
    assert b"1/23" in seen[-1] and b"best 10.00 ms" in seen[-1]
    line = seen[-1].lstrip(b"\r")
    above(b"two\n")
    assert seen[-3:] == [b"\r\x1b[2K", b"two\n", line]
    above(b"three")
    assert seen[-2:] == [b"\r\x1b[2K", b"three"]
    bar.clear()
    assert seen[-1] == b"three"


def test_plain_lines() -> None:
    """Without a terminal: what is searched, now and then how far it is, and the end."""
    said: list[str] = []
    lines = SearchLines(said.append, samples=True)
    lines.began(Session(CORE, DEFAULT, GridTuner, 4), 1 << 20)
    session = finished(0.2, watch=lambda session: lines.sampled(session, session.samples[-1], 1 << 20))
    lines.ended(session, "")
    assert said[0].startswith("searching fusion_bytes, first_bucket_bytes, overlap in 4 trials; a step moves 1.00 MiB")
    assert sum("samples (" in line for line in said) == len(session.samples) // 5
    assert sum(line.startswith("comparing the default with the best so far: ") for line in said) == 1
    assert said[-1].startswith("overlap=on: 20.0 % faster than the default")


# --- what is searched


def test_knobs_come_with_what_is_used() -> None:
    """Of shared memory within a host; of what crosses, and whether by hosts first, on several."""
    settings, registry = settings_of({})
    one_host = plan_search(settings, registry, [0, 0])
    assert [knob.name for knob in one_host.knobs][:4] == [*DEFAULT, "shm_chunk_bytes"]
    assert one_host.default["overlap"] == "off"
    allowed, _ = settings_of({}, {"autotune_compression": True, "fusion_bytes": 1 << 20})
    names = [knob.name for knob in plan_search(allowed, registry, [0, 0]).knobs]
    assert "compression" in names and "fusion_bytes" not in names


def test_hosts_bring_flat_or_hierarchical() -> None:
    """The knob takes the cross transport alone, or the composed one; both reopen."""
    if "gloo" not in load_plugins(load_settings({})).transports:
        pytest.skip("no transport that spans hosts is installed: pip install ddl-gloo")
    settings, registry = settings_of({}, {"backend": "shm+gloo"})
    # What is said by a flag is not searched, what comes from a file is where the search begins.
    assert "backend" not in [knob.name for knob in plan_search(settings, registry, [0, 0, 1, 1]).knobs]
    settings, registry = settings_of({}, file={"backend": "shm+gloo"})
    knobs = {knob.name: knob for knob in plan_search(settings, registry, [0, 0, 1, 1]).knobs}
    assert knobs["backend"].choices == ("shm+gloo", "gloo") and knobs["backend"].reopens
    assert "hierarchical_chunk_bytes" in knobs


def test_the_tuner_is_the_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto takes bayes where it can be used, else grid; one that is named and missing is refused with a fix."""
    settings, registry = settings_of({})
    assert chosen_tuner(settings, registry) in ("bayes", "grid")
    monkeypatch.setattr(type(registry), "missing", lambda self, provider: "absent" if provider.name == "bayes" else "")
    assert chosen_tuner(settings, registry) == "grid"


# --- the command line


def test_an_earlier_log_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    """Also one with lines that somebody has added to."""
    text = "sample,phase,fusion_bytes,steps,step_ms,score\n1,search,65536,13,4.0,1.0\n2,search,4096,13,2.0,2.0,a,note\n3,sea\n"
    for name in ("tune.csv", "tune.log"):
        (tmp_path / name).write_text(text)
        assert _read_warm(tmp_path / name)[:2] == [{"fusion_bytes": 4096}, {"fusion_bytes": 65536}], name


@pytest.mark.processes
def test_a_search_that_is_given_up_ends_the_command(tmp_path: Path) -> None:
    """A training of an hour is not waited for, and why is said."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code = (
        "import ddlcore.tune.driver as driver, sys; from ddlcore.commands.cli import main\n"
        "def narrowed(*given): raise RuntimeError('no idea')\n"
        "driver.narrowed = narrowed; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "tune", "-np", "2", "--tuner", "grid", "--out", str(tmp_path / "tuned.toml"),
         sys.executable, str(script), "300000"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "no step was measured: the tuner failed: RuntimeError: no idea" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tuner", "none"], "no tuner is called 'none'; there are bayes, grid"),
        (["--no-replay"], "autotune measures steps that are replayed, and replay is off"),
        (["--out", "nowhere/tuned.toml"], "--out nowhere/tuned.toml: there is no directory nowhere"),
        (["--out", "."], "--out .: it is a directory; name a file in it"),
        (["--report", "nowhere/r.html"], "--report nowhere/r.html: there is no directory nowhere"),
        (["--out", "tuned.html"], "need names of their own"),
        (["--report", "r.png"], "need names of their own"),
        (["--warm-start", "gone.toml"], "--warm-start: config file gone.toml: No such file or directory"),
        (["--warm-start", "gone.csv"], "gone.csv"),
        (["--trials", "0"], "--trials"),
        (["--config", "gone.toml"], "config file gone.toml"),
    ],
)
def test_what_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names it, exit code 2, and nothing is started."""
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "-np", "2", *words, "true"]) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1


def test_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    assert "ddl tune -np 4 --out tuned.toml python train.py" in " ".join(capsys.readouterr().out.split())
    assert {option.name for option in tune.params} >= {"trials", "out", "report", "warm_start", "runs"}


def test_what_is_refused_leaves_an_earlier_log_alone(tmp_path: Path) -> None:
    """Nothing was begun, so nothing is lost."""
    (tmp_path / "log.csv").write_text("sample\n")
    words = ["--autotune-log", str(tmp_path / "log.csv"), "--out", str(tmp_path)]
    assert main(["tune", "-np", "2", *words, "true"]) == 2
    assert (tmp_path / "log.csv").read_text() == "sample\n"


@PICTURES
@pytest.mark.parametrize(("error", "code"), [(NotStarted("no room", 7), 7), (KeyboardInterrupt(), 130)])
def test_what_was_measured_before_a_run_that_does_not_start(
    error: BaseException, code: int, pictures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of the runs before it is written."""

    def run_job(launch: JobDescription) -> int:
        assert isinstance(launch.driver, SearchDriver)
        if launch.driver.session is not None:
            raise error
        launch.driver.session = Session(CORE, DEFAULT, GridTuner, 9)
        launch.driver.session.measured([0.01])
        return 0

    monkeypatch.setattr("ddlcore.commands.tune.command.run_job", run_job)
    assert main(["tune", "-np", "2", "--out", str(tmp_path / "tuned.toml"), "true"]) == code
    assert "Still to do: 8 of 9 trials" in (tmp_path / "tuned.toml").read_text()
    assert (tmp_path / "tuned.html").exists()


@PICTURES
@pytest.mark.parametrize(("words", "runs"), [([], 12), (["--runs", "3"], 3)])
def test_a_short_training_is_run_until_the_search_has_ended(
    words: list[str], runs: int, pictures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often that is, unless it is bounded, or a run measures nothing."""
    done = 0

    def run_job(launch: JobDescription) -> int:
        nonlocal done
        assert isinstance(launch.driver, SearchDriver)
        launch.driver.session = launch.driver.session or Session(CORE, DEFAULT, GridTuner, 40)
        if done < 11:
            launch.driver.session.measured([0.01])
        done += 1
        return 0

    monkeypatch.setattr("ddlcore.commands.tune.command.run_job", run_job)
    assert main(["tune", "-np", "2", "--out", str(tmp_path / "t.toml"), *words, "true"]) == 1
    assert done == runs


@pytest.mark.parametrize("measured", [0, 1])
@pytest.mark.parametrize("left", ["t.html", *long("t.toml", "t.png")])
def test_a_search_that_fails_leaves_what_an_earlier_one_has_written(
    left: str,
    measured: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What it has itself stands beside that."""

    def run_job(launch: JobDescription) -> int:
        assert isinstance(launch.driver, SearchDriver)
        launch.driver.session = Session(CORE, DEFAULT, GridTuner, 9)
        for _ in range(measured):
            launch.driver.session.measured([0.01])
        return 3

    monkeypatch.setattr("ddlcore.commands.tune.command.run_job", run_job)
    (tmp_path / left).write_text("earlier")
    assert main(["tune", "-np", "2", "--out", str(tmp_path / "t.toml"), "false"]) == 3
    assert (tmp_path / left).read_text() == "earlier"
    assert read_toml(tmp_path / "t.unfinished.toml") == {}
    assert (tmp_path / "t.unfinished.html").exists() is bool(measured)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir()), "nothing is left behind"
    assert "t.toml and the report beside it stay as they were" in capsys.readouterr().err


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full takes nothing from what was there."""
    path = tmp_path / "tuned.toml"
    path.write_text("earlier")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"--out .*tuned\.toml: No space left on device"):
        write_config(path, finished(0.2), "x")
    assert [one.name for one in tmp_path.iterdir()] == ["tuned.toml"]
    assert path.read_text() == "earlier"


def test_a_lucky_sample_is_not_the_best() -> None:
    """Settings that looked best once, and not again, count by the median of all their samples from the beginning."""
    looks = [TimedSteps(i, Phase.SEARCH, {"a": value}, (cost,), cost) for i, (value, cost) in enumerate(
        [(0, 0.010), (1, 0.008), (2, 0.011), (1, 0.014)], 1)]  # fmt: skip
    assert best_so_far(looks) == [0.010, 0.010, 0.010, 0.010]


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(1e-4, 1.0)), min_size=1, max_size=30))
def test_the_best_so_far_never_rises(taken: list[tuple[int, float]]) -> None:
    """Whatever is measured, and measured again; at the end it is the best that the search itself has found."""
    samples = [TimedSteps(i, Phase.SEARCH, {"a": value}, (cost,), cost) for i, (value, cost) in enumerate(taken, 1)]
    best = best_so_far(samples)
    assert len(best) == len(samples)
    assert all(later <= earlier for earlier, later in itertools.pairwise(best))
    last: dict[int, list[float]] = {}
    for value, cost in taken:
        last.setdefault(value, []).append(cost)
    assert best[-1] == min(map(statistics.median, last.values()))


def test_the_tables_of_a_report() -> None:
    """The best so far never rises in the table, either; numbers and units are not torn apart, pictures say what they show."""
    session = finished(0.2, ["overlap", "fusion_bytes"])
    text = html_text(session, "x", [("a <description>", b"png")])
    cells = re.findall(r"<tr>((?:<td>[^<]*</td>)+)</tr>", text.partition("<h2>Samples</h2>")[2])
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in cells]
    best = [float(row[-1]) for row in rows if row[1] == "search"]
    assert best == sorted(best, reverse=True) and best[-1] < best[0]
    assert all(row[-1] == "–" for row in rows if row[1] != "search")
    assert 'alt="a &lt;description&gt;"' in text
    assert "36.0\N{NO-BREAK SPACE}% faster" in text


def test_the_axes_of_the_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a title and a unit; the samples are numbered by whole numbers."""
    pytest.importorskip("matplotlib", reason="pip install 'ddlcore[tune]': pictures need matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []

    def png(figure: Figure) -> bytes:
        figures.append(figure)
        return b"png"

    monkeypatch.setattr("ddlcore.commands.tune.report._png", png)
    session = finished(0.2, ["overlap", "fusion_bytes"])
    panels = draw_panels(session)
    assert panels is not None and len(panels) == len(figures) == 2 + len(session.knobs)
    for figure in figures:
        (panel,) = figure.axes
        assert panel.get_ylabel() == "time of a step (ms)"
    first = figures[0].axes[0]
    assert first.get_xlabel() == "number of the sample"
    assert all(float(tick).is_integer() for tick in first.get_xticks())


@pytest.mark.long
@pytest.mark.processes
def test_a_training_is_tuned_and_run_with_the_result(tmp_path: Path) -> None:
    """The command, of 60 steps, ends before the search; it is run again until the search has ended, and all is written."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["--trials", "6", "--autotune-steps", "3", "--tuner", "grid", "--autotune-log", str(tmp_path / "log.csv")]
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "tune", "-np", "2", *words, "--out", str(tmp_path / "tuned.toml"),
         "--runs", "20", sys.executable, str(script), "60"],
        capture_output=True, text=True, timeout=220,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Running it again (2 of 20)" in done.stderr
    assert "failed" not in done.stderr
    read_toml(tmp_path / "tuned.toml")
    log = (tmp_path / "log.csv").read_text().splitlines()
    assert log[0].startswith("sample,phase,fusion_bytes,") and log[0].endswith(",steps,step_ms,score")
    assert (tmp_path / "tuned.html").exists()
    again = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", "--config", str(tmp_path / "tuned.toml"),
         sys.executable, str(script), "20"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr


@pytest.mark.processes
def test_a_script_without_steps_is_told_so(tmp_path: Path) -> None:
    """Nothing was measured: it says what a search needs, and fails."""
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "tune", "-np", "2", "--tuner", "grid", "--out",
         str(tmp_path / "tuned.toml"), "true"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no step was measured: a search needs a loop whose steps repeat and allreduce" in done.stderr
    assert read_toml(tmp_path / "tuned.toml") == {}
