"""Sleep and wake-up by system calls that only Linux has, and the instruction for loops that only wait.

This module is imported only when numba compiles the kernels. Addresses are int64.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir

from ddlcore.contracts.machine_code.intrinsics import cgutils, compiled, inline, types

SYS_FUTEX = 202 if platform.machine() in ("x86_64", "AMD64") else 98  # 98: the generic table (aarch64, riscv64)
FUTEX_WAIT, FUTEX_WAKE, EVERYBODY = 0, 1, 0x7FFFFFFF  # not FUTEX_PRIVATE: processes share the word

sched_yield = types.ExternalFunction("sched_yield", types.int32())
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


@inline
def pause(typing: Any) -> Any:
    """Execute the processor's instruction for loops that only wait."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nothing, i32 = ir.VoidType(), ir.IntType(32)
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(nothing, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif platform.machine() in ("aarch64", "arm64"):  # isb waits, while yield has no effect
            kind = ir.FunctionType(nothing, [i32])
            barrier = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.isb")
            builder.call(barrier, [ir.Constant(i32, 15)])
        return context.get_dummy_value()

    return types.void(), codegen


@compiled("qqq", "")
def futex_wait(word: int, seen: int, timeout: int) -> None:
    """Sleep until ``futex_wake`` is called for the address ``word``, or until a time limit is reached.

    ``timeout`` is the address of a timespec with the time limit, counted from now. If the low 32 bits at ``word``
    differ from the low 32 bits of ``seen``, return at once.
    """
    _syscall(SYS_FUTEX, word, FUTEX_WAIT, seen & 0xFFFFFFFF, timeout, 0, 0)


@compiled("q", "")
def futex_wake(word: int) -> None:
    """Wake all threads that sleep in ``futex_wait`` for the address ``word``."""
    _syscall(SYS_FUTEX, word, FUTEX_WAKE, EVERYBODY, 0, 0, 0)
