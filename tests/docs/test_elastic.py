"""The script in docs/elastic.md trains, in an elastic job and in one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks

(BLOCK,) = [block for page in PAGES for block in blocks(page) if block.run_by == "tests/docs/test_elastic.py"]

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.mark.parametrize("elastic", [True, False])
def test_it_trains(elastic: bool, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "train.py").write_text(BLOCK.code)
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins/ddl_torch/src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", *["--min-np=1"] * elastic, "python", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] rank {rank} of 2 has trained" for rank in range(2)]
