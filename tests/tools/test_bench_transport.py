"""What a transport is held to, and a run of the tool from end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ddl_doctor.bench.results import TRANSPORT, MeasuredRow

from tools.bench_transport import STANDARD, judged
from tools.bench_verdicts import missed

TOOL = Path(__file__).parents[2] / "tools" / "bench_transport.py"


def row(nbytes: int, **times: float) -> MeasuredRow:
    return MeasuredRow("allreduce", nbytes, {name: [value] * 9 for name, value in times.items()})


def test_verdicts() -> None:
    """How many times longer the transport takes; what one of the two has not is no row."""
    rows = [row(4, **{TRANSPORT: 1.0, "peer": 1.0}), row(64, **{TRANSPORT: 1.2, "peer": 1.0}), row(8, **{TRANSPORT: 9})]
    found = judged("gloo", "gloo", rows, STANDARD["gloo"][2])
    assert [(one.size, one.verdict) for one in found] == [("4 B", "holds"), ("64 B", "MISSES")]
    assert missed(found) == found[1:]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["shm"], "nothing stands beside shm; name a peer by --against"),
        (["gloo", "--sizes", "4x"], "'4x' is no size"),
        (["gloo", "--rounds", "0"], "at least one is needed"),
    ],
)
def test_bad_words(words: list[str], told: str) -> None:
    """One line, before any rank starts."""
    done = subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.long
@pytest.mark.processes
def test_gloo_against_itself() -> None:
    """A table of the sizes that were asked for."""
    pytest.importorskip("ddl_gloo", reason="measures ddl-gloo")
    pytest.importorskip("ddl_torch", reason="torch's Gloo is a peer of ddl-torch")
    words = [sys.executable, str(TOOL), "gloo", "--sizes", "4,1M", "--rounds", "2", "--no-check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[4:6] for line in done.stdout.splitlines()[2:4]] == [["4", "B"], ["1", "MiB"]]
    assert any(line.startswith("2 rows, ") for line in done.stdout.splitlines())  # what misses is named below it
