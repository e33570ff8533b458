"""Declare the CPU kernels: the names of the functions and the types of their arguments.

Other machine code needs the declaration to call these functions. Their docstrings are in the modules that are named here.
"""

from __future__ import annotations

from typing import Final

from ddlcore.contracts.machine_code.code import MachineCode

__all__ = ["CPU"]

CPU: Final = MachineCode(
    functions={
        "ddl_cast": "qqqqqd",
        "ddl_combine": "qqqqqqqddd",
        "ddl_convert": "qqqqqqdq",
        "ddl_digest": "qqqq",
        "ddl_mean": "qqqqqd",
        "ddl_reduce": "qqqqqqdd",
        "ddl_widen": "qqqqd",
    },
    # Only the compiler imports these modules, which lie on a higher layer.
    modules=("ddlcore.kernels.loops", "ddlcore.kernels.bucket", "ddlcore.kernels.whole"),
    also=("ddlcore.contracts.elements", "ddlcore.types"),
)
