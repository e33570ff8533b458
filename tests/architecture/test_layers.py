"""Who may import whom: a room imports what lies below it, never its neighbours."""

from __future__ import annotations

import pytest

from tests.architecture.source import ROOT, Source, core, every, plugins

LAYERS = (  # from the ground up; a room may import itself and the layers below its own
    {"types", "errors"},
    {"messages", "config"},
    {"contracts", "hooks"},
    {"kernels"},
    {"observe"},
    {"runtime", "builtin", "control", "plug", "tune"},
    {"coordinator", "telemetry"},
    {"job", "search"},
    {"external_rank"},
    {"detection"},
    {"api"},
    {"launch", "testing"},
    {"", "__main__"},  # ddlcore itself, which re-exports the verbs
)
LAYER = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
OPEN_TO_PLUGINS = {"contracts", "hooks", "types", "errors", "api", "testing"}
ONLY_HERE = {"pluggy": {"ddlcore.hooks", "ddlcore.plug.loader"}}


def room_of(name: str) -> str:
    """The room of a dotted name below ddlcore; "" for ddlcore itself and what it defines."""
    part = name.partition(".")[2].partition(".")[0]
    return part if part in LAYER or (ROOT / "ddlcore" / part).is_dir() else ""


def test_every_room_has_a_floor() -> None:
    """A new file or folder of ddlcore is given its place on purpose."""
    assert sorted({room_of(source.module) for source in core()} - set(LAYER)) == []
    files = {path.stem for path in (ROOT / "ddlcore").glob("*.py") if path.stem != "__init__"}
    assert sorted(files - set(LAYER)) == []


@pytest.mark.parametrize("source", core(), ids=str)
def test_core_imports_downwards(source: Source) -> None:
    """No import, not even within a function or for types only, goes up or to a neighbour on the same layer."""
    here = room_of(source.module)
    wrong = []
    for line, name in source.imports():
        if name.partition(".")[0] != "ddlcore":
            continue
        there = room_of(name)
        if there != here and LAYER[there] >= LAYER[here]:
            wrong.append(f"{source}:{line} imports {name}: from {here or 'ddlcore'} to {there or 'ddlcore'}")
    assert wrong == []


@pytest.mark.parametrize("source", [s for sources in plugins().values() for s in sources], ids=str)
def test_plugins_use_the_doors_only(source: Source) -> None:
    """A plugin imports contracts, hooks, types, errors, api and testing of ddlcore, and no other plugin."""
    mine = source.module.partition(".")[0]
    others = set(plugins()) - {mine}
    wrong = []
    for line, name in source.imports():
        top = name.partition(".")[0]
        if top in others or (top == "ddlcore" and room_of(name) not in OPEN_TO_PLUGINS):
            wrong.append(f"{source}:{line} imports {name}")
    assert wrong == []


def test_pluggy_is_used_at_start_up_only() -> None:
    """Introductions go through pluggy; nothing else does."""
    for library, places in ONLY_HERE.items():
        users = {s.module for s in every() for _, name in s.imports() if name.partition(".")[0] == library}
        assert users <= places
