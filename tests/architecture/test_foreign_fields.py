"""Plugins write no field of an object of ddlcore, and use of a job only what the framework contract declares.

A runtime object that a plugin changes from outside cannot be changed from inside any more. There are methods for what
an adapter has to change, see ddlcore/contracts/framework.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import pytest

from ddlcore.contracts import framework
from tests.architecture.source import plugins

# Where an object of ddlcore comes from: what plugins call it, the types of parameters, and the functions that make it.
NAMES = re.compile(r"_*(?:jobs?|requests?|private|entry|entries|handles?|buffers?|process_set|companions?)")
TYPES = re.compile(r"\b(?:Job|JobService|PersistentRequest|TensorEntry|Handle|Buffer|ProcessSet|Operations)\b")
MAKERS = {"current_job", "persistent_allreduce", "buffer", "find_process_set", "add_process_set", "getattr", "next"}
JOB = re.compile(r"_*job")
OURS = [source for sources in plugins().values() for source in sources]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def is_foreign(node: ast.AST | None, known: AbstractSet[str]) -> bool:
    """Whether an expression is an object of ddlcore, or leads through one: ``request.target``, ``slot.private``."""
    if isinstance(node, ast.Name):
        return bool(NAMES.fullmatch(node.id)) or node.id in known
    if isinstance(node, ast.Attribute):
        return bool(NAMES.fullmatch(node.attr)) or is_foreign(node.value, known)
    if isinstance(node, ast.Subscript):
        return is_foreign(node.value, known)
    if isinstance(node, ast.Call):
        made = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        gets = made in {"getattr", "next"}  # of these, the argument counts
        return is_foreign(node.args[0], known) if gets and node.args else made in MAKERS
    if isinstance(node, ast.Tuple | ast.List):
        return any(is_foreign(one, known) for one in node.elts)
    if isinstance(node, ast.BoolOp):
        return any(is_foreign(one, known) for one in node.values)
    if isinstance(node, ast.IfExp):
        return is_foreign(node.body, known) or is_foreign(node.orelse, known)
    return isinstance(node, ast.NamedExpr) and is_foreign(node.value, known)


def bound(target: ast.AST, value: ast.AST | None, known: AbstractSet[str]) -> Iterator[str]:
    """The names that an assignment of ``value`` makes into objects of ddlcore; of two tuples, element by element."""
    if isinstance(target, ast.Tuple | ast.List):
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        pairs = zip(target.elts, values) if len(values) == len(target.elts) else ((one, value) for one in target.elts)
        for one, its in pairs:
            yield from bound(one, its, known)
    elif isinstance(target, ast.Name) and is_foreign(value, known):
        yield target.id


def aliases(scope: ast.AST, known: AbstractSet[str]) -> set[str]:
    """All names of a function that stand for objects of ddlcore: its parameters by their types, and what is assigned."""
    found = set(known)
    if isinstance(scope, Function):
        given = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
        found |= {one.arg for one in given if one.annotation is not None and TYPES.search(ast.unparse(one.annotation))}
    for _ in range(3):  # an alias of an alias of an alias
        for node in own_nodes(scope):
            pairs: list[tuple[ast.AST, ast.AST | None]] = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension):
                pairs = [(node.target, node.iter if isinstance(node, ast.For | ast.comprehension) else node.value)]
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                pairs = [(node.optional_vars, node.context_expr)]
            for target, value in pairs:
                found |= set(bound(target, value, found)) - {"self", "cls"}
    return found


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, Function):
            yield from own_nodes(child)


def stores(scope: ast.AST, known: AbstractSet[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """(line, text) of every store into an attribute of an object of ddlcore, in a module and the functions in it."""
    found = aliases(scope, known)
    for node in own_nodes(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if is_foreign(node.value, found):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"setattr", "__setattr__"}:
            if node.args and is_foreign(node.args[0], found):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, Function):
            yield from stores(node, found)


def uses_of_a_job(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every attribute that is taken from something called ``job``, or from ``current_job()``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        called = str(getattr(owner, "attr", getattr(owner, "id", "")))
        if isinstance(owner, ast.Call):
            called = "job" if ast.unparse(owner.func).rpartition(".")[2] == "current_job" else ""
        if JOB.fullmatch(called):
            yield node.lineno, node.attr


def test_no_field_of_the_core_is_written() -> None:
    """A plugin calls methods of the objects that it gets from ddlcore."""
    assert [f"{source}:{line} {text}" for source in OURS for line, text in stores(source.tree)] == []


def test_a_job_is_used_by_its_contract() -> None:
    """What a plugin takes from a job is declared in JobService."""
    declared = {name for name in vars(framework.JobService) if not name.startswith("_")}
    uses = [(source, *use) for source in OURS for use in uses_of_a_job(source.tree)]
    assert len(declared) > 15 and len(uses) > 15
    assert [f"{source}:{line} job.{name}" for source, line, name in uses if name not in declared] == []


@pytest.mark.parametrize(
    "planted",
    [
        "request.target.address, request.target.owner = value.data_ptr(), value",
        "slot.private.target.owner = None",
        "request.source.wait = None",
        "request.how = how",
        "entry.target.owner = output",
        "entry.source = replace(entry.source, owner=there)",
        "self._request.starts += 1",
        "del job.companions",
        "self.job.overlaps = True",
        "current_job().closed = True",
        "process_set.process_set_id = known[0]",
        "setattr(binding.job, 'closed', True)",
        "object.__setattr__(self.job, 'closed', True)",
        "for buffer in (entry.source, entry.target):\n    buffer.address = 1",
        "for one in (entry.source, entry.target):\n    one.address = 1",
        "source, target = entry.source, entry.target\ntarget.address = 1",
        "mine = self.job\nif mine:\n    mine.closed = True",
        "made = OPERATIONS.persistent_allreduce(tensor, name='x')\nmade.index = 3",
        "def mark(where: Buffer) -> None:\n    where.event = 3",
        "def outer(one: JobService | None):\n    def inner():\n        one.closed = True",
        "while (found := adapter.buffer(tensor, elementwise=True)):\n    found.order = next(orders)",
        "for one in self.requests[:3]:\n    one.error = None",
    ],
)
def test_a_store_is_found(planted: str) -> None:
    """Each of these writes into an object of ddlcore; most have stood in a plugin."""
    assert list(stores(ast.parse(planted)))


@pytest.mark.parametrize(
    "planted",
    [
        "self.job = current_job()",
        "slot.request = slot.private = None",
        "attempt.handle = Mapped(attempt.handles[0], part)",
        "slot.starts, slot.round = request.starts, now",
        "round.failure = round.failure or error",
        "optimizer.learning_rate = rate",
        "request.set_target(address, owner)",
        "def source(slot: Slot, request: PersistentRequest) -> None:\n    slot.starts = request.starts",
        "table = _tables.setdefault(job, _Table())\ntable.named = {}",
        "stream = queue.stream(buffer.device)\nstream.open = True",
    ],
)
def test_what_is_a_plugins_own_may_be_written(planted: str) -> None:
    """Its own objects, and those of its framework, even where they refer to one of ddlcore."""
    assert list(stores(ast.parse(planted))) == []


def test_a_use_beside_the_contract_is_found() -> None:
    """Whatever the job is called and wherever it is kept."""
    tree = ast.parse("job.completion\nself.job.tensor_queue.name(entries)\ncurrent_job().sets\njob.rank\nx._job.size")
    assert {name for _, name in uses_of_a_job(tree)} == {"completion", "tensor_queue", "sets", "rank", "size"}
