"""Scripts in the pages that end in a command and its output print just that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/concepts.md", "docs/inference.md", "docs/moving.md")  # the frameworks' own pages have tests of their own


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_scripts_print_what_they_say(page: str, tmp_path: Path) -> None:
    """Each in turn, in one folder: a later one may use what an earlier one has left."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    if any("torch" in block for block in blocks):
        pytest.importorskip("torch")
    path = [str(ROOT), str(ROOT / "plugins/ddl_torch/src"), os.environ.get("PYTHONPATH", "")]
    for block in blocks:
        command, _, shown = block.partition("# $ ")[2].partition("\n")
        assert command, f"a script does not say how it is run:\n{block}"
        words = command.split()
        (tmp_path / words[-1]).write_text(block)
        module = {"ddl": ["-m", "ddlcore.launch"], "python": []}[words[0]]
        done = subprocess.run(
            [sys.executable, *module, *words[1:]],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
            capture_output=True,
            text=True,
            timeout=55,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [line[2:] for line in shown.splitlines()]
