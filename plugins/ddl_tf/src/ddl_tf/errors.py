"""Derives ddl's errors also from TensorFlow's error classes, so that scripts may catch either class.

=========================================  =======================================
ValueError: an argument is wrong           tf.errors.InvalidArgumentError
NotInitialized, MismatchError              tf.errors.FailedPreconditionError
Closed: this rank has shut down            tf.errors.AbortedError
DeadlineExceeded                           tf.errors.DeadlineExceededError
PeerLost and all other errors of a job     tf.errors.UnknownError
=========================================  =======================================

This table holds in eager mode. An error inside a graph reaches its caller in the form that TensorFlow gives it: the
text contains our message, and the class is InvalidArgumentError for a wrong argument and UnknownError otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from ddlcore.errors import Closed, DdlInternalError, DeadlineExceeded, MismatchError, NotInitialized

P = ParamSpec("P")
R = TypeVar("R")

_CLASSES: tuple[tuple[type[Exception], Any], ...] = (  # the first match is used
    (NotInitialized, tf.errors.FailedPreconditionError),
    (MismatchError, tf.errors.FailedPreconditionError),
    (Closed, tf.errors.AbortedError),
    (DeadlineExceeded, tf.errors.DeadlineExceededError),
    (DdlInternalError, tf.errors.UnknownError),
    (ValueError, tf.errors.InvalidArgumentError),
)


def translated(error: Exception) -> Exception:
    """Return an error that is an instance of both the class of ``error`` and the matching TensorFlow class.

    If there is no matching TensorFlow class, ``error`` itself is returned. Pickling and unpickling the result gives
    ``error``.
    """
    ours: Any = type(error)
    base: Any = next((theirs for kind, theirs in _CLASSES if isinstance(error, kind)), None)
    if base is None or issubclass(ours, tf.errors.OpError):
        return error
    both = _both(ours, base)
    made: Exception = both(*error.args)
    made.__dict__.update(error.__dict__)
    # These are the attributes that OpError's __init__ sets. It is not called, because our errors take other arguments.
    made.__dict__.update(
        _node_def=None, _op=None, _message=str(error), _error_code=_code(base), _experimental_payloads={}, _first=error
    )
    return made


def _code(base: Any) -> int:
    code: int = base(None, None, "").error_code
    return code


@cache
def _both(ours: Any, theirs: Any) -> Any:
    parts = {
        "__module__": ours.__module__,
        "__str__": ours.__str__,
        "__reduce__": _reduce,
        "__init__": Exception.__init__,
    }
    return type(ours.__name__, (ours, theirs), parts)


def _again(first: Exception) -> Exception:
    return first


def _reduce(error: Exception) -> tuple[Callable[[Exception], Exception], tuple[Exception]]:
    return _again, (error.__dict__["_first"],)


def translating(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that its errors are also instances of TensorFlow's error classes."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ValueError, DdlInternalError) as error:
            raise translated(error).with_traceback(error.__traceback__) from error.__cause__

    return called
