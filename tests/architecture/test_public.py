"""What is public stands in ``__all__``, is defined where it stands, and is documented.

Public modules are those that users and plugins import from. Public by its form is every function and class
whose name has no underscore in front, and every lower-case name that is assigned. Constants, type aliases
and a module's log are public only if ``__all__`` says so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.source import Source, every

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
# What plugins and users import from.
DOORS = re.compile(
    r"ddlcore\.(api|contracts|hooks|types|errors|threads)\b|ddl_conform\.(?!plugin$)\w+$|ddl_doctor\.contracts\b|horovod\b"
)
OUTSIDE = ("ddlcore.contracts", "ddlcore.hooks", "ddlcore.api", "ddl_")  # read by others than us
DOORLESS_BASES = {"ABC", "Protocol", "Generic", "NamedTuple", "object"}  # a class with another base has its docs there


def is_public(source: Source) -> bool:
    """Whether others import from the module: ours, plugins, users. A package's __init__ is there for nothing else."""
    return source.path.name == "__init__.py" or DOORS.match(source.module) is not None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, those under a top-level if or try included."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            handlers = [s for h in getattr(node, "handlers", []) for s in h.body]
            yield from statements([*node.body, *handlers, *node.orelse])
        else:
            yield node


def assigned(node: ast.stmt) -> list[str]:
    """The names that an assignment gives a value to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]


def exported(source: Source) -> list[str] | None:
    """The literal ``__all__``, or None where there is none."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and assigned(node) == ["__all__"]:
            assert isinstance(node.value, ast.List | ast.Tuple), f"{source}: __all__ is no literal list"
            return [str(ast.literal_eval(element)) for element in node.value.elts]
    return None


def defined(source: Source) -> set[str]:
    """All top-level names of the file itself."""
    names = {name for node in statements(source.tree.body) for name in assigned(node)}
    return names | {n.name for n in statements(source.tree.body) if isinstance(n, (*Function, ast.ClassDef))}


def public_by_form(source: Source) -> set[str]:
    """The names that must stand in ``__all__``."""
    names = {n.name for n in statements(source.tree.body) if isinstance(n, (*Function, ast.ClassDef))}
    names |= {name for node in statements(source.tree.body) for name in assigned(node) if name.islower()}
    return {name for name in names if not name.startswith("_")} - {"log"}


def imported(source: Source) -> set[str]:
    """Top-level names that come from elsewhere."""
    aliases = (a for n in statements(source.tree.body) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names)
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}


def test_all_says_what_is_public() -> None:
    """``__all__`` of a public module holds each name that is public by its form, once, and none that does not exist.

    Other modules have none: nobody would be told anything by it.
    """
    assert [f"{source}: {wrong}" for source in every() for wrong in _wrong_with_all(source)] == []


def _wrong_with_all(source: Source) -> Iterator[str]:
    listed = exported(source)
    if not is_public(source):
        if listed is not None:
            yield "is not public: remove its __all__"
        return
    public = listed or []
    lazy = "__getattr__" in defined(source)  # names that are imported when first used
    if listed is None and public_by_form(source):
        yield "has no __all__"
    if len(public) != len(set(public)):
        yield "a name is twice in __all__"
    if missing := sorted(public_by_form(source) - set(public)):
        yield f"neither in __all__ nor named with an underscore: {missing}"
    if not lazy and (undefined := sorted(set(public) - defined(source) - imported(source))):
        yield f"in __all__ and not defined: {undefined}"


def test_public_is_documented() -> None:
    """Modules, public classes and functions have docstrings; in rooms that others read, so have methods."""
    assert {str(source): bare for source in every() if (bare := _undocumented(source))} == {}, "no docstring"


def _undocumented(source: Source) -> list[str]:
    public = (exported(source) or ()) if is_public(source) else public_by_form(source)
    bare = [] if ast.get_docstring(source.tree) else ["the module itself"]
    for node in source.tree.body:
        if isinstance(node, (*Function, ast.ClassDef)) and node.name in public:
            bare += [] if ast.get_docstring(node) else [node.name]
            if isinstance(node, ast.ClassDef) and source.module.startswith(OUTSIDE):
                bare += undocumented_methods(node)
    return bare


def undocumented_methods(node: ast.ClassDef) -> list[str]:
    """Public methods of a class that inherits from nothing, properties and overloads excepted."""
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    if not bases <= DOORLESS_BASES:
        return []
    methods = [item for item in node.body if isinstance(item, Function) and not item.name.startswith("_")]
    return [f"{node.name}.{m.name}" for m in methods if not m.decorator_list and not ast.get_docstring(m)]


def test_the_names_that_ddlcore_exports_exist() -> None:
    """Each can be had, those that are imported on first use included."""
    import ddlcore

    assert [name for name in ddlcore.__all__ if not hasattr(ddlcore, name)] == []
