"""No signal handler leaves a lock locked: the blocks in which a lock is held have a form that CPython protects."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.architecture.source import Source, core

LOCK = "ddlcore.reentry"
SEPARATE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)  # their code runs in another frame
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)


def lock_names(source: Source) -> set[str]:
    """The names of the attributes that ``source`` sets to a new ``Lock()`` of ddlcore.reentry."""
    if all(name != f"{LOCK}.Lock" for _, name in source.imports()):
        return set()
    return {
        ast.unparse(target).rpartition(".")[2]
        for node in source.nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "Lock()"
        for target in node.targets
    }


def loops(block: Sequence[ast.stmt]) -> Iterator[int]:
    """Yield the line of each loop in ``block``, and of each comprehension with a condition. Nested functions do not count."""
    nodes: list[ast.AST] = list(reversed(block))
    while nodes:
        node = nodes.pop()
        filtered = isinstance(node, COMPREHENSIONS) and any(generator.ifs for generator in node.generators)
        if filtered or isinstance(node, (ast.For, ast.While)):
            yield node.lineno  # type: ignore[attr-defined]  # all of these have one
        if not isinstance(node, SEPARATE):
            nodes += reversed(list(ast.iter_child_nodes(node)))


def unprotected(source: Source, locks: set[str]) -> list[int]:
    """The lines of the loops in those blocks of ``source`` that hold a lock."""
    return [
        line
        for node in source.nodes
        if isinstance(node, ast.With)
        and any(ast.unparse(item.context_expr).rpartition(".")[2] in locks for item in node.items)
        for line in loops(node.body)
    ]


def test_no_loop_is_in_a_block_that_holds_a_lock() -> None:
    """In Python 3.12 and later, ``with`` does not cover a conditional backward jump; see ddlcore.reentry.Lock."""
    own = {source: lock_names(source) for source in core()}
    public = {name for names in own.values() for name in names if not name.startswith("_")}
    assert "lock" in public
    assert [f"{one}:{line}" for one, names in own.items() for line in unprotected(one, names | public)] == []


def test_the_rule_finds_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from ddlcore.reentry import Lock\n"
        "class Queue:\n"
        "    def __init__(self):\n"
        "        self._state = Lock()\n"
        "    def loop(self):\n"
        "        with self._state:\n"
        "            if self.ready:\n"
        "                for one in self.all:\n"  # 8
        "                    self.take(one)\n"
        "    def filtered(self):\n"
        "        with self.queue._state:\n"
        "            return [one for one in self.all if one]\n"  # 12
        "    def harmless(self):\n"
        "        with self._state:\n"
        "            return [one.name for one in self.all], any(one for one in self.all if one)\n"
        "        while self.ready:\n"
        "            with self._state:\n"
        "                self.take()\n"
    )
    source = Source(path, "module")
    assert unprotected(source, lock_names(source)) == [8, 12]
