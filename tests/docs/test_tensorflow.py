"""TensorFlow's scripts in the pages print what they say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks

BLOCKS = [block for page in PAGES for block in blocks(page) if block.run_by == "tests/docs/test_tensorflow.py"]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_code_prints_what_it_says(tmp_path: Path) -> None:
    """All in one job, for TensorFlow takes seconds to import; a session's last, as it turns eager execution off."""
    shown, scripts = [], []
    for block in sorted(BLOCKS, key=lambda block: "disable_eager_execution" in block.code):
        code, _, told = block.code.partition("# $ ddl run -np 2 python train.py\n")
        assert told, f"{block} does not say how it is run"
        shown += [line[2:] for line in told.splitlines()]
        scripts.append(f"exec({code!r}, {{}})\n")
    assert {block.page for block in BLOCKS} == {"docs/tensorflow.md", "docs/moving.md"}
    (tmp_path / "train.py").write_text("".join(scripts))
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins/ddl_tf/src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", "python", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(shown)
