"""The pictures of docs/concepts.md are those that the tool draws."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/concepts.md").read_text()


def drawings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "tools/drawings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_drawn_by_the_tool() -> None:
    """Who changes the tool draws anew; the page shows all of them and no other."""
    made = {f"images/concept-{name}.svg": draw() for name, draw in drawings().DRAWINGS.items()}
    assert set(re.findall(r"\]\((images/[^)]+)\)", PAGE)) == set(made)
    for name, picture in made.items():
        assert (ROOT / "docs" / name).read_text() == picture, f"{name} is stale: python tools/drawings.py"
