"""What the page on GPUs shows is what happens, here without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddlcore.testing import run_world

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text()


def test_the_example_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The first block learns what it says."""
    pytest.importorskip("torch")
    block = PAGE.partition("```python\n")[2].partition("```")[0]

    def play(rank: int, job: Any) -> None:
        exec(compile(block, "docs/gpu.md", "exec"), {})

    run_world(1, play)
    assert capsys.readouterr().out == "rank 0 of 1 learned y = 3.0 x\n"


def test_links_lead_somewhere() -> None:
    """Every relative link names a file."""
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", PAGE) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_settings_have_the_names_that_the_code_reads() -> None:
    """DDL_... variables stand in the table of settings."""
    from ddlcore.config import SETTINGS

    known = {row.env for row in SETTINGS}
    assert set(re.findall(r"\bDDL_[A-Z_]+", PAGE)) <= known
