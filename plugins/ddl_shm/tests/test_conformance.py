"""The conformance kit on shared memory, with ranks in processes. `ddl conform shm` runs it with ranks in threads."""

from __future__ import annotations

import sys

import pytest

from ddlcore.testing import ProcessSuite


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")
class TestShmProcesses(ProcessSuite):
    sizes = (3,)
    target = "ddl_shm.transport:ShmTransport"
