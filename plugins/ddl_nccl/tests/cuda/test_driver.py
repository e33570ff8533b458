"""Tests of the calls to cuda-bindings and of the handling of their results; stand-ins answer the calls."""

from __future__ import annotations

import re
import sys
import threading
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from ddl_nccl.cuda.driver import Driver, failure
from ddl_nccl.cuda.runtime import CudaDevice

from ddlcore.contracts import pip_install
from ddlcore.errors import DeviceError
from ddlcore.types import Device

OURS, THEIRS = 0x10, 0x20


class Result(IntEnum):
    """A result code like that of cuda-bindings: a number with a name."""

    SUCCESS = 0
    FAILED = 999


class Bindings(SimpleNamespace):
    """Bindings with one thread's contexts, and copies that require the right one.

    ``bucket`` is the function that makes several copies at once.
    """

    def __init__(self, bucket: Any, contexts: list[int]) -> None:
        self.contexts, self.copied = contexts, list[tuple[int, ...]]()
        self.CUmemcpyAttributes = SimpleNamespace
        self.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
        self.CUdeviceptr = int
        self.cuMemcpyBatchAsync = bucket

    def cuCtxGetCurrent(self) -> tuple[Result, int]:
        return Result.SUCCESS, self.contexts[-1] if self.contexts else 0

    def cuCtxPushCurrent(self, context: int) -> tuple[Result]:
        self.contexts.append(context)
        return (Result.SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Result, int]:
        return Result.SUCCESS, self.contexts.pop()

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Result]:
        assert self.contexts[-1] == OURS
        self.copied.append((target, source, nbytes, stream))
        return (Result.SUCCESS if nbytes else Result.FAILED,)

    def cuGetErrorString(self, code: Result) -> tuple[Result, bytes]:
        return Result.SUCCESS, b"for a reason"


def driver(bindings: Bindings, version: tuple[int, int] = (13, 0)) -> Driver:
    made: Any = Driver()
    made._cu, made._context, made._version = bindings, OURS, version
    assert isinstance(made, Driver)
    return made


@pytest.mark.parametrize("contexts", [[], [THEIRS], [OURS]])
def test_the_threads_context_is_afterwards_as_it_was(contexts: list[int]) -> None:
    bindings = Bindings(None, list(contexts))
    driver(bindings).copy(1, 2, 3, 4)
    assert bindings.copied == [(1, 2, 3, 4)] and bindings.contexts == contexts
    with pytest.raises(DeviceError, match="copying 0 bytes failed with FAILED: for a reason"):
        driver(bindings).copy(1, 2, 0, 4)
    assert bindings.contexts == contexts


def test_several_copies_are_one_call() -> None:
    """Several copies are one call, whose arguments are the same in the bindings for CUDA 12 and 13.

    In the bindings for 12, a second result names the copy that failed.
    """
    asked: list[tuple[Any, ...]] = []

    def bucket(*arguments: Any) -> tuple[Result, int]:
        asked.append(arguments)
        return Result.SUCCESS, 0

    bindings = Bindings(bucket, [])
    driver(bindings).copy_many([1, 2], [3, 4], [5, 6], 7)
    ((targets, sources, sizes, count, attributes, of_which, kinds, stream),) = asked
    assert (targets, sources, sizes, count, of_which, kinds, stream) == ([1, 2], [3, 4], [5, 6], 2, [0], 1, 7)
    assert attributes[0].srcAccessOrder == 1 and not bindings.copied


def _refusing(*_: Any) -> tuple[Result]:
    return (Result.FAILED,)


def _other(one: int) -> tuple[Result]:
    raise AssertionError("it was called all the same")


@pytest.mark.parametrize(
    ("bucket", "version"), [(_refusing, (13, 0)), (_other, (13, 0)), (None, (13, 0)), (_other, (12, 7))]
)
def test_where_there_is_no_such_call_copies_go_one_by_one(bucket: Any, version: tuple[int, int]) -> None:
    bindings = Bindings(bucket, [])
    driver(bindings, version).copy_many([1, 2], [3, 4], [5, 6], 7)
    assert bindings.copied == [(1, 3, 5, 7), (2, 4, 6, 7)]


@pytest.mark.parametrize(
    ("code", "fix"),
    [(2, "DDL_FUSION_BYTES"), (100, "CUDA_VISIBLE_DEVICES"), (222, "update the driver"), (803, "reboot")],
)
def test_errors_say_what_to_do(code: int, fix: str) -> None:
    error = failure("allocating 5 bytes", code, "CUDA_ERROR", "why")
    assert str(error).startswith("CUDA: allocating 5 bytes failed with CUDA_ERROR: why; ")
    assert fix in str(error) and "\n" not in str(error)


def test_an_unknown_error_has_no_cure() -> None:
    assert str(failure("this", 12345)) == "CUDA: this failed with error 12345"


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuda-bindings there are no devices, and opening one raises an error of one line that says what to do."""
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert CudaDevice.count() == 0
    install = re.escape(pip_install("ddl-nccl[cu13]"))
    with pytest.raises(DeviceError, match=f"cuda-bindings is not installed; {install}"):
        CudaDevice(Driver()).open(Device("cuda", 0))


class Questions:
    """The part of cuda-bindings that a query of an event uses."""

    class CUresult:
        CUDA_ERROR_NOT_READY = 600

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # (thread, question)

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, 0

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        self.asked.append((threading.current_thread().name, f"mode {mode}"))
        return 0, 0

    def cuEventQuery(self, event: int) -> tuple[int]:
        self.asked.append((threading.current_thread().name, "event"))
        return (600,)


def test_a_capture_of_the_users_goes_on() -> None:
    """Before its first event query, a thread of ddl's sets its capture mode, so that a graph's capture goes on.

    A thread of the user's is left as it is.
    """
    driver, questions = Driver(), Questions()
    driver._cu = questions

    def ask() -> None:
        assert not driver.done(0xE1)
        assert not driver.done(0xE1)

    for name in ("ddl-engine-0", "trainer"):
        thread = threading.Thread(target=ask, name=name)
        thread.start()
        thread.join()
    asked = [("ddl-engine-0", what) for what in ("mode 1", "event", "event")]
    assert questions.asked == asked + [("trainer", "event")] * 2
