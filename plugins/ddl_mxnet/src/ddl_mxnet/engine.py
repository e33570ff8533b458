"""Runs collectives as operations of MXNet's engine, so that what it is still computing is waited for there.

An operation is pushed with the arrays that it reads and writes. The engine calls back when all earlier work on
them is done, and counts it as running until ddl has its result: whatever uses the arrays later waits for that, as
for any operator of MXNet's own. What becomes of it is raised where MXNet raises: by whoever waits for an array.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mxnet.base import _LIB, MXNetError, check_call, register_error

from ddl_mxnet.adapter import MxnetAdapter, address_of, dtype_of
from ddlcore.api import Operations
from ddlcore.types import CPU, Buffer

__all__ = ["EngineOperations", "Pushed", "Recurrence", "is_naive"]

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_ON_COMPLETE = ctypes.c_size_t * 3  # engine.h, CallbackOnComplete: a function, the engine, its operation
_PRIORITIZED = ctypes.c_int(3)  # engine.h, FnProperty::kCPUPrioritized: threads of their own, for what is short
_CPU_CONTEXT = (ctypes.c_int * 2)(1, 0)  # base.h, Context: cpu(0)
_NAME = b"ddl"
_KNOWN_ERRORS = 64

_keys = itertools.count(1)
_pushed: dict[int, Pushed] = {}  # what the engine has yet to call back
_functions: dict[int, Any] = {}  # address to callable: the engine has one for all operations
_raised: dict[str, BaseException] = {}  # by the message that goes through MXNet

_construct, _destroy = _LIB._ZNSt13runtime_errorC1EPKc, _LIB._ZNSt13runtime_errorD1Ev
_construct.argtypes, _construct.restype = (ctypes.c_void_p, ctypes.c_char_p), None
_destroy.argtypes, _destroy.restype = (ctypes.c_void_p,), None


class Pushed:
    """An operation of MXNet's engine: ``begin`` is called on a thread of its own when the arrays stand.

    ``begin`` must not wait. What follows in the engine goes on when ``end`` is called, once, by any thread.
    May be pushed again, from any thread; the engine runs those that write the same arrays one after the other.
    """

    __slots__ = ("_arguments", "_error", "_on_complete", "_reads", "_writes", "begin")

    def __init__(self, reads: Sequence[Any], writes: Sequence[Any], begin: Callable[[], None]) -> None:
        self._reads = tuple(reads)  # the arrays themselves: their handles must live until the engine calls back
        self._writes = tuple(writes)
        self.begin = begin
        self._on_complete: tuple[int, ...] = ()
        self._error: BaseException | None = None
        self._arguments = (
            _handles(self._reads),
            ctypes.c_int(len(self._reads)),
            _handles(self._writes),
            ctypes.c_int(len(self._writes)),
            ctypes.byref(_PRIORITIZED),
        )

    def push(self, priority: int = 0) -> None:
        """Behind everything that the caller has asked MXNet for. ``priority``: the engine's, higher first.

        Raises what became of the operation where MXNet computes at once, for it returns only when it is over.
        """
        key = next(_keys)
        _pushed[key] = self
        code = _LIB.MXEnginePushAsyncND(
            _callback, ctypes.c_void_p(key), None, _CPU_CONTEXT, *self._arguments, priority, _NAME, False
        )
        if code != 0:
            del _pushed[key]
            check_call(code)
        if self._error is not None:
            error, self._error = self._error, None
            raise error.with_traceback(None)

    def called_back(self, on_complete: tuple[int, ...]) -> None:
        """The arrays are this operation's alone."""
        self._on_complete = on_complete
        try:
            self.begin()
        except BaseException as error:
            self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """The arrays are MXNet's again; who waits for one of those written gets ``error``. Later calls do nothing."""
        (*called, argument), self._on_complete = self._on_complete or (0,), ()
        if not called:
            return
        address, engine = called
        function = _functions.get(address)
        if function is None:
            function = _functions[address] = _CALLBACK(address)
        if error is None:
            function(engine, argument, None)
            return
        if is_naive():  # which would lose the error
            self._error = error
            function(engine, argument, None)
            return
        thrown = (ctypes.c_char * 64)()  # a std::runtime_error, of which MXNet makes a copy
        _construct(thrown, _remembered(error))
        function(engine, argument, ctypes.addressof(thrown))
        _destroy(thrown)


def _call_back(_context: int, on_complete: int, key: int) -> None:
    _pushed.pop(key).called_back(tuple(_ON_COMPLETE.from_address(on_complete)))


_callback = _CALLBACK(_call_back)


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays))


def _remembered(error: BaseException) -> bytes:
    """The message by which ``_recalled`` finds the error itself, when MXNet has carried it to whoever waits."""
    message = f"ddl_mxnet: {type(error).__name__}: {error}"
    while len(_raised) >= _KNOWN_ERRORS:
        _raised.pop(next(iter(_raised)))
    _raised[message.strip()] = error
    return message.encode()


def _recalled(message: str) -> BaseException:
    error = _raised.get(message.strip())
    return MXNetError(message) if error is None else error.with_traceback(None)


register_error("ddl_mxnet", _recalled)


@cache
def is_naive() -> bool:
    """Whether MXNet computes at once, within the call (MXNET_ENGINE_TYPE=NaiveEngine)."""
    threads: list[int] = []
    called = threading.Event()

    def begin() -> None:
        threads.append(threading.get_ident())
        probe.end()
        called.set()

    probe = Pushed((), (), begin)
    probe.push()
    called.wait(10.0)
    return threads == [threading.get_ident()]


class _Promised(MxnetAdapter):
    """Describes arrays that are still being computed: no address yet."""

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        dtype, shape = dtype_of(tensor), tuple(tensor.shape)
        count = 1
        for extent in shape:
            count *= extent
        return Buffer(0, count, dtype, shape, None, CPU, tensor)


class EngineOperations(Operations):
    """The verbs over arrays that MXNet may still be computing. No call waits for them; a handle does, for all."""

    def __init__(self) -> None:
        super().__init__(_Promised())

    def hand_over(self, job: Any, handle: Any, entries: Sequence[Any], waits: bool) -> None:
        reads = [entry.source.owner for entry in entries]
        writes = [entry.target.owner for entry in entries if entry.target is not None]
        buffers = [buffer for entry in entries for buffer in (entry.source, entry.target) if buffer is not None]

        def begin() -> None:
            try:
                for buffer in buffers:
                    buffer.address = _located(buffer.owner)
                job.submit(entries)
            except BaseException as error:
                handle.refuse(error)  # which ends the operation, too

        def end() -> None:
            handle.poll()  # what comes after has seen its end
            operation.end(handle.failure)

        if is_naive():
            begin()
            return
        operation = Pushed([array for array in reads if not _is_in(array, writes)], writes, begin)
        handle.then(end)
        operation.push()


class Recurrence:
    """An allreduce in place of one array, again in every step: described once, pushed by ``start``.

    ``start`` returns at once; MXNet's engine reduces the array when what it has been asked for before is done.
    Errors are raised by whoever waits for the array.
    """

    __slots__ = ("_again", "_operation", "array", "job", "recurring")

    def __init__(self, operations: EngineOperations, array: Any, name: str, job: Any, **how: Any) -> None:
        is_naive()  # found out by a thread that MXNet's engine does not wait for
        self.array = array
        self.job = job
        self.recurring = operations.recurring_allreduce(array, name=name, job=job, **how)
        self.recurring.then = self._ended
        self._again = job.again
        self._operation = Pushed((), (array,), self._begin)

    def start(self, priority: int = 0) -> None:
        """Any thread. ``priority``: the engine's, higher first."""
        self._operation.push(priority)

    def _begin(self) -> None:
        self._again(self.recurring, _located(self.array), self.array)

    def _ended(self) -> None:
        error = self.recurring.error
        self.recurring.error = None
        self.recurring.completion.observe(self.recurring.index)
        self._operation.end(error)


def _located(array: Any) -> int:
    """Where the array is, on a thread of the engine."""
    address = address_of(array.handle)
    if address is None:
        raise ValueError(
            f"an array of shape {tuple(array.shape)} is in a layout of oneDNN's own; pass array.copy() after "
            "array.wait_to_read(), or set MXNET_MKLDNN_ENABLED=0"
        )
    return address


def _is_in(array: Any, arrays: Sequence[Any]) -> bool:
    return any(array is other for other in arrays)
