"""Names, signatures and defaults of the packages horovod.* are those of Horovod 0.28.1, or there is a reason."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plugins.ddl_horovod.tests.reasons import ABSENT, FURTHER, OTHER

_STARS = {"VAR_POSITIONAL": 1, "VAR_KEYWORD": 2}
SURFACE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "surface.json").read_text())


def parameters_of(function: Any) -> list[tuple[str, Any]] | None:
    """Names with their defaults, in order; "*NAME" and "**NAME" where any number is taken. None if that is all it takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # the constructor of Exception
        return None
    return [("*" * _STARS.get(one.kind.name, 0) + one.name, one.default) for one in parameters]


def differences(where: str, theirs: list[str], function: Any, names: dict[str, Any]) -> list[str]:
    """What differs in the signature of ``function`` from ``theirs``, a line for each."""
    ours = parameters_of(function)
    if theirs[-2:] == ["*args", "**kwargs"] or ours is None:  # one of the two takes whatever it is given
        return []
    found = []
    taken = [name for name, _ in ours]
    for at, word in enumerate(theirs):
        name, _, default = word.partition("=")
        if name not in taken:
            found.append(f"{where}: {name} is missing")
        elif not name.startswith("*") and taken.index(name) != at:
            found.append(f"{where}: {name} is at {taken.index(name)}, not at {at}")
        elif default:
            expected, given = eval(default, {**names}), ours[taken.index(name)][1]
            if given is not expected and given != expected:
                found.append(f"{where}: {name} is {given!r} unless given, not {default}")
    known = {word.partition("=")[0] for word in theirs}
    return found + [f"{where}: {name} is further" for name in taken if name not in known and not name.startswith("*")]


def compared(module: str) -> list[str]:
    """Return all differences in ``module``, a line for each."""
    ours = import_module(module)
    names = {**vars(import_module("horovod.common.process_sets")), **vars(import_module("ddlcore.types")), **vars(ours)}
    found = []
    for name, theirs in SURFACE[module].items():
        where = f"{module}.{name}"
        if not hasattr(ours, name):
            found.append(f"{where} is missing")
        elif isinstance(theirs, list):
            found += differences(where, theirs, getattr(ours, name), names)
        elif isinstance(theirs, dict):
            for method, parameters in theirs.items():
                inside = f"{where}.{method}"
                function = getattr(ours, name) if method == "__init__" else getattr(getattr(ours, name), method, None)
                if function is None:
                    found.append(f"{inside} is missing")
                elif isinstance(parameters, list):
                    takes_self = method != "__init__" and inspect.isfunction(
                        inspect.getattr_static(getattr(ours, name), method)
                    )
                    found += differences(inside, ["self", *parameters] if takes_self else parameters, function, names)
    return found


def reasons_for(line: str) -> list[object]:
    """Return the rows of reasons.py that explain a difference: none, or one."""
    where, _, what = line.partition(": ")
    if not what:
        return [row for row in ABSENT if line.startswith(row)]
    if what.endswith(" is further"):
        return [row for row in FURTHER if what == f"{row} is further"]
    return [row for row in OTHER if where.endswith(row[0]) and what.startswith(row[1])]


@pytest.mark.parametrize("module", sorted(SURFACE))
def test_no_difference_without_a_reason(module: str) -> None:
    """Each missing name, other order, other default or further parameter has a row in reasons.py."""
    assert [line for line in compared(module) if not reasons_for(line)] == []


def test_every_reason_is_needed() -> None:
    """A row that explains no difference any more must be removed."""
    used = {row for module in SURFACE for line in compared(module) for row in reasons_for(line)}
    assert {*ABSENT, *FURTHER, *OTHER} - used == set()


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (["a", "b=1", "c=Average"], []),
        (["b=1", "a"], ["f: b is at 1, not at 0", "f: a is at 0, not at 1", "f: c is further"]),
        (["a", "b=2", "c=Sum"], ["f: b is 1 unless given, not 2", "f: c is 2 unless given, not Sum"]),
        (["a", "d"], ["f: d is missing", "f: b is further", "f: c is further"]),
    ],
)
def test_differences_are_found(theirs: list[str], said: list[str]) -> None:
    """Differences of order, default and name are found in made-up functions."""

    def function(a: int, b: int = 1, c: int = 2) -> None: ...

    assert differences("f", theirs, function, {"Average": 2, "Sum": 1}) == said
