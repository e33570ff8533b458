"""The plugins under examples/plugins, which know ddl from its documents alone, conform and take part in a training."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddlcore.commands.cli import main
from ddlcore.config.file import read_toml
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from tests.architecture.source import ROOT
from tests.plug.conftest import Site, site
from tests.tiers import long

__all__ = ["site"]

FOLDER = ROOT / "examples/plugins"
PACKAGES = sorted(path.parent for path in FOLDER.glob("*/pyproject.toml"))
MAY_IMPORT = {"contracts", "hooks", "types", "errors", "api", "testing"}


@pytest.fixture
def outside(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """All of them installed, as far as metadata go."""
    before = set(sys.modules)
    for package in PACKAGES:
        monkeypatch.syspath_prepend(str(package / "src"))
        project: Any = read_toml(package / "pyproject.toml")["project"]
        ((name, module),) = project["entry-points"]["ddlcore.plugins.v2"].items()
        site.announce(project["name"], project["version"], f"{name} = {module}")
    monkeypatch.syspath_prepend(str(FOLDER))
    yield site
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def conform(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    code = main(["conform", "--json", *arguments])
    (run,) = json.loads(capsys.readouterr().out)
    assert code == 0, [test for test in run["tests"] if test["outcome"] == "failed"] or run["refused"]
    return run


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "level"), [("int8", "fault-tolerant"), *long(("bysize", "full")), ("randomsearch", "full")]
)
def test_they_reach_the_highest_level(name: str, level: str, outside: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Of their kinds."""
    assert conform(capsys, name)["level"] == level


@pytest.mark.processes
@pytest.mark.parametrize(
    "test",
    ["test_allreduce", *long("test_programs", "test_abort_ends_a_pending_call", "test_abort_ends_a_pending_open")],
)
def test_zmq_passes_what_is_tried_here(test: str, outside: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole suite takes half a minute: `ddl conform zmq` runs it."""
    pytest.importorskip("zmq")
    conform(capsys, "zmq", "--only", test)


@pytest.mark.processes
def test_jax_reaches_the_highest_level(outside: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Where JAX is installed, which the other tests do not need."""
    pytest.importorskip("jax")
    assert conform(capsys, "jax")["level"] == "fault-tolerant"


@pytest.mark.parametrize(
    ("compression", "backend", "settings", "most"),
    [
        ("int8", "threads", {}, 0.27),
        ("none", "threads", {"fusion_policy": "bysize"}, 0.0),
        ("none", "zmq", {}, 0.0),
    ],
)
def test_digits_are_learned(
    compression: str, backend: str, settings: dict[str, object], most: float, outside: Site
) -> None:
    """To 95 %; with int8 in about a quarter of the bytes."""
    train = importlib.import_module("digits").train

    def play(rank: int, job: Job) -> tuple[float, float]:
        accuracy, share = train(compression, epochs=8)
        assert job.stats()["buckets_replayed"] > 100
        return accuracy, share

    for accuracy, share in run_world(2, play, backend=backend, settings=settings):
        assert accuracy >= 0.95
        assert 0 <= share <= most


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_they_use_the_public_parts_alone(package: Path) -> None:
    """As the tests of the architecture hold the tree's own plugins to; laid out as `ddl plugins new` does it."""
    import ast

    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name.split(".") for name in names if name.split(".")[0] == "ddlcore"]
            assert all(len(name) > 1 and name[1] in MAY_IMPORT for name in ours), f"{path}: {names}"
    source = package / "src" / package.name
    wanted = [package / "README.md", package / "LICENSE", source / "plugin.py", source / "py.typed"]
    assert [str(path) for path in wanted if not path.exists()] == []
