"""The page on GPUs names settings as the code does."""

from __future__ import annotations

import re
from pathlib import Path

from ddlcore.config.table import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text()


def test_settings_have_the_names_that_the_code_reads() -> None:
    """DDL_... variables stand in the table of settings."""
    known = {row.env for row in SETTINGS}
    assert set(re.findall(r"\bDDL_[A-Z_]+", PAGE)) <= known
