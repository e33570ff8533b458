"""Records an operation with its own backward pass in MXNet's autograd.

This module replaces ``mx.autograd.Function``, which has three defects in MXNet 1.9.1. First, it leaves out gradients if
``grad_req`` is "add". Second, if an input needs no gradient, it leaves out the gradients of all inputs after this one.
Third, if the backward pass raises an error, MXNet's message does not name this error.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, MXCallbackList, NDArrayHandle, check_call

from ddl_mxnet.engine import Pushed

_BACKWARD = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_int,
    ctypes.c_void_p,
)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_PLAIN = ctypes.CFUNCTYPE(ctypes.c_int)
_WRITE, _IN_PLACE, _ADD = 1, 2, 3  # op_attr_types.h, OpReqType

_keys = itertools.count(1)
_recorded: dict[int, Any] = {}  # keeps callbacks alive until MXNet calls their ``delete``


class Function:
    """An operation that MXNet's autograd can differentiate. It consists of a forward and a backward function.

    ``forward(call, inputs)`` returns the outputs. ``backward(call, inputs, gradients, kept)`` returns the gradients of
    the inputs; ``gradients`` are those of the outputs. The ``inputs`` of ``backward`` have only the attribute
    ``shape``, and ``kept`` is the object that was passed to the constructor. ``backward`` runs on a thread of MXNet.
    """

    def __init__(
        self,
        forward: Callable[[Any, Sequence[Any]], list[Any]],
        backward: Callable[[Any, Sequence[Any], Sequence[Any], Any], list[Any]],
        kept: Any = None,
    ) -> None:
        self._forward = forward
        self._backward = backward
        self._kept = kept

    def apply(self, call: Any, inputs: Sequence[Any]) -> list[Any]:
        """Call ``forward(call, inputs)`` and return the outputs.

        If MXNet is recording operations for autograd, also record this operation, with ``backward`` as its backward
        pass.
        """
        recording = mx.autograd.is_recording()
        with mx.autograd.pause(train_mode=mx.autograd.is_training()):
            outputs = self._forward(call, inputs)
        if recording:
            self._record(call, inputs, outputs)
        return outputs

    def _record(self, call: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        key = next(_keys)
        shapes = [_Shape(tuple(array.shape)) for array in inputs]

        def backward(given: int, wanted: int, pointers: Any, requests: Any, _training: int, _state: Any) -> bool:
            arrays = [mx.nd.NDArray(ctypes.cast(one, NDArrayHandle)) for one in pointers[: given + wanted]]
            targets = arrays[given:]
            try:
                results = self._backward(call, shapes, arrays[:given], self._kept)
                for target, result, request in zip(targets, results, requests[:wanted]):
                    if request in (_WRITE, _IN_PLACE):
                        target[:] = result
                    elif request == _ADD:
                        target += result
            except BaseException as error:
                _spoil(targets, error)
            return True

        def delete(_state: Any, forget: Any = _recorded.pop) -> bool:  # a default, because at exit globals are cleared
            forget(key, None)
            return True

        callbacks = (_PLAIN * 2)(ctypes.cast(_BACKWARD(backward), _PLAIN), ctypes.cast(_DELETE(delete), _PLAIN))
        states = (ctypes.c_void_p * 2)()
        listed = MXCallbackList(
            2, ctypes.cast(callbacks, ctypes.POINTER(_PLAIN)), ctypes.cast(states, ctypes.POINTER(ctypes.c_void_p))
        )
        _recorded[key] = (listed, callbacks, states)
        check_call(
            _LIB.MXCustomFunctionRecord(
                len(inputs), _handles(inputs), len(outputs), _handles(outputs), ctypes.byref(listed)
            )
        )


class _Shape:
    """The shape of an input. The backward function needs only the shapes of the inputs, so no values are kept."""

    __slots__ = ("shape",)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _spoil(arrays: Sequence[Any], error: BaseException) -> None:
    """Make MXNet raise ``error`` in each thread that waits for an array of ``arrays``."""

    def begin() -> None:
        raise error

    Pushed((), arrays, begin).push()


def _handles(arrays: Sequence[Any]) -> Any:
    return (NDArrayHandle * len(arrays))(*(array.handle for array in arrays))
