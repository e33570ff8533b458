"""torch's own tests on ddl: what the tool runs, and what it makes of the results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tools import torch_suite
from tools.torch_suite import DDL, DDL_FOR_MPI, ENDED, FAILED, GLOO, PASSED, SKIPPED, Result

ROOT = Path(__file__).resolve().parents[2]


def named(*results: Result) -> dict[str, Result]:
    return {result.test: result for result in results}


RESULTS = {
    GLOO: named(
        Result("test_a", PASSED),
        Result("test_b", PASSED),
        Result("test_get_backend", PASSED),
        Result("test_c", FAILED),
        Result("test_m", SKIPPED, "Only MPI supports this"),
        Result("test_g", SKIPPED, "Need 2 GPUs"),
    ),
    DDL: named(
        Result("test_a", PASSED),
        Result("test_b", ENDED),
        Result("test_get_backend", FAILED),
        Result("test_c", FAILED),
        Result("test_m", SKIPPED),
        Result("test_g", SKIPPED),
    ),
    DDL_FOR_MPI: named(Result("test_m", FAILED)),
}


def test_what_passes_on_gloo_or_needs_mpi_must_pass() -> None:
    assert [result.test for result in torch_suite.differing(RESULTS)] == ["test_b", "test_get_backend", "test_m"]
    assert torch_suite.need_mpi(RESULTS[GLOO]) == ["test_m"]


def test_the_table_counts_and_gives_reasons() -> None:
    lines = torch_suite.markdown(RESULTS)
    assert lines[2:5] == [
        "| Gloo | 3 | 1 | 0 | 2 |",
        "| ddl | 1 | 2 | 1 | 2 |",
        "| ddl instead of MPI | 0 | 1 | 0 | 0 |",
    ]
    assert "| `test_b` | ended |" in lines
    assert f"| `test_get_backend` | {torch_suite.REASONS['test_get_backend']} |" in lines


def test_a_test_that_ends_the_process_does_not_keep_others_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process goes on behind it."""
    begun: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        path, *names = command[command.index("--here") + 1 :]
        begun.append(names)
        told = (
            [Result(names[0], ENDED)] if names[0] == "test_b" else [Result(names[0], PASSED), Result(names[1], ENDED)]
        )
        Path(path).write_text("".join(json.dumps(asdict(result)) + "\n" for result in told))
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    results = torch_suite.run_on(DDL, ["test_a", "test_b", "test_c", "test_d"], 2, 1.0)
    assert {name: result.outcome for name, result in results.items()} == {
        "test_a": PASSED,
        "test_b": ENDED,
        "test_c": PASSED,
        "test_d": ENDED,
    }
    assert begun == [["test_a", "test_b", "test_c", "test_d"], ["test_c", "test_d"]]


def suite(only: str, folder: Path) -> tuple[int, str, str]:
    page = folder / "page.md"
    page.write_text("before\n<!-- torch_suite: begin -->\n<!-- torch_suite: end -->\nafter\n")
    command = [sys.executable, str(ROOT / "tools/torch_suite.py"), "--np", "2", "--only", only, "--markdown", str(page)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    return done.returncode, done.stdout, page.read_text()


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(400)
def test_some_tests_of_torch(tmp_path: Path) -> None:
    """One needs MPI and passes on ddl; one fails on ddl, for a known reason."""
    code, out, page = suite("test_all_to_all", tmp_path)
    assert code == 0, out
    assert "| ddl instead of MPI | 1 | 0 | 0 | 0 |" in page
    code, out, page = suite("test_get_backend", tmp_path)
    assert code == 0, out
    assert "| Gloo | 1 | 0 | 0 | 0 |" in page and "| ddl | 0 | 1 | 0 | 0 |" in page
    assert "'ddl' != 'gloo'" in out
    assert torch_suite.REASONS["test_get_backend"] in page and page.startswith("before") and page.endswith("after\n")
