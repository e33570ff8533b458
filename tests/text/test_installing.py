"""The commands that install more of ddl name the place from which ddlcore came."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from ddlcore import contracts
from ddlcore.config.file import read_toml
from ddlcore.text import installing
from ddlcore.text.installing import as_installed, pip_install
from ddlcore.text.nearest import nearest

ROOT = Path(__file__).resolve().parents[2]
CLONE = "  # in a clone of ddl"
Record = Callable[..., None]


class Pretended:
    """A distribution with what pip has recorded of its origin."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.text


@pytest.fixture
def came_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """A function that sets what pip has recorded for ddlcore and, by name, for others that are installed; None: nothing.

    A text is taken as it is, but "absent" means that the distribution is not installed.
    """

    def record(ddlcore: Any = None, **others: Any) -> None:
        usual = {"ddlcore": ddlcore, "ddl-doctor": None, "ddl-shm": None}
        known = {**usual, **{name.replace("_", "-"): one for name, one in others.items()}}
        known = {name: source for name, source in known.items() if source != "absent"}

        def pretended(name: str) -> Pretended:
            if name not in known:
                raise PackageNotFoundError(name)
            source = known[name]
            return Pretended(source if source is None or isinstance(source, str) else json.dumps(source))

        monkeypatch.setattr(installing, "distribution", pretended)
        installing._source.cache_clear()

    yield record
    installing._source.cache_clear()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of ddl with one plugin, as the working directory. Its path has to be quoted."""
    root = tmp_path / "my clone"
    for folder in (root, root / "plugins/ddl_mpi"):
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").touch()
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize("text", [None, "{}", "[]", "no JSON"])
def test_from_an_index_the_command_has_the_name(came_from: Record, text: str | None) -> None:
    """Also if what was recorded cannot be read."""
    came_from(text)
    assert pip_install("ddl-gloo") == "pip install ddl-gloo"
    assert pip_install("ddlcore[tune]") == "pip install 'ddlcore[tune]'"
    assert pip_install("ddlcore==0.1.0", absolute=True) == "pip install ddlcore==0.1.0"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pip install ddl-mpi", "pip install ./plugins/ddl_mpi"),
        ("pip install 'ddl-mpi[mpich]'", "pip install './plugins/ddl_mpi[mpich]'"),
        ("pip install ddl-mpi==0.1.0", "pip install ./plugins/ddl_mpi"),
        ("pip install 'ddlcore[tune]'", "pip install {e}'.[tune]'"),
        ("pip install --upgrade 'ddlcore>=0.1,<2' ddl-mpi torch", "pip install --upgrade {e}. ./plugins/ddl_mpi torch"),
        ("no ddl-mpi; pip install 'ddl-mpi[m]' (or [o])", "no ddl-mpi; pip install './plugins/ddl_mpi[m]' (or [o])"),
        ("pip install ddl-mine", "pip install ddl-mine"),  # not in the clone: somebody else's
        ("pip install torch", "pip install torch"),
        ("ddl-mpi is missing", "ddl-mpi is missing"),
        ("pip install --find-links /x/ddl-mpi torch", "pip install --find-links /x/ddl-mpi torch"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("editable", [True, False])
def test_from_a_clone_the_command_has_the_folder(
    came_from: Record, clone: Path, editable: bool, command: str, expected: str
) -> None:
    """What is editable stays so; pip would replace it by a copy otherwise."""
    came_from({"url": clone.as_uri(), "dir_info": {"editable": True} if editable else {}})
    assert as_installed(command) == expected.format(e="-e " if editable else "")


def test_the_folder_is_relative_only_below_the_working_directory(
    came_from: Record, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never for another host."""
    came_from({"url": clone.as_uri(), "dir_info": {}})
    assert pip_install("ddl-mpi", absolute=True) == f"pip install '{clone}/plugins/ddl_mpi' ddl-shm"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert pip_install("ddl-mpi") == f"pip install '{clone}/plugins/ddl_mpi'"


def test_a_clone_that_is_gone(came_from: Record, tmp_path: Path) -> None:
    """As after `pip install .` in the build of an image: there is no path, and an index is no answer."""
    came_from({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert pip_install("ddl-mpi") == f"pip install ./plugins/ddl_mpi{CLONE}"
    assert pip_install("ddlcore[tune]") == f"pip install '.[tune]'{CLONE}"
    assert as_installed("none; pip install 'ddl-mpi[a]' ddl-tf torch (or [b])") == (
        f"none; pip install './plugins/ddl_mpi[a]' ./plugins/ddl_tf torch{CLONE} (or [b])"
    )


def test_what_is_installed_is_named_by_its_own_source(came_from: Record, clone: Path, tmp_path: Path) -> None:
    """A plugin of a stranger, and one of ours that came from elsewhere."""
    place = clone / "plugins/ddl_mpi"
    came_from(None, ddl_mpi={"url": place.as_uri(), "dir_info": {"editable": True}})
    assert pip_install("ddl-mpi[mpich]") == "pip install -e './plugins/ddl_mpi[mpich]'"
    git = {"url": "https://host/d.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}, "subdirectory": "d"}
    came_from({"url": clone.as_uri(), "dir_info": {}}, ddl_mine=git)
    assert pip_install("ddl-mine[x]") == "pip install 'ddl-mine[x] @ git+https://host/d.git@abc#subdirectory=d'"
    gone = (tmp_path / "gone").as_uri()
    for mine in (None, {"url": gone, "dir_info": {}}):  # a stranger's, from an index or from a folder that is gone
        came_from({"url": gone, "dir_info": {}}, ddl_mine=mine)
        assert pip_install("ddl-mine[x]") == "pip install 'ddl-mine[x]'"


def test_from_a_wheel_the_command_has_the_wheel_beside_it(
    came_from: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is there, in the version that is wanted: an index must not be asked for what the folder lacks."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "ddl_gloo-0.1.0-py3-none-any.whl"
    wheel.touch()
    came_from({"url": (folder / "ddlcore-0.1.0-py3-none-any.whl").as_uri(), "archive_info": {}})
    assert pip_install("ddl-gloo") == "pip install ./wheels/ddl_gloo-0.1.0-py3-none-any.whl"
    assert pip_install("ddl-gloo==0.1.0", absolute=True) == f"pip install {wheel} ddl-shm"
    assert pip_install("ddl-gloo[x]") == "pip install './wheels/ddl_gloo-0.1.0-py3-none-any.whl[x]'"
    assert pip_install("ddl-gloo==0.2.0") == "pip install --no-index --find-links ./wheels ddl-gloo==0.2.0"
    assert pip_install("ddl-mpi[a]") == "pip install --no-index --find-links ./wheels 'ddl-mpi[a]'"
    assert pip_install("ddlcore[tune]") == "pip install --no-index --find-links ./wheels 'ddlcore[tune]'"
    came_from({"url": (tmp_path / "gone/ddlcore-0.1.0.tar.gz").as_uri(), "archive_info": {}}, ddl_mine=None)
    assert pip_install("ddl-mpi") == "pip install --no-index --find-links ./gone ddl-mpi"
    assert pip_install("ddl-mine") == "pip install ddl-mine"  # it came from an index itself


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"url": "https://host/w/ddlcore-0.1.0-py3-none-any.whl", "archive_info": {}},
            "'ddl-tf[gpu] @ https://host/w/ddl_tf-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/main.zip", "archive_info": {}},
            "'ddl-tf[gpu] @ https://host/main.zip#subdirectory=plugins/ddl_tf'",
        ),
        (
            {"url": "https://host/ddl.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'ddl-tf[gpu] @ git+https://host/ddl.git@abc#subdirectory=plugins/ddl_tf'",
        ),
    ],
)
def test_from_elsewhere_the_command_has_the_address(came_from: Record, source: Any, expected: str) -> None:
    """In a repository at the same commit, so that core and plugin are of one version."""
    came_from(source)
    assert pip_install("ddl-tf[gpu]") == f"pip install {expected}"


def test_the_core_from_a_repository(came_from: Record) -> None:
    """It is at the top."""
    came_from({"url": "https://host/ddl.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert pip_install("ddlcore[tune]") == "pip install 'ddlcore[tune] @ git+https://host/ddl.git@abc'"


def test_a_source_tree_on_the_module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """ddlcore need not be installed."""

    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(installing, "distribution", absent)
    installing._source.cache_clear()
    assert pip_install("ddl-mpi") == "pip install ./plugins/ddl_mpi ./plugins/ddl_shm"
    assert pip_install("ddlcore[tune]") == "pip install '.[tune]'"
    installing._source.cache_clear()


def test_the_folders_of_this_clone_exist(came_from: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that a clone prints can be run, for each plugin."""
    monkeypatch.chdir(ROOT)
    came_from({"url": ROOT.as_uri(), "dir_info": {}})
    for name in sorted(path.name for path in (ROOT / "plugins").iterdir() if (path / "pyproject.toml").exists()):
        said = pip_install(name.replace("_", "-"))
        assert said == f"pip install ./plugins/{name}"
        assert os.path.isdir(said.split()[-1])


def test_what_it_needs_comes_from_the_same_place(came_from: Record, clone: Path, tmp_path: Path) -> None:
    """pip would ask an index for it otherwise, where somebody else may have published a package of that name."""
    (clone / "plugins/ddl_shm").mkdir()
    (clone / "plugins/ddl_shm/pyproject.toml").touch()
    came_from({"url": clone.as_uri(), "dir_info": {}}, ddl_shm="absent")
    assert pip_install("ddl-mpi[m]") == "pip install './plugins/ddl_mpi[m]' ./plugins/ddl_shm"
    assert pip_install("ddl-shm") == "pip install ./plugins/ddl_shm"
    assert as_installed("none; pip install ddl-mpi torch (or more); pip install ddl-shm ddl-mpi") == (
        "none; pip install ./plugins/ddl_mpi torch ./plugins/ddl_shm (or more); "
        "pip install ./plugins/ddl_shm ./plugins/ddl_mpi"
    )
    assert pip_install("ddlcore[tune]") == "pip install '.[tune]'"
    assert pip_install("ddl-mine") == "pip install ddl-mine"
    for name in ("ddl_horovod", "ddl_doctor"):
        (clone / "plugins" / name).mkdir(exist_ok=True)
        (clone / "plugins" / name / "pyproject.toml").touch()
    came_from({"url": clone.as_uri(), "dir_info": {}}, ddl_shm="absent", ddl_doctor="absent")
    assert as_installed("pip install ddl-horovod ddl-mpi") == (
        "pip install ./plugins/ddl_horovod ./plugins/ddl_mpi ./plugins/ddl_doctor ./plugins/ddl_shm"
    )
    here = {"url": (clone / "plugins/ddl_mpi").as_uri(), "dir_info": {}}
    came_from(
        {"url": clone.as_uri(), "dir_info": {}},
        ddl_mpi=here,
        ddl_shm={"url": (clone / "plugins/ddl_shm").as_uri(), "dir_info": {}},
    )
    there = f"pip install '{clone}/plugins/ddl_mpi' '{clone}/plugins/ddl_shm'"
    assert pip_install("ddl-mpi", absolute=True) == there  # for a host that may have neither
    assert pip_install("ddl-mpi") == "pip install ./plugins/ddl_mpi"
    came_from({"url": clone.as_uri(), "dir_info": {}}, ddl_shm="absent", ddl_mpi=None)
    assert pip_install("ddl-mpi") == "pip install ./plugins/ddl_mpi"  # it is installed, and so is what it needs
    came_from({"url": (tmp_path / "gone").as_uri(), "dir_info": {}}, ddl_shm="absent")
    assert pip_install("ddl-mpi") == f"pip install ./plugins/ddl_mpi ./plugins/ddl_shm{CLONE}"
    came_from({"url": "https://host/d.git", "vcs_info": {"vcs": "git", "commit_id": "a"}}, ddl_shm="absent")
    both = (
        f"'{name} @ git+https://host/d.git@a#subdirectory=plugins/{name.replace('-', '_')}'"
        for name in ("ddl-tf", "ddl-shm")
    )
    assert pip_install("ddl-tf") == f"pip install {' '.join(both)}"
    for wheel in ("ddl_tf", "ddl_shm"):
        (tmp_path / f"{wheel}-0.1.0-py3-none-any.whl").touch()
    came_from({"url": (tmp_path / "ddlcore-0.1.0-py3-none-any.whl").as_uri(), "archive_info": {}}, ddl_shm="absent")
    wheels = [f"{tmp_path}/{name}-0.1.0-py3-none-any.whl" for name in ("ddl_tf", "ddl_shm")]
    assert pip_install("ddl-tf") == f"pip install {' '.join(wheels)}"
    assert pip_install("ddl-mpi") == f"pip install --no-index --find-links {tmp_path} ddl-mpi"


@pytest.mark.parametrize("folder", sorted((ROOT / "plugins").glob("*/pyproject.toml")), ids=lambda one: one.parent.name)
def test_it_knows_what_each_distribution_needs(folder: Path) -> None:
    """The table agrees with the dependencies on other distributions of ddl in each pyproject.toml."""
    project: Any = read_toml(folder)["project"]
    asked = {re.split(r"[^\w-]", one)[0] for one in project["dependencies"]}
    needed = {one for one in asked if one.startswith("ddl") and one != "ddlcore"}
    assert set(installing._NEEDS.get(project["name"], installing._USUAL)) == needed


def test_plugins_reach_it_through_the_contracts() -> None:
    """It is the same function."""
    assert contracts.pip_install is pip_install


@pytest.mark.parametrize(
    ("wrong", "meant"), [("fusion_bites", "fusion_bytes"), ("backend", "backend"), ("x", ""), ("glooo", "")]
)
def test_what_was_meant(wrong: str, meant: str) -> None:
    """Nothing, if nothing is alike."""
    assert nearest(wrong, ["backend", "fusion_bytes", "overlap"]) == meant
