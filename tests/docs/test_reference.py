"""docs/reference.md is what the docstrings say now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.reference()
    assert "### class `Transport(ABC)`" in drawn
    assert (ROOT / "docs/reference.md").read_text() == drawn, "it is stale: python tools/reference.py"
