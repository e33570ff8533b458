"""Runs collectives as operations of MXNet's engine, so that what it is still computing is waited for there.

An operation is pushed with the arrays that it reads and writes. The engine calls back when all earlier work on
them is done, and counts it as running until ddl has its result: whatever uses the arrays later waits for that, as
for any operator of MXNet's own. What becomes of it is raised where MXNet raises: by whoever waits for an array.
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
from ddl_mxnet.traffic import Traffic
from ddlcore.api import Operations, is_initialized
from ddlcore.errors import InvalidArgument, NotInitialized
from ddlcore.types import CPU, Buffer, DType

__all__ = ["EngineOperations", "Pushed", "is_naive"]

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ON_COMPLETE = ctypes.c_size_t * 3  # engine.h, CallbackOnComplete: a function, the engine, its operation
_PRIORITIZED = ctypes.c_int(3)  # engine.h, FnProperty::kCPUPrioritized: threads of their own, for what is short
_CPU_CONTEXT = (ctypes.c_int * 2)(1, 0)  # base.h, Context: cpu(0)
_NAME = b"ddl"
_KNOWN_ERRORS = 64
_END_S = 10.0  # for the operator that MXNet is in the midst of when the interpreter ends
_LOOK_S = 0.002
_ONEDNN = (DType.F32, DType.BF16, DType.I8, DType.U8)  # the types that it computes with
_SKIPPED = "MXNet could not compute an array of this operation; array.wait_to_read() says why"

_keys = itertools.count(1)
_pushed: dict[int, Pushed] = {}  # what the engine has yet to call back
_entered: set[int] = set()  # what it is calling back now
_functions: dict[int, Any] = {}  # address to callable: the engine has one for all operations
_raised: dict[int, BaseException] = {}  # by the number that goes through MXNet in its message

_push = _LIB["MXEnginePushAsyncND"]  # a function object of our own, for MXNet leaves the types of its arguments open
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
# NDArray::Reorder2DefaultAsync() const, by which MXNDArrayGetData begins before it waits; no oneDNN, no such function
_reorder = getattr(_LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)
if _reorder is not None:
    _reorder.argtypes, _reorder.restype = (ctypes.c_void_p,), None
_construct, _destroy = _LIB["_ZNSt13runtime_errorC1EPKc"], _LIB["_ZNSt13runtime_errorD1Ev"]
_construct.argtypes, _construct.restype = (ctypes.c_void_p, ctypes.c_char_p), None
_destroy.argtypes, _destroy.restype = (ctypes.c_void_p,), None


class Pushed:
    """An operation of MXNet's engine: ``begin`` is called on a thread of the engine's when the arrays stand.

    ``begin`` must not wait. What follows in the engine goes on when ``end`` is called, once, by any thread.
    ``skip`` is called instead of ``begin`` where an array could not be computed. May be pushed again, from any
    thread; the engine runs those that write the same arrays one after the other.
    """

    __slots__ = ("_arguments", "_arrays", "_error", "_on_complete", "_traffic", "begin", "skip")

    def __init__(
        self,
        reads: Sequence[Any],
        writes: Sequence[Any],
        begin: Callable[[], None],
        skip: Callable[[], None] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._arrays = (*reads, *writes)  # their handles must live until the engine calls back
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
        """Behind everything that the caller has asked MXNet for. ``priority``: the engine's, higher first.

        Raises what became of the operation where MXNet computes at once, for it returns only when it is over.
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
        """The arrays are this operation's alone."""
        self._on_complete = on_complete
        if self._traffic is not None:
            self._traffic.called_back()
        try:
            self.begin()
        except BaseException as error:
            self.end(error)

    def skipped(self) -> None:
        """The engine has dropped it."""
        if self._traffic is not None:
            self._traffic.skipped()
        if self.skip is not None:
            self.skip()

    def end(self, error: BaseException | None = None) -> None:
        """The arrays are MXNet's again; who waits for one of those written gets ``error``. Later calls do nothing."""
        if not self._on_complete:
            return
        (address, engine, argument), self._on_complete = self._on_complete, ()
        function = _functions.get(address)
        if function is None:
            function = _functions[address] = _CALLBACK(address)
        if error is None:
            function(engine, argument, None)
        elif is_naive():  # which would lose the error
            self._error = error
            function(engine, argument, None)
        else:
            thrown = (ctypes.c_char * 64)()  # a std::runtime_error, of which MXNet makes a copy
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
    """MXNet forgets the operation: the one notice of those that it has not run."""
    if key not in _pushed:
        return
    _entered.add(key)
    try:
        _pushed.pop(key).skipped()
    finally:
        _entered.discard(key)


@atexit.register
def _end() -> None:
    """The interpreter ends: nothing of MXNet's may call back later, for that would abort the process.

    Runs after the job's shutdown and before MXNet's. What the engine has not begun is dropped, as it would be anyway.
    """
    if not _pushed or is_initialized():
        return
    _LIB.MXNotifyShutdown()
    until_s = time.monotonic() + _END_S
    while (_pushed or _entered) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)


_callback = ctypes.cast(_keep_callback := _CALLBACK(_call_back), ctypes.c_void_p)
_deleter = ctypes.cast(_keep_deleter := _DELETER(_delete), ctypes.c_void_p)


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays))


def _remembered(error: BaseException) -> bytes:
    """The message by which ``_recalled`` finds the error itself, when MXNet has carried it to whoever waits."""
    number = next(_keys)
    while len(_raised) >= _KNOWN_ERRORS:
        _raised.pop(next(iter(_raised)), None)
    _raised[number] = error
    line = str(error).partition("\n")[0]  # MXNet would take what follows for a stack trace
    return f"ddl_mxnet: {number} {type(error).__name__}: {line}".encode()


def _recalled(message: str) -> BaseException:
    words = message.split(maxsplit=2)
    error = _raised.get(int(words[1])) if len(words) > 1 and words[1].isdecimal() else None
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
        dtype, shape = dtype_of(tensor, anywhere=True), tuple(tensor.shape)
        return Buffer(0, count_of(shape), dtype, shape, None, CPU, tensor)


class EngineOperations(Operations):
    """The verbs over arrays that MXNet may still be computing. No call waits for them; a handle does, for all."""

    def __init__(self) -> None:
        super().__init__(_Promised())
        self.priority = 0

    def at(self, priority: int) -> EngineOperations:
        """The same, pushed with that priority of the engine's."""
        if priority == 0:
            return self
        other = copy(self)
        other.priority = priority
        return other

    def hand_over(self, job: Any, handle: Any, entries: Sequence[Any], waits: bool) -> None:
        traffic = job.companions.get(Traffic)
        if job.closed:
            raise NotInitialized("ddl has been shut down; call init() again first")
        places = [entry.target.owner for entry in entries if entry.target is not None]
        if len({id(array) for array in places}) < len(places):
            raise InvalidArgument("an array stands twice in one call that writes in place; pass each array once")
        job.tensor_queue.name(entries)  # now, for what is submitted later comes in another order
        landing = [place for entry in entries for place in _brought_to_host(entry)]
        sources = [entry.source.owner for entry in entries]
        for entry in entries:
            _put_in_order(entry)
        writes = [entry.target.owner for entry in entries if entry.target is not None]
        written = {array.handle.value for array in writes}
        reads = [array for array in sources if array.handle.value not in written]
        place = traffic.queue((entries[0].set_id, entries[0].name))

        def submit() -> None:
            try:
                for entry in entries:
                    for buffer in (entry.source, entry.target):
                        if buffer is not None and buffer.owner is not None:
                            buffer.address = _located(buffer.owner)
                job.submit(entries)
            except BaseException as error:
                handle.refuse(error)  # which ends the operation, too
            finally:
                traffic.submitted(place)

        def end() -> None:
            handle.poll()  # what comes after has seen its end
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
        for here, there in landing:  # the engine waits for the operation first
            here.copyto(there)


def _brought_to_host(entry: Any) -> list[tuple[Any, Any]]:
    """Puts host memory in the place of a GPU's; (here, there) of what is to be copied back."""
    source, target = entry.source, entry.target
    if not is_on_gpu(source.owner):
        return []
    if is_naive():
        raise InvalidArgument(
            "MXNET_ENGINE_TYPE=NaiveEngine serves arrays of the CPU only; pass array.as_in_context(mx.cpu())"
        )
    entry.source = replace(source, owner=on_host(source.owner))
    if target is None:
        return []
    there = target.owner
    if target is source:
        entry.target = entry.source
    else:
        entry.target = replace(target, owner=MxnetAdapter().allocate(entry.source.owner))
    return [(entry.target.owner, there)]


def _put_in_order(entry: Any) -> None:
    """Has the engine give the array MXNet's usual layout, behind what it is computing: oneDNN may have it in one of its own.

    Whether it has cannot be looked at here: MXNet makes memory for an array when that is computed or first looked
    at, and two threads that do so at once get two memories.
    """
    array = entry.source.owner
    if _reorder is not None and entry.spec.dtype in _ONEDNN and len(array.shape) > 1:
        _reorder(array.handle)


def _located(array: Any) -> int:
    """Where the array is, on a thread of the engine."""
    address = address_of(array.handle)
    if address is None:
        raise InvalidArgument(
            f"an array of shape {tuple(array.shape)} is in a layout of oneDNN's own; call array.wait_to_read() before "
            "this call, or set MXNET_MKLDNN_ENABLED=0"
        )
    return address
