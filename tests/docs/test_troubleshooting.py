"""The page on troubleshooting explains every error that ddl defines, and marks those after which the job cannot continue."""

from __future__ import annotations

import re
from pathlib import Path

from ddlcore import errors

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def test_every_error_is_explained() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)`( \*)? \| .+ \| .+ \|$", PAGE.read_text().partition("## Errors by name")[2])
    shown = {name: bool(mark) for name, mark in rows}
    bases = {"DdlInternalError", "HorovodInternalError"}
    defined = {name: issubclass(getattr(errors, name), errors.DdlInternalError) for name in errors.__all__}
    assert shown == {name: ends for name, ends in defined.items() if name not in bases}
