"""The conformance suite of backends of torch.distributed."""

from __future__ import annotations

from ddl_conform.process_groups.suite import ProcessGroupSuite

__all__ = ["ProcessGroupSuite"]
