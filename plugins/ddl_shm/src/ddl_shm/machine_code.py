"""The machine code of the collectives in shared memory, which a rank calls once for each collective."""

from __future__ import annotations

from typing import Final

from ddlcore.contracts.machine_code.code import MachineCode
from ddlcore.contracts.machine_code.cpu import CPU

SHM: Final = MachineCode(
    functions={
        "ddl_abort": "q",
        "ddl_allreduce": "q",
        "ddl_allreduce_idle": "q",
        "ddl_allreduce_try": "q",
        "ddl_alltoall": "qqqq",
        "ddl_barrier": "q",
        "ddl_gather": "qqqq",
        "ddl_move": "q",
        "ddl_reducescatter": "qqqq",
    },
    modules=("ddl_shm.kernels.channels", "ddl_shm.kernels.exchange", "ddl_shm.kernels.ring"),
    also=("ddl_shm.kernels.frame", "ddl_shm.kernels.waiting", "ddlcore.types"),
    uses=(CPU,),
)
