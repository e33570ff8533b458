"""torch learns of the backend by an entry point that it loads on import: this must be quick, and must never fail."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path

import ddl_torch_backend
import pytest
import torch
import torch.distributed as dist

from ddlcore.commands.info.facts import _provider_facts
from ddlcore.config.loading import load_settings
from ddlcore.plug.loader import load_plugins
from ddlcore.plug.registry import Registry

pytestmark = pytest.mark.timeout(120)

MOST_MS = 5.0


def run(code: str, **env: str) -> str:
    """Return what a new process prints that executes ``code``."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **env},
        cwd="/",  # the current folder is searched for modules
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_torch_finds_it() -> None:
    """The entry point is the function of this module, and no other distribution has one of this name."""
    found = [entry for entry in entry_points(group="torch.backends") if entry.name == "ddl"]
    assert [entry.load() for entry in found] == [ddl_torch_backend.register]
    assert "ddl" in dist.Backend.backend_list


def test_ddl_info_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the entry point, it says why torch does not know the backend."""
    registry = load_plugins(load_settings({}))
    adapter = registry.adapters["torch"]
    (row,) = [row for row in _provider_facts(registry, Registry.adapters) if row["name"] == "torch"]
    installed = version("torch")
    assert row["what"] == f'PyTorch tensors: torch {installed} (torch.distributed: init_process_group("ddl"))'
    monkeypatch.setattr(import_module("ddl_torch.library"), "entry_points", lambda group: [])
    found = registry.library(adapter)
    assert found is not None and found.version // 100 == int(torch.__version__.split(".")[0]) * 100 + int(
        torch.__version__.split(".")[1]
    )
    assert list(found.facts.values()) == ["no backend ddl, because ddl-torch is not installed as a package"]


def test_the_backends_of_other_names_stay_the_defaults() -> None:
    """If a program names no backend, torch chooses the same one as without ddl."""
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"


@pytest.mark.processes
def test_import_torch_is_hardly_slower() -> None:
    """The module imports nothing that torch has not imported, and the registration takes little."""
    code = """
import sys, time
import torch
for name in [name for name in sys.modules if name.startswith("ddl")]:
    print("imported", name)
    del sys.modules[name]
torch.distributed.Backend.backend_list.remove("ddl")
begun = time.perf_counter()
import ddl_torch_backend
ddl_torch_backend.register()
print("took", 1e3 * (time.perf_counter() - begun))
"""
    runs = [run(code).split() for _ in range(3)]
    for words in runs:
        assert words[:3] == ["imported", "ddl_torch_backend", "took"]
    assert min(float(words[3]) for words in runs) <= MOST_MS


@pytest.mark.processes
def test_a_broken_ddlcore_does_not_break_torch(tmp_path: Path) -> None:
    """``import torch`` works and prints nothing. Only a program that asks for the backend gets the error."""
    (tmp_path / "ddlcore").mkdir()
    (tmp_path / "ddlcore" / "__init__.py").write_text("raise ImportError('ddlcore is broken')\n")
    code = """
import torch
import torch.distributed as dist
print(torch.ones(2).sum().item())
try:
    dist.init_process_group("ddl", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""
    lines = [
        line for line in run(code, PYTHONPATH=str(tmp_path)).splitlines() if "[Gloo]" not in line
    ]  # as older ones say
    assert lines == ["2.0", "ddlcore is broken", "gloo"]


def test_an_error_at_the_registration_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of torch may have another ``register_backend``."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise TypeError("register_backend() has no such argument")

    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    monkeypatch.setattr(dist.Backend, "backend_list", [])
    ddl_torch_backend.register()
    assert dist.Backend.backend_list == []
    assert torch.ones(1).item() == 1
