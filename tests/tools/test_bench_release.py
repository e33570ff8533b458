"""What the release of gradients costs: the table, and a run of the tool from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench_release import COMMIT, EVENT, UNSAFE, table

TOOL = Path(__file__).parents[2] / "tools" / "bench_release.py"


def row(how: str, compute_ms: float, step: float, **more: float) -> dict[str, object]:
    times = {"user": 0.0, "commit": 0.0, "device": 0.0, "messages": 0.0, **more}
    return {"how": how, "compute_ms": compute_ms, "step": step, **times}


def test_exposed_is_beyond_the_unsafe_one() -> None:
    """Of the same computation."""
    rows = [row(COMMIT, 0, 300, commit=150), row(UNSAFE, 0, 200), row(EVENT, 5, 5400), row(UNSAFE, 5, 5100)]
    lines = [line.split() for line in table(rows)[1:]]
    assert [(line[0], line[2], line[3], line[5]) for line in lines] == [
        ("0", "commit", "300", "100"),
        ("0", "unsafe", "200", "0"),
        ("5", "event", "5400", "300"),
        ("5", "unsafe", "5100", "0"),
    ]


def test_bad_words() -> None:
    """One line, before any rank starts."""
    words = [sys.executable, str(TOOL), "--compute-ms", "5,x"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "--compute-ms 5,x: milliseconds" in done.stderr


@pytest.mark.long
@pytest.mark.processes
def test_a_run(tmp_path: Path) -> None:
    """A message a step in one way of the three, a wait for the device in another."""
    pytest.importorskip("ddl_gloo", reason="measures over ddl-gloo")
    words = [sys.executable, str(TOOL), "--compute-ms", "1", "--steps", "10", "--rounds", "1"]
    words += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    rows = {one["how"]: one for one in json.loads((tmp_path / "rows.json").read_text())}
    assert rows[COMMIT]["messages"] == 1
    assert rows[COMMIT]["device"] == rows[UNSAFE]["device"] == 0
    assert rows[EVENT]["device"] > 0
    assert rows[EVENT]["messages"] == rows[UNSAFE]["messages"] == rows[UNSAFE]["commit"] == 0
