"""Runs the conformance kit on NCCL's transport over a stand-in for NCCL, on the queues of pretend devices."""

from __future__ import annotations

from ddl_nccl.conformance import NcclSuite


class TestOverTheStandIn(NcclSuite):
    """The same suite that `ddl conform nccl` runs."""
