"""List the functions in the machine code of the kernels, with the types of their arguments."""

from __future__ import annotations

import sys

# The compiled functions and their arguments: q is int64, d is float64. All return an int64.
FUNCTIONS = {
    "ddl_cast": "qqqqqd",
    "ddl_combine": "qqqqqqqddd",
    "ddl_convert": "qqqqqqdq",
    "ddl_digest": "qqqq",
    "ddl_mean": "qqqqqd",
    "ddl_reduce": "qqqqqqdd",
    "ddl_widen": "qqqqd",
}
LINUX_FUNCTIONS = {
    "ddl_cast": "qqqqqd",
    "ddl_combine": "qqqqqqqddd",
    "ddl_abort": "q",
    "ddl_allreduce": "q",
    "ddl_allreduce_idle": "q",
    "ddl_allreduce_try": "q",
    "ddl_alltoall": "qqqq",
    "ddl_barrier": "q",
    "ddl_gather": "qqqq",
    "ddl_move": "q",
    "ddl_reducescatter": "qqqq",
}
if sys.platform == "linux":
    FUNCTIONS |= LINUX_FUNCTIONS
