"""The plugin registers without importing NCCL, CUDA or numba, and says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ddl_nccl import probe
from ddl_nccl.plugin import ddl_checks, ddl_kernels, ddl_transports

from ddlcore.api import built, built_version
from ddlcore.plug.settings import settings_of

NO_DRIVER = "no NVIDIA driver (libcuda.so.1 not found)"


def test_introduction_imports_nothing() -> None:
    """Listing the plugin and asking what is missing import none of its dependencies."""
    code = (
        "import sys; from ddlcore.plug.finding import run_alone; one = run_alone('ddl_nccl.plugin'); "
        "names = [p.name for p in one.ddl_transports() + one.ddl_kernels() + one.ddl_checks()]; "
        "run_alone('ddl_nccl.probe').nccl(); "
        "print(names, [m for m in ('nccl', 'cuda', 'numba', 'ddl_nccl') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert shown.stdout.split("\n")[0] == "['nccl', 'cuda', 'nccl', 'known-bad-nccl', 'gpu-copies'] []"


def test_what_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport connects CUDA devices of any hosts, one for each rank; the kernels are for the same devices."""
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    (transport,), (kernels,), checks = ddl_transports(), ddl_kernels(), ddl_checks()
    assert transport.devices == ("cuda",) and transport.spans_devices and transport.own_device
    assert kernels.device == "cuda" and all(check.target for check in checks)
    settings, registry = settings_of({"DDL_NCCL_NATIVE_16BIT": "1"})
    assert registry.transports["nccl"].target == transport.target
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # the user lets ranks share a GPU
    assert not ddl_transports()[0].own_device
    assert settings["nccl_native_16bit"] is True and settings["nccl_timeout_s"] == 0.0


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (None, ""),
        ("0", ""),
        ("GPU-1234,1", ""),
        ("MIG-1234", ""),
        ("", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        ("-1", "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
        ("-1,0", "hides every GPU"),
    ],
)
def test_hidden_gpus(listed: str | None, said: str) -> None:
    """CUDA ends the list of visible devices at the first invalid entry."""
    told = probe.visible({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed})
    assert (said in told) if said else told == ""


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """First the driver is reported missing, then a GPU, then NCCL; each with what to do."""
    there = {probe.DRIVER: False, probe.LIBRARY: False}
    devices: list[str] = []
    monkeypatch.setattr(probe, "_loads", lambda name: there[name])
    monkeypatch.setattr(probe, "_device_files", lambda: devices)
    monkeypatch.setattr(probe, "installed_libraries", lambda: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probe.gpu().startswith(NO_DRIVER) and probe.nccl() == probe.gpu()
    there[probe.DRIVER] = True
    assert "no /dev/nvidia0" in probe.gpu() and probe.nccl() == probe.gpu()
    devices.append("/dev/nvidia0")
    assert probe.gpu() == "" and "pip install nvidia-nccl-cu13" in probe.nccl()
    there[probe.LIBRARY] = True
    assert probe.nccl() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides every GPU" in probe.gpu() and probe.nccl() == probe.gpu()


def test_a_wheel_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library of a wheel is found where pip puts it, without loading it."""
    place = tmp_path / "nvidia" / "nccl" / "lib"
    place.mkdir(parents=True)
    (place / probe.LIBRARY).write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert probe.installed_libraries()[0] == place / probe.LIBRARY


def test_built_is_the_version_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """``built_version`` is 0 if NCCL cannot be used, and otherwise the version code of the loaded library."""
    _, registry = settings_of(os.environ)
    provider = registry.transports["nccl"]
    usable = not registry.missing(provider)
    assert built("nccl") == usable
    assert (built_version("nccl") > 20000) == usable
    if not usable:
        assert built_version("nccl") == 0


def test_built_versions_of_others() -> None:
    """``built_version`` is 1 for a transport without a library, and 0 for one that does not exist."""
    assert built_version("solo") == 1 and built_version("no such") == 0


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that cannot be loaded counts as missing, without a traceback."""
    from ddl_nccl import library

    def broken() -> Any:
        raise OSError("libnccl.so.2: undefined symbol")

    monkeypatch.setattr(library, "load", broken)
    assert library.library() is None
