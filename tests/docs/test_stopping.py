"""The script in docs/stopping.md saves one checkpoint after a signal, and ``ddl run`` ends with the code that it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks

(BLOCK,) = [block for page in PAGES for block in blocks(page) if block.run_by == "tests/docs/test_stopping.py"]

pytestmark = [pytest.mark.processes, pytest.mark.long]


def test_it_saves_and_the_job_ends_with_85(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    shown = "print('trains', flush=True) if step == 30 else None\n    if ddl.should_stop():\n        break"
    (tmp_path / "train.py").write_text(BLOCK.code.replace("if ddl.should_stop():\n        break", shown, 1))
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins/ddl_torch/src"), os.environ.get("PYTHONPATH")]))
    job = subprocess.Popen(
        [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", "python", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout is not None
    guard = threading.Timer(120.0, job.kill)
    guard.start()
    try:
        lines = []
        for line in job.stdout:
            lines.append(line)
            if line == "[0] trains\n":
                job.send_signal(signal.SIGUSR1)
        out = "".join(lines)
        assert job.wait() == 85, out
    finally:
        guard.cancel()
    (step,) = re.findall(r"\[0\] saved after step (\d+)", out)
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved["step"] == int(step) >= 30 and set(saved["model"]) == {"weight", "bias"}
    assert "exit code 85" in (ROOT / "docs/stopping.md").read_text()
