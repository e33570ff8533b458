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


def test_it_lists_what_is_no_class() -> None:
    """Exported constants, members of enums, and comments that stand inside the parentheses of a value."""
    text = (ROOT / "docs/reference.md").read_text()
    for line in (
        "- `DONE: Work = …`: the Work of a collective that is complete when its call returns",
        "- `BF16 = 7`",
        "- `dtypes: frozenset[DType] = ALL_DTYPES`: types that can be reduced; 16-bit floats",
        "- `target: ClassVar[str] = ''`: \"module:Class\" of the transport",
    ):
        assert line in text, line
    assert "`test_" not in text, "the standard tests are not what a plugin's author writes"
