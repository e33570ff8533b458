"""Gives each field its trailing comment as a docstring, as an extension of griffe, which reads sources for mkdocstrings.

The contracts describe the fields of their dataclasses in comments behind them.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import griffe

__all__ = ["FieldComments"]


class FieldComments(griffe.Extension):
    """The extension. griffe makes one object of it for each run."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **rest: Any) -> None:
        """Take the comment behind the definition of ``attr``, if nothing else describes it."""
        if attr.docstring is not None or not isinstance(node, (ast.AnnAssign, ast.Assign)) or node.end_lineno is None:
            return
        assert isinstance(attr.filepath, Path), "it is a list for a package without __init__.py, which has no fields"
        line = attr.lines_collection[attr.filepath][node.end_lineno - 1]
        behind = line.encode()[node.end_col_offset or 0 :].decode().strip()
        if behind.startswith("# ") and not behind.startswith("# type:"):
            attr.docstring = griffe.Docstring(behind[2:], lineno=node.end_lineno, parent=attr)
