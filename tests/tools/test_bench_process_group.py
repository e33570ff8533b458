"""The benchmark of the calls of torch.distributed: its verdicts, and the command as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench_process_group import DDL, GLOO, TORCH, VERB, judged

TOOL = Path(__file__).parents[2] / "tools" / "bench_process_group.py"


def test_small_and_large_calls_have_targets() -> None:
    """A verdict is the ratio of times of the same round; sizes in between are only shown."""
    times = {
        ("all_reduce", 4): {DDL: [50e-6] * 9, GLOO: [500e-6] * 9, VERB: [42e-6] * 9, TORCH: [5e-6] * 9},
        ("broadcast", 65536): {DDL: [1e-3] * 9, GLOO: [1e-3] * 9},
        ("broadcast", 1 << 20): {DDL: [1e-3] * 9, GLOO: [2e-3] * 9},
    }
    rows = [(row.what, row.size, str(row.measured), row.verdict) for row in judged(times)]
    assert rows == [
        ("all_reduce against Gloo", "4 B", "10.0 [10.0, 10.0]", "holds"),
        ("all_reduce beyond ddl's own verb; torch alone: 5.0 µs", "4 B", "8.00 [8.00, 8.00]", "holds"),
        ("broadcast against Gloo", "64 KiB", "1.00 [1.00, 1.00]", ""),
        ("broadcast against Gloo", "1 MiB", "2.00 [2.00, 2.00]", "MISSES"),
    ]


@pytest.mark.alone
@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_measures_every_kind(tmp_path: Path) -> None:
    """The command as it stands: all kinds on stdout, and the table between the marks of a document."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- process group: begin -->\nstale\n<!-- process group: end -->\nafter\n")
    command = [sys.executable, str(TOOL), "--rounds", "2", "--sizes", "4,64K", "--no-check", "--markdown", str(page)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    for kind in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        assert done.stdout.count(f"{kind} against Gloo") >= 2, done.stdout
    assert "barrier against Gloo" in done.stdout
    text = page.read_text()
    assert "| all_reduce beyond ddl's own verb; torch alone: " in text
    assert "bench_process_group.py --sizes 4,64K --rounds 2`" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
