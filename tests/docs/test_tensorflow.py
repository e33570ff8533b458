"""What docs/tensorflow.md shows is what happens; its commands are run by the plugin's own tests of the examples."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tensorflow.md").read_text()

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_code_prints_what_it_says(tmp_path: Path) -> None:
    """Each block of code (the session's last, as it turns eager execution off) prints the lines beneath the first."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    command, _, shown = blocks[0].partition("# $ ddl run ")[2].partition("\n")
    (tmp_path / "train.py").write_text("".join(f"exec({block!r}, {{}})\n" for block in blocks))
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins/ddl_tf/src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "run", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(len(blocks) * [line[2:] for line in shown.splitlines()])
