"""The CPU kernels: their names and the types of their arguments, for machine code that calls them.

The docstrings of the functions, in the modules that are named here, say what they do.
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
