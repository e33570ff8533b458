"""Runs collectives as operations of MXNet's engine, the part of MXNet that runs operators in the background.

An operation is pushed to the engine together with the arrays that the operation reads and writes. The engine calls back
when all earlier operators on these arrays have ended. The operation counts as running until ddl has the result of the
collective. Later operators on these arrays wait for the end of the operation, as they wait for any operator of MXNet.
If a collective fails, its error is raised in each thread that waits for an array which the operation writes.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

from mxnet.base import _LIB, MXNetError, check_call, register_error

from ddl_mxnet.adapter import MxnetAdapter, address_of, apart, count_of, dtype_of
from ddl_mxnet.devices import is_on_gpu, on_host
from ddl_mxnet.traffic import EngineTraffic
from ddlcore.api import Handle, Operations, is_initialized
from ddlcore.contracts import JobService, TensorEntry
from ddlcore.errors import InvalidArgument, NotInitialized
from ddlcore.types import CPU, Buffer, DType

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ON_COMPLETE = ctypes.c_size_t * 3  # engine.h, CallbackOnComplete: a function, the engine, its operation
_PRIORITIZED = ctypes.c_int(3)  # engine.h, FnProperty::kCPUPrioritized: separate threads for short operations
_CPU_CONTEXT = (ctypes.c_int * 2)(1, 0)  # base.h, Context: cpu(0)
_NAME = b"ddl"
_KNOWN_ERRORS = 64
_END_S = 10.0  # how long to wait at exit for the operator that MXNet is running
_LOOK_S = 0.002  # the pause between two checks whether that operator has ended
_ONEDNN = (DType.F32, DType.BF16, DType.I8, DType.U8)  # the types with which oneDNN computes
_SKIPPED = "MXNet could not compute an array of this operation; array.wait_to_read() says why"

_keys = itertools.count(1)
_pushed: dict[int, Pushed] = {}  # the operations that the engine has not called back yet
_entered: set[int] = set()  # the keys of the operations that the engine is calling back now
_functions: dict[int, Any] = {}  # address of ``on_complete`` -> callable; all operations have the same address
_raised: dict[int, BaseException] = {}  # errors, by the number that their messages carry through MXNet

_push = _LIB["MXEnginePushAsyncND"]  # indexing makes a separate function object, whose argument types may be set
_push.argtypes = (
    *(ctypes.c_void_p,) * 5,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_bool,
)
# NDArray::Reorder2DefaultAsync() const, which MXNDArrayGetData calls before it waits. MXNet without oneDNN lacks it.
_reorder = getattr(_LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)
if _reorder is not None:
    _reorder.argtypes, _reorder.restype = (ctypes.c_void_p,), None
_construct, _destroy = _LIB["_ZNSt13runtime_errorC1EPKc"], _LIB["_ZNSt13runtime_errorD1Ev"]
_construct.argtypes, _construct.restype = (ctypes.c_void_p, ctypes.c_char_p), None
_destroy.argtypes, _destroy.restype = (ctypes.c_void_p,), None


class Pushed:
    """An operation of MXNet's engine that reads the arrays ``reads`` and writes the arrays ``writes``.

    A thread of the engine calls ``begin`` when the operation may use its arrays. ``begin`` must not wait. The operation
    ends when any thread calls ``end``. Later operators on the arrays run only after this call. If MXNet could not
    compute one of the arrays, the engine calls ``skip`` instead of ``begin``.

    The same operation may be pushed several times, from any thread. The engine runs operations that write the same
    arrays one after the other.
    """

    __slots__ = ("_arguments", "_arrays", "_error", "_on_complete", "_traffic", "begin", "skip")

    def __init__(
        self,
        reads: Sequence[Any],
        writes: Sequence[Any],
        begin: Callable[[], None],
        skip: Callable[[], None] | None = None,
        traffic: EngineTraffic | None = None,
    ) -> None:
        self._arrays = (*reads, *writes)  # keeps their handles alive until the engine calls back
        writes = apart(writes)
        reads = apart(reads, writes)
        self.begin = begin
        self.skip = skip
        self._traffic = traffic
        self._on_complete: tuple[int, ...] = ()
        self._error: BaseException | None = None
        self._arguments = (
            _deleter,
            ctypes.addressof(_CPU_CONTEXT),
            _handles(reads),
            len(reads),
            _handles(writes),
            len(writes),
            ctypes.addressof(_PRIORITIZED),
        )

    def push(self, priority: int = 0) -> None:
        """Add the operation to the queue of MXNet's engine, behind all earlier operators on its arrays.

        ``priority`` is the priority in the engine: operations with higher numbers run first. If MXNet uses its naive
        engine, the operation runs within this call. In this case, the method returns after the operation has ended, and
        raises the error of the operation.
        """
        if self._traffic is not None:
            self._traffic.pushed()
        key = next(_keys)
        _pushed[key] = self
        code = _push(_callback, key, *self._arguments, priority, _NAME, False)
        if code != 0:
            if _pushed.pop(key, None) is not None and self._traffic is not None:
                self._traffic.skipped()
            check_call(code)
        if self._error is not None:
            error, self._error = self._error, None
            raise error.with_traceback(None)

    def called_back(self, on_complete: tuple[int, ...]) -> None:
        """Call ``begin``. The engine calls this method when the operation may use its arrays.

        ``on_complete`` is the engine's callback that ``end`` must call: (function, engine, argument) as addresses. If
        ``begin`` raises an error, the operation ends with this error.
        """
        self._on_complete = on_complete
        if self._traffic is not None:
            self._traffic.called_back()
        try:
            self.begin()
        except BaseException as error:
            self.end(error)

    def skipped(self) -> None:
        """Call ``skip``. The engine calls this method if it has dropped the operation without running it."""
        if self._traffic is not None:
            self._traffic.skipped()
        if self.skip is not None:
            self.skip()

    def end(self, error: BaseException | None = None) -> None:
        """Report to MXNet that the operation has ended, so that other operators may use its arrays.

        If ``error`` is given, it is raised in each thread that waits for an array which the operation writes. Any
        thread may call this method, unless it holds a lock of ddl. A second call does nothing.
        """
        if not self._on_complete:
            return
        (address, engine, argument), self._on_complete = self._on_complete, ()
        function = _functions.get(address)
        if function is None:
            function = _functions[address] = _CALLBACK(address)
        if error is None:
            function(engine, argument, None)
        elif is_naive():  # the naive engine would lose the error, so ``push`` raises it
            self._error = error
            function(engine, argument, None)
        else:
            # ``on_complete`` takes a C++ exception, and ctypes cannot make one. So the constructor of libstdc++ builds
            # a std::runtime_error in these bytes. MXNet copies it before the call returns, hence it is destroyed at
            # once. Only its text reaches the thread that waits. ``_remembered`` puts a number into the text, by which
            # ``_recalled`` finds the Python error.
            thrown = (ctypes.c_char * 64)()
            _construct(thrown, _remembered(error))
            function(engine, argument, ctypes.addressof(thrown))
            _destroy(thrown)
        if self._traffic is not None:
            self._traffic.ended()


def _call_back(_context: int, on_complete: int, key: int) -> None:
    _entered.add(key)
    try:
        _pushed.pop(key).called_back(tuple(_ON_COMPLETE.from_address(on_complete)))
    finally:
        _entered.discard(key)


def _delete(key: int) -> None:
    """Handle MXNet's callback that says that MXNet deletes the operation with the number ``key``.

    If MXNet has not called the operation back before, the operation will never run. MXNet does not report this in any
    other way.
    """
    if key not in _pushed:
        return
    _entered.add(key)
    try:
        _pushed.pop(key).skipped()
    finally:
        _entered.discard(key)


@atexit.register
def _end() -> None:
    """Wait at the exit of the interpreter, at most 10 s, until MXNet makes no more callbacks.

    A callback into an interpreter that ends would abort the process. This function runs after the shutdown of the job
    and before MXNet's own exit function. Operations that the engine has not begun are dropped; they would also be
    dropped without this function.
    """
    if not _pushed or is_initialized():
        return
    # It is not safe to continue as soon as ``_pushed`` is empty: a callback first removes its operation from
    # ``_pushed`` and then runs Python code. During this time, ``_entered`` contains the operation's key. A callback
    # adds the key to ``_entered`` before it removes the operation from ``_pushed``. So as long as a callback is still
    # to come or runs, at least one of ``_pushed`` and ``_entered`` is not empty.
    _LIB.MXNotifyShutdown()
    until_s = time.monotonic() + _END_S
    while (_pushed or _entered) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)


_callback = ctypes.cast(_keep_callback := _CALLBACK(_call_back), ctypes.c_void_p)
_deleter = ctypes.cast(_keep_deleter := _DELETER(_delete), ctypes.c_void_p)


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays))


def _remembered(error: BaseException) -> bytes:
    """Store ``error`` under a new number, and return an error message for MXNet that contains this number.

    The message reaches the thread that waits for an array. There, ``_recalled`` finds the error by its number.
    """
    number = next(_keys)
    while len(_raised) >= _KNOWN_ERRORS:
        _raised.pop(next(iter(_raised)), None)
    _raised[number] = error
    line = str(error).partition("\n")[0]  # MXNet would take further lines for a stack trace
    return f"ddl_mxnet: {number} {type(error).__name__}: {line}".encode()


def _recalled(message: str) -> BaseException:
    words = message.split(maxsplit=2)
    error = _raised.get(int(words[1])) if len(words) > 1 and words[1].isdecimal() else None
    return MXNetError(message) if error is None else error.with_traceback(None)


register_error("ddl_mxnet", _recalled)


@cache
def is_naive() -> bool:
    """Return whether MXNet uses its naive engine, which runs each operator within the call that pushes it.

    The user chooses it by MXNET_ENGINE_TYPE=NaiveEngine.
    """
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
    """An adapter for arrays that MXNet may still be computing.

    ``buffer`` does not wait for the array. The buffer has the address 0; the real address is set later.
    """

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        dtype, shape = dtype_of(tensor, anywhere=True), tuple(tensor.shape)
        return Buffer(0, count_of(shape), dtype, shape, None, CPU, tensor)


class EngineOperations(Operations):
    """The collectives for arrays that MXNet may still be computing.

    A call that starts a collective does not wait for the arrays. ``wait`` of its handle waits until the arrays are
    computed and the collective has ended.
    """

    background = True

    def __init__(self) -> None:
        super().__init__(_Promised())
        self.priority = 0

    def at(self, priority: int) -> EngineOperations:
        """Return an object with the same collectives, which run with the priority ``priority`` in MXNet's engine.

        Operations with higher numbers run first.
        """
        if priority == 0:
            return self
        other = copy(self)
        other.priority = priority
        return other

    def hand_over(self, job: JobService, handle: Handle, entries: Sequence[TensorEntry], waits: bool) -> None:
        traffic = job.companion(EngineTraffic)
        if job.closed:
            raise NotInitialized("ddl has been shut down; call init() again first")
        places: list[Any] = [entry.target.owner for entry in entries if entry.target is not None]
        if len({id(array) for array in places}) < len(places):
            raise InvalidArgument("an array stands twice in one call that writes in place; pass each array once")
        # Calls without a name are numbered here, on the user's thread, and not when they are submitted. Arrays become
        # ready in another order on each rank, so numbers given at submission would pair different calls.
        job.name_entries(entries)
        landing = [place for entry in entries for place in _brought_to_host(entry)]
        sources: list[Any] = [entry.source.owner for entry in entries if entry.source is not None]
        for entry in entries:
            _put_in_order(entry)
        writes: list[Any] = [entry.target.owner for entry in entries if entry.target is not None]
        written = {array.handle.value for array in writes}
        reads = [array for array in sources if array.handle.value not in written]
        place = traffic.queue((entries[0].set_id, entries[0].name))

        def submit() -> None:
            try:
                for entry in entries:
                    entry.locate(_located)
                job.submit(entries)
            except BaseException as error:
                handle.refuse(error)  # this ends the operation too, through ``end`` below
            finally:
                traffic.submitted(place)

        def end() -> None:
            handle.poll()  # marks the end as seen: what the user submits later may depend on the result
            traffic.quit(place)
            operation.end(handle.failure)

        operation = Pushed(
            reads,
            writes,
            partial(traffic.enter, place, submit),
            lambda: handle.refuse(MXNetError(_SKIPPED)),
            traffic,
        )
        handle.then(end)
        if is_naive():
            traffic.enter(place, submit)
            return
        try:
            operation.push(self.priority)
        except BaseException as error:
            handle.refuse(error)
            raise
        for here, there in landing:  # does not wait: the engine copies after the operation
            here.copyto(there)


def _brought_to_host(entry: TensorEntry) -> list[tuple[Any, Any]]:
    """Replace the arrays of ``entry`` by arrays in host memory, if they are on a GPU.

    Return pairs (host array, GPU array): after the operation, the host array must be copied to the GPU array. The list
    is empty if there is nothing to copy back.
    """
    source, target = entry.source, entry.target
    if source is None or not is_on_gpu(source.owner):
        return []
    if is_naive():
        raise InvalidArgument(
            "MXNET_ENGINE_TYPE=NaiveEngine serves arrays of the CPU only; pass array.as_in_context(mx.cpu())"
        )
    near = replace(source, owner=on_host(source.owner))
    if target is None:
        entry.move(near, None)
        return []
    result = near if target is source else replace(target, owner=MxnetAdapter().allocate(near.owner))
    entry.move(near, result)
    return [(result.owner, target.owner)]


def _put_in_order(entry: TensorEntry) -> None:
    """Make MXNet's engine convert the source array of ``entry`` to MXNet's usual memory layout.

    The library oneDNN, which MXNet uses, may store an array in another layout. This thread must not look at the layout
    of an array that is still being computed: MXNet allocates the memory when the array is computed or first accessed,
    and if two threads cause this at the same time, each thread gets a different block of memory. So the conversion is
    queued in any case, behind the operators that compute the array. If the layout is the usual one, the conversion does
    nothing.
    """
    source = entry.source
    if _reorder is not None and source is not None and source.dtype in _ONEDNN and len(source.shape) > 1:
        array: Any = source.owner
        _reorder(array.handle)


def _located(array: Any) -> int:
    """Return the address of the memory of ``array``.

    The function does not wait, so threads of MXNet's engine may call it. Raises InvalidArgument if the library oneDNN
    stores the array in a special layout.
    """
    address = address_of(array.handle)
    if address is None:
        raise InvalidArgument(
            f"an array of shape {tuple(array.shape)} is in a layout of oneDNN's own; call array.wait_to_read() before "
            "this call, or set MXNET_MKLDNN_ENABLED=0"
        )
    return address
