"""The conformance kit on NCCL's transport over a stand-in for NCCL: its calls are put on the queues of pretend devices."""

from __future__ import annotations

from ddl_nccl.conformance import NcclSuite


class TestOverTheStandIn(NcclSuite):
    """As `ddl conform nccl` runs it."""
