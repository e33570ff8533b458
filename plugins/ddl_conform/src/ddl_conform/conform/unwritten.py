"""Finds the methods of a plugin's class that are still to be written.

The methods are found in the class and in its source code. None of them is called.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from ddl_conform.conform.kinds import contract_methods


def unwritten(tested: Any, contract: type) -> list[str]:
    """Return ``Class.method`` for each method of the class ``tested`` that is still to be written.

    Such a method is a method of ``contract`` that is abstract or missing in ``tested``, or any method of ``tested``
    that only raises NotImplementedError. In the second case, the text also contains the file and the line.
    """
    found = dict.fromkeys(name for name in contract_methods(contract) if _absent(tested, name, contract))
    lines = [f"{tested.__name__}.{name}" for name in found]
    for owner, name, function in _methods(tested):
        if getattr(tested, name, None) is function and _only_raises(function):
            code = function.__code__
            lines.append(f"{owner}.{name}  ({code.co_filename}:{code.co_firstlineno})")
    return lines


def _absent(tested: Any, name: str, contract: type) -> bool:
    return name in getattr(tested, "__abstractmethods__", ()) or not hasattr(tested, name)


def _methods(tested: Any) -> Iterator[tuple[str, str, FunctionType]]:
    """Yield (class name, function name, function) for each function of the class ``tested`` and of its base classes.

    Base classes of ddlcore's contracts, of the conformance kit and of Python's own library are left out. The functions
    of one class are in the order of their definition.
    """
    for base in getattr(tested, "__mro__", ()):
        if base.__module__.startswith(("ddlcore.contracts", "ddl_conform", "builtins", "abc", "typing")):
            continue
        for name, value in vars(base).items():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                yield base.__name__, name, function


def _only_raises(function: FunctionType) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # it has no source file
        return False
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    body = [node for node in definition.body if not _is_text(node)]
    return len(body) == 1 and isinstance(body[0], ast.Raise) and _raised(body[0]) == "NotImplementedError"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _raised(node: ast.Raise) -> str:
    what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return what.id if isinstance(what, ast.Name) else ""
