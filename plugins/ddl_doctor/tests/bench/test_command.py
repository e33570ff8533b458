"""``ddl bench`` as a user starts it: what it refuses at once, and one small run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ddlcore.commands.cli import main
from tests.launch.starting import Ddl
from tests.tiers import long

REFUSED = 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--against", "pigeon"), "no bench peer is called 'pigeon'; there are "),
        (("--ops", "reduce"), "'reduce' is not one of allreduce, allgather, broadcast, reducescatter, alltoall"),
        (("--sizes", "4X"), "'4X' is no size"),
        (("-np", "1"), "a collective needs at least 2 ranks"),
        (("--backend", "threads"), "are threads of one process"),
        *long(
            (("--dtype", "complex"), "--dtype complex is not one of"),
            (("--rounds", "0"), "'--rounds'"),
            (("--backend", "pigeon"), "no transport is called 'pigeon'"),
            (("--json", "nowhere/times.json"), "there is no directory nowhere"),
            (("--plot", "nowhere/chart.png"), "there is no directory nowhere"),
            (("--plot", "."), "--plot .: it is a directory; name a file in it"),
            (("surplus",), "unexpected extra argument"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals(ddl: Ddl, arguments: tuple[str, ...], text: str) -> None:
    """One line, exit code 2, nothing started."""
    done = ddl("bench", *arguments)
    assert done.returncode == REFUSED, done.stderr
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "0"], "'--rounds'"),
        (["--dtype", "complex"], "--dtype complex is not one of"),
        (["--backend", "pigeon"], "no transport is called 'pigeon'"),
        (["--json", "nowhere/times.json"], "--json nowhere/times.json: there is no directory nowhere"),
        (["--json", "."], "--json .: it is a directory; name a file in it"),
        (["--plot", "nowhere/chart.png"], "--plot nowhere/chart.png: there is no directory nowhere"),
        (["surplus"], "unexpected extra argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_is_not_measured(
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """One line and exit code 2, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddl_doctor.bench.command._measure", lambda *_: pytest.fail("it measures"))
    assert main(["bench", *arguments]) == REFUSED
    told = capsys.readouterr()
    assert text in told.err and told.err.count("\n") == 1 and told.out == ""


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The line that installs it, whichever of its modules is missing."""
    for name in ("matplotlib", "matplotlib.backends", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "--plot", str(tmp_path / "chart.png")]) == REFUSED
    told = capsys.readouterr()
    assert told.err == "ddl bench: --plot needs matplotlib; pip install matplotlib\n" and told.out == ""


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_a_file_that_cannot_be_written_costs_a_line(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What was measured stands on the screen all the same."""
    monkeypatch.setattr("ddl_doctor.bench.command._measure", lambda *_: None)
    monkeypatch.setattr("ddl_doctor.bench.command._check_files", lambda *_: None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddl_doctor.bench.chart.draw", full)
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["bench", option, str(tmp_path / "x.png")]) == REFUSED
    assert f"ddl bench: {option} {tmp_path}/x.png: No space left on device" in capsys.readouterr().err


def test_help(ddl: Ddl) -> None:
    """Shows its own options and the settings."""
    done = ddl("bench", "--help")
    assert done.returncode == 0
    for word in ("-np", "--against", "--ops", "--sizes", "--dtype", "--rounds", "--json", "--plot", "--backend"):
        assert word in done.stdout


@pytest.mark.processes
def test_a_small_run(ddl: Ddl, tmp_path: Path) -> None:
    """A table for each operation on stdout, nothing on stderr; a setting reaches the ranks."""
    done = ddl(
        "bench", "--ops", "allreduce,alltoall", "--sizes", "4,64K", "--rounds", "2", "--replay", "--json", "t.json"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [text for text in lines if "2 ranks" in text] == [
        "allreduce, 2 ranks, float32",
        "alltoall, 2 ranks, float32",
    ]
    assert [text[:8] for text in lines if text[4:8] in (" 4 B", " 8 B") or "64 KiB" in text] == [
        "     4 B",
        "  64 KiB",
        "     8 B",
        "  64 KiB",
    ]
    assert "times: t.json" in lines
    assert (tmp_path / "t.json").exists()


@pytest.mark.processes
def test_json_of_a_run(ddl: Ddl, tmp_path: Path) -> None:
    """What was measured, on what."""
    done = ddl("bench", "--ops", "broadcast", "--sizes", "4", "--rounds", "3", "--dtype", "i16", "--json", "t.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "t.json").read_text())
    assert (found["ranks"], found["transport"], found["dtype"]) == (2, "shm", "int16")
    assert [len(values) for values in found["rows"][0]["times_s"].values()] == [3, 3]
