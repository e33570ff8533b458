"""tools/gpu_check.py: what its rows say, and what becomes of parts that die or hang; its programs run on the CPU here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path

import pytest
from ddl_nccl.standin import StandIn

from tools import gpu_check
from tools.gpu.metadata import write_missing
from tools.gpu.rows import Row, check, heard, not_measured, number, reasons, table, tell
from tools.gpu_check import Part, main, parts, run_part


@pytest.mark.parametrize(
    ("values", "at_least", "verdict"),
    [
        ([0.8, 0.81, 0.82, 0.83, 0.84, 0.85], True, "holds"),
        ([0.5, 0.51, 0.52, 0.53, 0.54, 0.55], True, "misses"),
        ([0.7, 0.71, 0.74, 0.74, 0.9, 0.9], True, "within spread"),
        ([0.5, 0.51, 0.52, 0.53, 0.54, 0.55], False, "holds"),
        ([0.8, 0.81, 0.82, 0.83, 0.84, 0.85], False, "misses"),
        ([0.9], False, "misses"),
    ],
)
def test_a_number_misses_only_by_its_whole_interval(values: list[float], at_least: bool, verdict: str) -> None:
    row = number("copies", values, 0.75, "×", at_least)
    assert row.verdict == verdict
    assert row.target == ("≥ 0.75 ×" if at_least else "≤ 0.75 ×")


def test_rows_come_back_from_what_a_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [check("a", "b", "wrong"), check("a", "b", stand_in="CPU"), not_measured("c", "d", "no GPU")]
    tell(rows)
    lines = capsys.readouterr().out.splitlines()
    assert [heard(f"[1] {line}") for line in lines] == rows
    assert heard("anything else") is None


def test_a_reason_is_told_once() -> None:
    rows = [
        not_measured("a", "", "no GPU"),
        Row("b", "", "", "holds"),
        not_measured("c", "", "no GPU"),
        check("d", "", "x"),
    ]
    assert reasons(rows) == ["no GPU", "x"]
    assert [row[-1] for row in table(rows)] == ["holds?", "not measured (1)", "holds", "not measured (1)", "FAILED (2)"]


def program(text: str, timeout_s: float = 120.0, title: str = "") -> Part:
    return Part("part", [sys.executable, "-c", text], timeout_s, title=title)


def test_a_part_that_dies_is_a_row() -> None:
    (row,) = run_part(program("import sys; print('boom'); sys.exit(3)"), show=False)
    assert (row.verdict, row.why) == ("FAILED", "exit status 3: boom")


def test_a_part_that_hangs_is_ended() -> None:
    begun = time.monotonic()
    (row,) = run_part(program("import time; time.sleep(60)", 0.5), show=False)
    assert row.verdict == "FAILED" and "no end within" in row.why
    assert time.monotonic() - begun < 20


def test_what_a_part_leaves_behind_is_ended_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ignores the signal, and what it has started keeps its output open: a pipe that never ends."""
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    text = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"left = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, 'w').write(str(left.pid)); "
        "time.sleep(60)"
    )
    begun = time.monotonic()
    (row,) = run_part(program(text, 2.0), show=False)
    assert row.verdict == "FAILED" and "no end within" in row.why
    assert time.monotonic() - begun < 20
    left = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10.0
    while lives(left):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Return whether the process runs."""
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()  # a zombie waits for its new parent
    except OSError:  # it has ended, perhaps between the opening of the file and its reading
        return False


def test_whoever_ends_the_check_ends_its_part() -> None:
    """It has a session of its own, which else would go on and hold the GPU."""
    command = [sys.executable, "tools/gpu_check.py", "--no-gpu", "--only", "kernels"]
    with subprocess.Popen(command, cwd=gpu_check.ROOT, stdout=subprocess.PIPE, text=True) as check_:
        tasks = Path(f"/proc/{check_.pid}/task")
        deadline = time.monotonic() + 50.0
        while len(list(tasks.iterdir())) < 3:  # its own and two clocks: it reads what the part says
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (part,) = (tasks / str(check_.pid) / "children").read_text().split()
        check_.terminate()
        check_.communicate(timeout=120.0)
    assert check_.returncode == 143
    assert not Path("/proc", part).exists()  # it has been waited for


def test_a_row_that_cannot_be_read_is_a_row() -> None:
    text = "from tools.gpu.rows import check, tell; print('gpu-check row: {[1] gpu-'); tell([check('good', '')])"
    first, second = run_part(program(text), show=False)
    assert first.verdict == "FAILED" and "cannot be read" in first.why
    assert second.verdict == "passed"


@pytest.mark.long
def test_rows_are_told_as_they_come_and_the_rest_when_the_time_is_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is stopped has what was measured; who has said when it must be over gets a table."""
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.0)
    good = Part("good", [sys.executable, "-c", "from tools.gpu.rows import check, tell; tell([check('it', '')])"])
    broken = Part("broken", ["/nowhere/a-program"])
    slow = program("import time; time.sleep(60)")
    never = Part("never", [sys.executable, "-c", "raise SystemExit('this has run')"])
    monkeypatch.setattr(gpu_check, "parts", lambda *_: iter((good, broken, slow, never)))
    assert main(["--no-gpu", "--only", "good,broken,part,never", "--within", "5"]) == 1
    told = capsys.readouterr().out
    before, _, table_ = told.partition("\nwhat ")
    assert "passed: it" in before and table_
    assert "FAILED: broken" in before and "FAILED: part" in before
    assert "not measured: never" in before and "this has run" not in told


def test_a_part_that_there_is_not() -> None:
    with pytest.raises(SystemExit, match="no part is called kernel;"):
        main(["--no-gpu", "--json", "--only", "kernel"])


def test_rows_of_a_part_that_then_dies_are_kept() -> None:
    text = "from tools.gpu.rows import check, tell; tell([check('good', '')]); 1 / 0"
    first, second = run_part(program(text), show=False)
    assert first.verdict == "passed"
    assert second.verdict == "FAILED" and "division by zero" in second.why


def test_a_status_can_be_the_row() -> None:
    (row,) = run_part(program("pass", title="suite"), show=False)
    assert (row.what, row.verdict) == ("suite", "passed")
    (row,) = run_part(program("raise SystemExit(2)", title="suite"), show=False)
    assert row.verdict == "FAILED"


def test_without_a_gpu_nothing_asks_for_one(tmp_path: Path) -> None:
    for part in parts(False, 15, tmp_path):
        assert "cuda" not in part.command and "--gpu" not in part.command
    with_gpu = [part.name for part in parts(True, 15, tmp_path)]
    assert with_gpu == ["compile", "kernels", "copies", "nccl", "nccl of two", "two", "training", "training of two"]


def test_two_ranks_are_shown_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    (two,) = (part for part in parts(True, 15, tmp_path) if part.name == "two")
    assert two.environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_an_nccl_whose_ranks_share_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told of, and nothing is run."""
    for version, why in ((22907, "NCCL 2.29.7: ranks can share a GPU since NCCL 2.30"), (23007, "")):
        monkeypatch.setattr("ddl_nccl.library.load", lambda version=version: StandIn(version))
        (two,) = (part for part in parts(True, 15, tmp_path) if part.name == "nccl of two")
        assert two.why == why and two.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    (row,) = run_part(replace(two, why="too old"), show=False)
    assert (row.what, row.verdict, row.why) == ("nccl of two", "not measured", "too old")


@pytest.mark.long
@pytest.mark.processes
def test_on_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels in the simulator."""
    assert main(["--no-gpu", "--json", "--only", "kernels"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpu"] is False and told["holds"] is True
    assert [row["verdict"] for row in told["rows"]] == ["passed, without a GPU"] * 2


def test_packages_that_are_not_installed_are_found_by_their_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    assert "ddlcore" not in write_missing(gpu_check.ROOT, tmp_path / "none")
    monkeypatch.setattr("tools.gpu.metadata.version", missing)
    written = write_missing(gpu_check.ROOT, tmp_path / "all")
    assert {"ddlcore", "ddl-torch", "ddl-nccl"} <= set(written)
    found = {each.name: each for each in distributions(path=[str(tmp_path / "all")])}
    (point,) = found["ddl-nccl"].entry_points.select(group="ddlcore.plugins.v2")
    assert (point.name, point.value) == ("nccl", "ddl_nccl.plugin")


def test_what_was_not_measured_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "parts", lambda *_: ())
    assert main(["--no-gpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["verdict"] for row in rows} == {"not measured"}
    assert {row["why"] for row in rows} == {"no GPU: --no-gpu was given"}
    assert len(rows) == 8 + 6 + 3
