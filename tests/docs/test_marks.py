"""Comments before a block say how it is run, and a comment that says it wrongly is an error."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks
from tests.docs.commands import commands, objection


def test_marks_belong_to_the_block_below_them() -> None:
    """Other comments, and those of another block, do not."""
    text = """<!-- table: begin -->
<!-- not run: needs a GPU -->
```sh
one
```

<!-- before: x = 1 -->
<!-- not run where it says "-H": needs hosts -->
```sh
ddl run -H a:1 python a.py
ddl info
```
"""
    first, second = blocks("page", text)
    assert (first.line, first.not_run, first.before) == (3, "needs a GPU", "")
    assert (second.line, second.not_run, second.before) == (9, "", "x = 1")
    assert [second.why_not(command) for command in commands(second)] == ["needs hosts", ""]


@pytest.mark.parametrize("mark", ["not run", 'run by where it says "x": y', "on hosts: two", "not running: it is slow"])
def test_a_wrong_mark_is_an_error(mark: str) -> None:
    """It names the page and the line."""
    with pytest.raises(ValueError, match="page:2"):
        blocks("page", f"<!-- {mark} -->\n```sh\nddl info\n```\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ddl run -np 2 --no-such python a.py", "No such option"),
        ("ddl rum -np 2 python a.py", "does not exist"),
        ("ls | frobnicate", "nothing is known"),
        ("pip install --no-idnex ddlcore", "no such option"),
        ("pip install 'ddl-nccl[cu99]'", "no extra"),
        ("pip install ./plugins/ddl_nothing", "no project"),
        ("python tools/bench_startup.py --no-such", "has no"),
        ("python examples/nothing.py", "there is no"),
        ("make nothing", "make has no"),
        ("make test-matrix CELL=core", "make has no"),
        ("uv run ddl info --no-such", "No such option"),
        ("for i in 1 2; do ddl info", "syntax error"),
        ("srun ddl runn", "does not exist"),
        ("X=1 exec ddl info --no-such", "No such option"),
    ],
)
def test_what_is_no_command_is_found(line: str, why: str) -> None:
    """By the parser of the program that it is for."""
    assert why in objection(line)


@pytest.mark.parametrize(
    "script",
    [
        "ddl run -np 2 python a.py --its own # and why",
        "make test-matrix CELLS=core\nuv venv training && uv run ddl info",
        "hosts=$(scontrol show hostnames | head -n 1)\nhorovodrun -np 2 python a.py",
    ],
)
def test_what_is_one_is_let_through(script: str) -> None:
    assert objection(script) == ""
