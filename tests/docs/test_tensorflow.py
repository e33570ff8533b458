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


def ran(argv: list[str], folder: Path) -> str:
    """What it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins/ddl_tf/src"), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(360)
def test_the_code_prints_what_it_says(tmp_path: Path) -> None:
    """All in one job, for TensorFlow takes seconds to import; a session's last, as it turns eager execution off.

    What uses a file that training has left runs behind it, by itself.
    """
    shown, scripts, users = [], [], []
    for block in sorted(BLOCKS, key=lambda block: "disable_eager_execution" in block.code):
        code, _, told = block.code.partition("# $ ")
        command, _, lines = told.partition("\n")
        if command == "python use.py":
            users.append((code, lines))
            continue
        assert command == "ddl run -np 2 python train.py", f"{block} does not say how it is run"
        shown += [line[2:] for line in lines.splitlines()]
        scripts.append(f"exec({code!r}, {{}})\n")
    assert len(scripts) == 6 and len(users) == 1
    (tmp_path / "train.py").write_text("".join(scripts))
    launch = [sys.executable, "-m", "ddlcore.launch", "run", "-np", "2", "python", "train.py"]
    assert sorted(ran(launch, tmp_path).splitlines()) == sorted(shown)
    for code, lines in users:
        (tmp_path / "use.py").write_text(code)
        assert ran([sys.executable, "use.py"], tmp_path).splitlines() == [line[2:] for line in lines.splitlines()]
