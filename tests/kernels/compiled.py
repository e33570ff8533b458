"""The machine code that ranks of tests need."""

from __future__ import annotations

import sys

__all__ = ["ALL_CODE"]

ALL_CODE = (
    "ddlcore.contracts.machine_code.cpu:CPU",
    *(("ddl_shm.machine_code:SHM",) if sys.platform == "linux" else ()),
)
