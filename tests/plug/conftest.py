"""Distributions that exist for one test: a module and the metadata that pip would have written."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddlcore.config.loading import load_settings
from ddlcore.hooks import ENTRY_POINT_GROUP
from ddlcore.plug import Registry, load_plugins


class Site:
    """A folder on sys.path that fake distributions are installed into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.installed: list[str] = []

    def install(self, name: str, code: str, version: str = "1.0", entry: str = "") -> None:
        """Installs distribution ``name``; its one module bears its name, underscored, and has the hooks in ``code``."""
        module = name.replace("-", "_")
        assert module not in sys.modules, f"another test has left the module {module}: {sys.modules[module]}"
        preamble = "from ddlcore.hooks import *\n"
        (self.folder / f"{module}.py").write_text(preamble + textwrap.dedent(code))
        self.announce(name, version, f"{entry or module} = {module}")

    def install_package(self, name: str, init: str, code: str, value: str) -> None:
        """Installs ``name`` as a package with ``init`` in its __init__.py and the hooks in its plugin.py."""
        package = self.folder / name.replace("-", "_")
        package.mkdir()
        (package / "__init__.py").write_text(init)
        (package / "plugin.py").write_text("from ddlcore.hooks import *\n" + textwrap.dedent(code))
        self.announce(name, "1.0", f"bird = {value}")

    def announce(self, name: str, version: str, line: str, group: str = ENTRY_POINT_GROUP) -> None:
        """Writes the metadata of distribution ``name``, with ``line`` as its entry point."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{line}\n")
        # Python keeps what it has read of a folder until the folder's time changes, and two changes within one tick of
        # the file system's clock have the same time.
        importlib.invalidate_caches()
        self.installed.append(name)

    def problems(self) -> str:
        """Return what keeps a distribution of this site from being used, for the message of a failed assertion."""
        registry = load_plugins(load_settings({}))
        variables = {name: value for name, value in os.environ.items() if name.startswith("DDL_")}
        return f"problems {registry.problems}, refusals {registry.refusals}, {variables}, sys.path {sys.path}"

    def load(self, **settings: str) -> Registry:
        """The registry with the distributions of this site and no others, or as ``settings`` say."""
        return load_plugins(load_settings({}, flags={"plugins": ",".join(self.installed)} | settings))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder on sys.path that fake distributions are installed into. Their modules are forgotten after the test."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Site(folder)
    forget(tmp_path)


def forget(folder: Path) -> None:
    """Remove all modules whose files are in ``folder`` from ``sys.modules``."""
    for name, module in list(sys.modules.items()):
        if str(folder) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
