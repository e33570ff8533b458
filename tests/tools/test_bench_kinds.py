"""What the whole call of each kind is held to, and a run of the tool from end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow

from tools.bench_kinds import GLOO, judged
from tools.test_cluster import why_no_cluster

TOOL = Path(__file__).parents[2] / "tools" / "bench_kinds.py"


def row(operation: str, nbytes: int, whole_us: float, transport_us: float, gloo_us: float | None = None) -> MeasuredRow:
    times = {WHOLE: [whole_us * 1e-6] * 9, TRANSPORT: [transport_us * 1e-6] * 9}
    if gloo_us is not None:
        times[GLOO] = [gloo_us * 1e-6] * 9
    return MeasuredRow(operation, nbytes, times)


def test_small_tensors_are_judged_by_the_time_beyond_the_transport() -> None:
    """An allgather and an alltoall may take longer, because they also tell sizes."""
    rows = [row("broadcast", 8, 18.0, 2.0), row("allgather", 16384, 18.0, 2.0), row("alltoall", 8, 23.0, 2.0)]
    assert [one.verdict for one in judged(rows)] == ["MISSES", "holds", "MISSES"]


def test_large_tensors_are_judged_by_the_share_of_the_bandwidth() -> None:
    """What is neither small nor large has no target."""
    rows = [
        row("broadcast", 1 << 20, 100.0, 93.0),
        row("broadcast", 1 << 24, 100.0, 90.0),
        row("broadcast", 1 << 17, 9.0, 1.0),
    ]
    assert [one.verdict for one in judged(rows)] == ["holds", "MISSES"]


def test_gloo_is_judged_by_size() -> None:
    """The targets are for 8 bytes, 1 MiB and 16 MiB; other sizes are shown."""
    rows = [row("alltoall", nbytes, 10.0, 10.0, 30.0) for nbytes in (8, 1 << 20, 1 << 24, 1 << 26)]
    found = [one for one in judged(rows) if one.what.endswith("Gloo")]
    assert [one.verdict for one in found] == ["MISSES", "MISSES", "holds", ""]


@pytest.mark.long
@pytest.mark.processes
def test_the_table(tmp_path: Path) -> None:
    """`ddl bench` measures, and the table stands between the marks of a document."""
    pytest.importorskip("ddl_torch", reason="torch's Gloo is a peer of ddl-torch")
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- kinds: begin -->\nstale\n<!-- kinds: end -->\nafter\n")
    words = [
        "--rounds",
        "2",
        "--no-check",
        "--ops",
        "broadcast,alltoall",
        "--sizes",
        "8,1M",
        "--markdown",
        str(document),
    ]
    done = subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("8 rows, ") for line in done.stdout.splitlines())
    text = document.read_text()
    assert text.startswith(
        "before\n<!-- kinds: begin -->\n\n`python tools/bench_kinds.py --rounds 2 --ops broadcast,alltoall"
    )
    assert "| broadcast, beyond the transport | 8 B |" in text
    assert "stale" not in text and text.endswith("<!-- kinds: end -->\nafter\n")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_ranks_on_several_hosts() -> None:
    """One rank on each host of a test cluster. The command that the table names can be run again."""
    pytest.importorskip("ddl_torch", reason="torch's Gloo is a peer of ddl-torch")
    if why := why_no_cluster():
        pytest.skip(why)
    words = ["--hosts", "2", "--rate", "200", "--rounds", "2", "--no-check", "--ops", "allgather", "--sizes", "8,1M"]
    command = [sys.executable, str(TOOL), *words, "--backend", "gloo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr
    assert "bench_kinds.py --hosts 2 --rate 200 --rounds 2 --ops allgather --sizes 8,1M --backend gloo" in done.stdout
    assert any(line.startswith("4 rows, ") for line in done.stdout.splitlines()), done.stdout
