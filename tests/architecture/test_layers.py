"""Who may import whom: a room imports what lies below it, never its neighbours."""

from __future__ import annotations

from tests.architecture.source import ROOT, allowed, core, every, plugins, tools

LAYERS = (  # from the ground up; a room may import itself and the layers below its own
    {"types", "errors", "text", "threads", "version"},
    {"messages", "config", "reentry"},
    {"contracts", "hooks"},
    {"kernels"},
    {"observe"},
    {"runtime", "builtin", "control", "plug", "tune"},
    {"coordinator"},
    {"process"},
    {"api"},
    {"launch", "testing"},
    {"commands"},
    {"", "__main__"},  # ddlcore itself, which re-exports the verbs
)
LAYER = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
OWN = ""  # the files of a room that are in none of its folders
# From the ground up, too: the folders of each room that has some. Two on one layer do not know each other.
FOLDERS = {
    "api": ({OWN}, {"elastic"}),
    "runtime": ({OWN}, {"device"}),
    "builtin": ({OWN}, {"tuners"}),
    "contracts": ({"cache"}, {"machine_code"}, {OWN}),
    "process": (
        {"accelerators", "environment", "world_place", "build", "observers", "compressors", "verification", "search"},
        {"parts"},
        {"job"},
        {"elastic_member"},
        {"jobs"},
        {"external_rank"},
        {"detection"},
    ),
    "launch": ({"output"}, {"ranks"}, {"agents"}, {"job"}),
    "commands": (
        {"completion", "help"},
        {"options"},
        {"info", "provided"},
        {"plugins"},
        {"search_bar"},
        {"search_lines"},
        {"run"},
        {"tune"},
        {"cli"},
    ),
}
HEIGHT = {(room, one): at for room, layers in FOLDERS.items() for at, folders in enumerate(layers) for one in folders}
OPEN_TO_PLUGINS = {"contracts", "hooks", "types", "errors", "threads", "api", "testing"}
FORWARDS = {
    "ddlcore.testing": "ddl_conform",
    **{f"ddlcore.contracts.{name}": "ddl_doctor" for name in ("bench", "check", "known_bad")},
}
ONLY_HERE = {"pluggy": {"ddlcore.hooks", "ddlcore.plug.loader"}}


def room_of(name: str) -> str:
    """The room of a dotted name below ddlcore; "" for ddlcore itself and what it defines.

    A `__main__` is a program, which nothing imports: it stands above all rooms, wherever its file is.
    """
    if name.endswith(".__main__"):
        return "__main__"
    part = name.partition(".")[2].partition(".")[0]
    return part if part in LAYER or (ROOT / "ddlcore" / part).is_dir() else ""


def folder_of(name: str) -> str:
    """The folder, or the file that FOLDERS names, that a dotted name is in within its room; OWN if it is in none."""
    part = [*name.split("."), "", ""][2]
    return part if (room_of(name), part) in HEIGHT else OWN


def test_every_room_has_a_floor() -> None:
    """A new file or folder of ddlcore is given its place on purpose."""
    assert sorted({room_of(source.module) for source in core()} - set(LAYER)) == []
    files = {path.stem for path in (ROOT / "ddlcore").glob("*.py") if path.stem != "__init__"}
    assert sorted(files - set(LAYER)) == []
    placed = {source: (room_of(source.module), folder_of(source.module)) for source in core()}
    assert [
        str(s) for s, at in placed.items() if at[0] in FOLDERS and at not in HEIGHT and s.path.stem != "__init__"
    ] == []
    folders = {path.parent.relative_to(ROOT / "ddlcore").parts for path in (ROOT / "ddlcore").rglob("__init__.py")}
    assert sorted({parts[:2] for parts in folders if len(parts) > 1} - set(HEIGHT)) == []


def test_core_imports_downwards() -> None:
    """No import, not even within a function or for types only, goes up or to a neighbour on the same layer."""
    wrong = []
    for source in core():
        here = room_of(source.module)
        for line, name in source.imports():
            there = room_of(name)
            if name.partition(".")[0] == "ddlcore" and there != here and LAYER[there] >= LAYER[here]:
                wrong.append(f"{source}:{line} imports {name}: from {here or 'ddlcore'} to {there or 'ddlcore'}")
    assert wrong == []


def test_folders_of_a_room_import_downwards() -> None:
    """So the launcher uses agents, and both start ranks; and a command uses what simpler ones are made of."""
    wrong = []
    for source in core():
        room, here = room_of(source.module), folder_of(source.module)
        for line, name in source.imports() if room in FOLDERS else ():
            there = folder_of(name)
            if room_of(name) == room and there != here and HEIGHT[room, there] >= HEIGHT[room, here]:
                wrong.append(f"{source}:{line} imports {name}: from {here or room} to {there or room}")
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    """Not even within a function or for types only, nor by way of others: each module can be read before its users."""
    modules = {source.module for source in every()}
    uses = {
        source.module: {_module(name, modules) for _, name in source.imports()} - {"", source.module}
        for source in every()
    }
    reached = {module: _reached(module, uses) for module in uses}
    circles = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in uses
        if module in reached[module]
    }
    assert sorted(map(sorted, circles)) == []


def _module(name: str, modules: set[str]) -> str:
    """Return the one of ``modules`` that holds what is imported as ``name``; "" if none does."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _reached(module: str, uses: dict[str, set[str]]) -> set[str]:
    """Return what ``module`` imports, by way of others too."""
    found: set[str] = set()
    todo = [module]
    while todo:
        more = uses[todo.pop()] - found
        found |= more
        todo += more
    return found


def test_plugins_use_the_doors_only() -> None:
    """A plugin imports contracts, hooks, types, errors, threads, api and testing of ddlcore, and no plugin that it does not bring."""
    wrong = []
    for package, sources in plugins().items():
        others = set(plugins()) - allowed(package)
        for source in sources:
            for line, name in source.imports():
                top = name.partition(".")[0]
                if top in others or (top == "ddlcore" and room_of(name) not in OPEN_TO_PLUGINS):
                    wrong.append(f"{source}:{line} imports {name}")
    assert wrong == []


def test_nobody_uses_a_tool_package() -> None:
    """A tool package may use all of ddlcore, whose version it asks for, but no other package that it does not bring.

    Only the conformance kit is there for others. Parts of the plugin contract forward to a tool package.
    """
    wrong = []
    ours, theirs = set(tools()), set(plugins())
    for source in every():
        mine = source.module.partition(".")[0]
        others = (ours | theirs) - allowed(mine) if mine in ours else ours - {mine}
        if mine in theirs:
            others -= {"ddl_conform"}
        others -= {FORWARDS.get(source.module, "")}
        wrong += [
            f"{source}:{line} imports {name}" for line, name in source.imports() if name.partition(".")[0] in others
        ]
    assert wrong == [] and "ddl_doctor" in ours


def test_pluggy_is_used_at_start_up_only() -> None:
    """Introductions go through pluggy; nothing else does."""
    for library, places in ONLY_HERE.items():
        users = {s.module for s in every() for _, name in s.imports() if name.partition(".")[0] == library}
        assert users <= places
