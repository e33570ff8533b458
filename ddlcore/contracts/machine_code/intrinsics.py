"""Operations that numba lacks: plain and atomic access to raw addresses, and memory on the stack.

Addresses are int64. numba passes the argument ``typing``; callers leave it out. This module imports numba, so only
modules of functions that numba compiles import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numba
import numba.core.cgutils
import numba.extending
from llvmlite import ir

from ddlcore.contracts.machine_code.code import MachineCode

__all__ = [
    "add_word",
    "cgutils",
    "compiled",
    "copy",
    "inline",
    "load_word",
    "outside",
    "read",
    "read_double",
    "stack",
    "store_word",
    "types",
    "write",
]

I8, I64, F64 = ir.IntType(8), ir.IntType(64), ir.DoubleType()
_PIECE, _PIECES = 32, 4  # bytes of a vector; vectors that one turn of the loop copies
_LEAST_LOOP, _LINE = 2048, 64  # bytes from which on a loop copies; bytes of a cache line

# numba's type annotations are incomplete, and differ from version to version.
_njit: Any = numba.njit
types: Any = numba.types
cgutils: Any = numba.core.cgutils

DECLARED: set[str] = set()  # the names that ``outside`` has declared
NUMBERS = {"q": types.int64, "d": types.float64, "": types.void}
Function = TypeVar("Function", bound=Callable[..., object])
# To mypy, all intrinsics return an int, although read_double returns a float.
inline: Callable[[Callable[..., Any]], Callable[..., int]] = numba.extending.intrinsic


def compiled(arguments: str, result: str = "q") -> Callable[[Function], Function]:
    """Return a decorator that makes numba compile a function for one combination of types.

    ``arguments`` and ``result`` have a letter for each type: q is int64, d is float64. If ``result`` is "", the
    function returns nothing; if it has two letters, the function returns a pair. numba's wrappers for calls from Python
    are left out, because they take time to compile and need numba's runtime, which ranks do not load.
    """
    kinds = [NUMBERS[letter] for letter in arguments]
    returned = types.UniTuple(NUMBERS[result[0]], len(result)) if len(result) > 1 else NUMBERS[result]
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    decorate: Callable[[Function], Function] = _njit(returned(*kinds), **options)
    return decorate


def outside(code: MachineCode, name: str) -> Callable[..., int]:
    """Declare the function ``name`` of ``code`` as an external function, for compiled functions to call.

    ``code`` is the MachineCode of the callers, or one that it ``uses``. The function is not compiled again for each
    caller: the linker finds it.
    """
    kind = types.int64(*(NUMBERS[letter] for letter in code.functions[name]))
    if llvm.address_of_symbol(name) is None:
        llvm.add_symbol(name, 1)  # numba links compiled code, but does not run it here, so the address is not used
    DECLARED.add(name)
    function: Callable[..., int] = types.ExternalFunction(name, kind)
    return function


def _pointer(builder: Any, address: Any, element: Any = I64) -> Any:
    return builder.inttoptr(address, element.as_pointer())


@inline
def load_word(typing: Any, address: Any) -> Any:
    """Load the word at ``address`` atomically (sequentially consistent).

    If another thread has stored the word by ``store_word``, this thread then sees everything that the other thread
    wrote before.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@inline
def store_word(typing: Any, address: Any, value: Any) -> Any:
    """Store ``value`` at ``address`` atomically (sequentially consistent).

    A thread that loads the value also sees everything that this thread wrote before.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@inline
def add_word(typing: Any, address: Any, value: Any) -> Any:
    """Add ``value`` to the word at ``address`` atomically (sequentially consistent), and return its old value.

    No earlier access is moved after this operation, and no later access is moved before it.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@inline
def read(typing: Any, address: Any) -> Any:
    """Load the word at ``address`` with a plain (not atomic) access, for memory that no other thread changes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0]))

    return types.int64(types.int64), codegen


@inline
def read_double(typing: Any, address: Any) -> Any:
    """Load the float64 at ``address`` with a plain (not atomic) access, for memory that no other thread changes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], F64))

    return types.float64(types.int64), codegen


@inline
def write(typing: Any, address: Any, value: Any) -> Any:
    """Store ``value`` at ``address`` with a plain (not atomic) access, for memory that no other thread uses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@inline
def copy(typing: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy ``nbytes`` bytes from ``source`` to ``target``. The two ranges must not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(_copy_function(builder.module), args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _copy_function(module: Any) -> Any:
    """Return the function of ``module`` that copies bytes, and define it there if it is not.

    Few bytes are copied by memcpy. For more, the memcpy of many systems uses an instruction of the processor (rep movsb)
    that is several times slower than a loop on some processors (AMD's Zen 3 and 4), if the addresses have certain
    distances.
    """
    name = "ddl_copy_bytes"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), name)
    function.linkage = "linkonce_odr"  # several modules define it; the linker keeps one of the definitions
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    target, source, nbytes = function.args
    kind = ir.VectorType(I8, _PIECE)

    def block(at: Any) -> None:  # the loads come first, so that they need not wait for the stores
        places = [b.add(at, I64(_PIECE * i)) for i in range(_PIECES)]
        values = [b.load(_pointer(b, b.add(source, place), kind), align=1) for place in places]
        for place, value in zip(places, values):
            b.store(value, _pointer(b, b.add(target, place), kind), align=1)

    with b.if_then(b.icmp_signed("<", nbytes, I64(_LEAST_LOOP))):
        cgutils.raw_memcpy(b, _pointer(b, target, I8), _pointer(b, source, I8), nbytes, 1, 1)
        b.ret_void()
    # The first and the last block may overlap with others: so all stores between them can be aligned.
    block(I64(0))
    begin = b.sub(I64(_LINE), b.and_(target, I64(_LINE - 1)))
    blocks = b.udiv(b.sub(nbytes, begin), I64(_PIECE * _PIECES))
    with cgutils.for_range(b, blocks) as loop:
        block(b.add(begin, b.mul(loop.index, I64(_PIECE * _PIECES))))
    block(b.sub(nbytes, I64(_PIECE * _PIECES)))
    b.ret_void()
    return function


@inline
def stack(typing: Any, nbytes: Any) -> Any:
    """Return the address of ``nbytes`` bytes on the stack. The memory is valid until the calling function returns.

    ``nbytes`` must be a literal. The address is a multiple of 64, the size of a cache line.
    """
    if not isinstance(nbytes, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():  # allocated once per call, even if used in a loop
            memory = builder.alloca(ir.ArrayType(I8, nbytes.literal_value))
            memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.int64(nbytes), codegen
