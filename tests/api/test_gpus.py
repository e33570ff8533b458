"""Which GPU is a rank's own: what the driver says, what CUDA_VISIBLE_DEVICES leaves, and who shares."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddlcore
from ddlcore.api import Gpus, gpus, local_gpu, visible_gpus
from ddlcore.errors import NotInitialized
from ddlcore.testing import World

FOUR = Gpus("550.54", ("H200",) * 4, ("GPU-aa1", "GPU-aa2", "GPU-b", "GPU-c"))
DIVIDED = Gpus("550.54", ("A100",) * 2, ("GPU-a", "GPU-b"), ("MIG-1", "MIG-2", "MIG-3"), (0,))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is asked or told once a process is asked and told anew."""
    for cached in (gpus.installed_gpus, gpus._log):
        cached.cache_clear()
    yield
    for cached in (gpus.installed_gpus, gpus._log):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("machine", "value", "seen"),
    [
        (FOUR, None, 4),
        (FOUR, "", 0),
        (FOUR, "-1", 0),
        (FOUR, "2", 1),
        (FOUR, "3, 1", 2),
        (FOUR, "0,7,1", 1),  # what stands behind an entry that means nothing is not seen
        (FOUR, "0,x", 1),
        (FOUR, "0,²", 1),
        (FOUR, "\N{ARABIC-INDIC DIGIT ONE}", 0),  # a digit, but not to CUDA
        (FOUR, "1,1", 0),
        (FOUR, "GPU-b", 1),
        (FOUR, "GPU-b,GPU-aa1,GPU-c", 3),
        (FOUR, "GPU-aa", 0),  # it could be either
        (FOUR, "GPU-b,GPU-zz", 1),
        (FOUR, "MIG-9", 1),  # the driver did not say which there are
        (DIVIDED, None, 1),
        (DIVIDED, "MIG-2", 1),
        (DIVIDED, "MIG-2,MIG-3", 1),  # a process sees one at most
        (DIVIDED, "MIG-9", 0),
        (DIVIDED, "MIG-GPU-a/1/0", 1),
        (DIVIDED, "0", 1),
        (DIVIDED, "0,1", 1),
        (DIVIDED, "1", 1),
        (Gpus(), None, 0),
        (Gpus(), "0", 0),
    ],
)
def test_what_cuda_shows(machine: Gpus, value: str | None, seen: int) -> None:
    """CUDA_VISIBLE_DEVICES by index, by UUID and its beginning, by MIG instance, as CUDA reads it."""
    assert visible_gpus(machine, {} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == seen


def devices(monkeypatch: pytest.MonkeyPatch, machine: Gpus, value: str | None, ranks: int) -> list[str]:
    monkeypatch.setattr(gpus, "installed_gpus", lambda: machine)
    monkeypatch.setattr(gpus, "_listed", lambda: len(machine.uuids))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with World(ranks) as world:
        return world.run(lambda rank, job: ddlcore.local_device())


def test_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """cuda:<local rank> where a rank sees all, and nobody is warned."""
    assert devices(monkeypatch, FOUR, None, 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert caplog.messages == []


def test_a_rank_that_sees_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """cuda:0, whatever its local rank: somebody has given each its own."""
    assert devices(monkeypatch, FOUR, "2", 2) == ["cuda:0", "cuda:0"]
    assert caplog.messages == []


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The CPU, without a word."""
    assert devices(monkeypatch, Gpus(problem="no NVIDIA driver"), None, 2) == ["cpu", "cpu"]
    assert caplog.messages == []


def test_hidden_gpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The CPU, and one warning that shows what hides them."""
    with caplog.at_level(logging.WARNING, "ddl"):
        assert devices(monkeypatch, FOUR, "8", 2) == ["cpu", "cpu"]
    assert len(caplog.messages) == 1
    assert "CUDA_VISIBLE_DEVICES='8' names no GPU of this host (4 x H200, driver 550.54)" in caplog.text


@pytest.mark.parametrize(
    ("machine", "value", "ranks", "found", "said"),
    [
        (FOUR, "0,1", 3, ["cuda:0", "cuda:1", "cuda:0"], "3 ranks on this host share 2 GPUs"),
        (Gpus("1", ("H200",), ("GPU-a",)), None, 2, ["cuda:0", "cuda:0"], "2 ranks on this host share 1 GPU,"),
        (Gpus("1", ("H200",), ("GPU-a",)), "0", 2, ["cuda:0", "cuda:0"], "2 ranks on this host share 1 GPU,"),
        (DIVIDED, None, 2, ["cuda:0", "cuda:0"], "2 ranks on this host share 1 GPU,"),
    ],
)
def test_more_ranks_than_gpus(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: Gpus,
    value: str | None,
    ranks: int,
    found: list[str],
    said: str,
) -> None:
    """The ranks take turns, and one warning of the host tells both numbers, however often it is asked."""
    with caplog.at_level(logging.WARNING, "ddl"):
        assert devices(monkeypatch, machine, value, ranks) == found
        assert devices(monkeypatch, machine, value, ranks) == found
    assert len(caplog.messages) == 1
    assert said in caplog.text


def test_a_framework_without_cuda(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What the framework sees counts; that it sees less than CUDA shows is said."""
    monkeypatch.setattr(gpus, "installed_gpus", lambda: FOUR)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with caplog.at_level(logging.WARNING, "ddl"), World(1) as world:
        assert world.run(lambda rank, job: local_gpu(0, "torch 2.13.0+cpu")) == [None]
    assert "torch 2.13.0+cpu sees no GPU, though CUDA shows 4" in caplog.text


def test_before_init() -> None:
    """The local rank is not known yet."""
    with pytest.raises(NotInitialized):
        ddlcore.local_device()


# --- the driver


class Driver:
    """A management library for two GPUs, the second of which may be divided."""

    def __init__(self, divided: bool = False, broken: str = "") -> None:
        self.divided = divided
        self.broken = broken
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if name == self.broken:
            return lambda *arguments: 999
        return getattr(type(self), f"_{name}").__get__(self)

    def _nvmlErrorString(self, code: int) -> bytes:
        return b"Unknown Error"

    def _nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def _nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = 100 + index.value
        return 0

    def _nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = b"575.51.03"
        return 0

    def _nvmlDeviceGetName(self, device: Any, buffer: Any, size: int) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def _nvmlDeviceGetUUID(self, device: Any, buffer: Any, size: int) -> int:
        buffer.value = f"{'MIG' if device.value >= 200 else 'GPU'}-{device.value}".encode()
        return 0

    def _nvmlDeviceGetMigMode(self, device: Any, now: Any, later: Any) -> int:
        now._obj.value = int(self.divided and device.value == 101)
        return 0 if self.divided else 3  # not supported

    def _nvmlDeviceGetMaxMigDeviceCount(self, device: Any, count: Any) -> int:
        count._obj.value = 7
        return 0

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, place: ctypes.c_uint, part: Any) -> int:
        part._obj.value = 200 + place.value
        return 0 if place.value in (0, 2) else 6  # not found


def load(monkeypatch: pytest.MonkeyPatch, driver: Any) -> Gpus:
    def library(name: str) -> Any:
        assert name == "libnvidia-ml.so.1"
        if driver is None:
            raise OSError("cannot open shared object file")
        driver.__dict__["nvmlErrorString"] = Described(driver)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", library)
    return gpus.installed_gpus()


class Described:
    """A foreign function, which has a ``restype``."""

    def __init__(self, driver: Driver) -> None:
        self.restype: Any = None
        self._driver = driver

    def __call__(self, code: int) -> bytes:
        return self._driver._nvmlErrorString(code)


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, UUIDs, MIG instances and version, and the library is left as it was."""
    driver = Driver()
    found = load(monkeypatch, driver)
    assert found == Gpus("575.51.03", ("NVIDIA H200",) * 2, ("GPU-100", "GPU-101"))
    assert str(found) == "2 x NVIDIA H200, driver 575.51.03"
    assert driver.open == 0


def test_the_driver_knows_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that is divided, those that exist."""
    found = load(monkeypatch, Driver(divided=True))
    assert (found.parts, found.divided) == (("MIG-200", "MIG-202"), (1,))
    assert str(found) == "2 x NVIDIA H200, 2 MIG instances, driver 575.51.03"


@pytest.mark.parametrize("name", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID"])
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No GPU, the reason in one line, and no exception."""
    found = load(monkeypatch, Driver(broken=name))
    assert found.uuids == ()
    assert name in found.problem
    assert "Unknown Error" in found.problem


def test_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without it the kernel's list says how many there are; without that, there are none."""
    monkeypatch.setattr(gpus, "PROC", tmp_path)
    assert str(load(monkeypatch, None)) == "none: no NVIDIA driver (libnvidia-ml.so.1 cannot be loaded)"
    (tmp_path / "gpus" / "0000:07:00.0").mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n")
    gpus.installed_gpus.cache_clear()
    assert str(load(monkeypatch, None)) == "1 x NVIDIA GPU, driver 550.54.15"
