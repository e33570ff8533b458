"""CudaDevice over a fake driver passes the suite of device runtimes; kernels run in numba's simulator."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from ddlcore.testing import DeviceSuite
from ddlcore.types import Device
from plugins.ddl_nccl.tests.cuda.fake import FakeDriver
from plugins.ddl_nccl.tests.cuda.world import FakeCuda


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Make one driver for all devices that a test opens, as in a real process."""
    made = FakeDriver()
    monkeypatch.setattr(FakeCuda, "shared", made, raising=False)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # numba's simulator polls
    yield made
    sys.setswitchinterval(interval)
    left = list(made.streams)
    made.stop()
    assert not left, f"streams {left} were not closed"


class TestCuda(DeviceSuite):
    runtime = FakeCuda
    device = Device("cuda", 1)
