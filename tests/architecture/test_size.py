"""No file, class or function is larger than a reader can hold. There is no list of exceptions, but one constructor."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source import Source, every

FILE_LINES = 500
CLASS_METHODS = 30
CONSTRUCTOR_ARGUMENTS = 10
FUNCTION_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_files() -> None:
    assert [f"{one}: {_lines(one)}" for one in every() if _lines(one) > FILE_LINES] == []


def test_classes() -> None:
    """Overloads of a method are one with it, as are the setter and the getter of a property."""
    sizes = {
        f"{source}: {node.name}": len({one.name for one in node.body if isinstance(one, Function)})
        for source in every()
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }
    assert {name: size for name, size in sizes.items() if size > CLASS_METHODS} == {}


def test_constructors() -> None:
    sizes = {
        f"{source}:{node.lineno}": _arguments(node) - 1 for source, node in _functions() if node.name == "__init__"
    }
    assert {name: size for name, size in sizes.items() if size > CONSTRUCTOR_ARGUMENTS} == {}


def test_functions() -> None:
    """Without the docstring: a public function with many arguments explains each of them."""
    sizes = {f"{source}: {node.name}": _code_lines(node) for source, node in _functions()}
    assert {name: size for name, size in sizes.items() if size > FUNCTION_LINES} == {}


def _functions() -> Iterator[tuple[Source, Function]]:
    for source in every():
        for node in source.nodes:
            if isinstance(node, Function):
                yield source, node


def _lines(source: Source) -> int:
    return source.text.count("\n")


def _arguments(node: Function) -> int:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return len(named) + bool(given.vararg) + bool(given.kwarg)


def _code_lines(node: Function) -> int:
    assert node.end_lineno is not None
    first = node.body[0]
    has_doc = ast.get_docstring(node) is not None
    doc = (first.end_lineno or 0) - first.lineno + 1 if has_doc else 0
    return node.end_lineno - node.lineno + 1 - doc
