"""Passes TensorFlow's variables to the check that compares them between ranks, before each step except the first.

The check runs when the results of a step's gradients arrive, before the results update any variable. At that moment,
the variables have the values that the previous step has left. This also works in a ``tf.function``, although no Python
code can run between its operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ddlcore.api import ProcessSet, Replica, Verifier, array_replica, global_process_set, named, verify_replicas
from ddlcore.contracts import JobService
from ddlcore.errors import InvalidArgument

KNOWN_LIMIT = 64  # lists of variables kept for one reducer
UNSENT = (
    "before the first step, or right after it, call ddl.broadcast_variables(model.variables, root_rank=0), or give "
    "model.fit the callback BroadcastGlobalVariablesCallback(0). Where the ranks are to differ: verify_first_step=0 "
    "(--no-verify-first-step)"
)


def verify(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Check that every member of ``process_set`` has the same variables, to the last bit.

    Every member must call this function, in eager mode. ``model`` may be a Keras model, a Keras layer or a
    ``tf.Module``. Its trainable variables are compared, and its other variables are not, because they are local to a
    rank (such as the moving statistics of BatchNormalization). ``model`` may also be a list or dict of variables,
    tensors or arrays. Raises ReplicasDiffer on every member if a variable differs, or if the ranks do not have the same
    variables. Raises ValueError in a graph, and if ``model`` contains anything else.
    """
    if not tf.executing_eagerly():
        raise InvalidArgument("verify() compares values, which a graph does not have; call it outside of tf.function")
    given = getattr(model, "trainable_variables", None)
    pairs = _named(list(model) if given is None and not isinstance(model, Mapping) else given or model)
    verify_replicas([array_replica(name, _value(name, value)) for name, value in pairs], process_set)


def _named(values: Any) -> list[tuple[str, Any]]:
    """Return (name, variable) pairs. A name contains the variable's position and the variable's own name.

    The positions are needed because Keras puts numbers into names, and these numbers differ if one rank has built more
    models.
    """
    return [
        (f"{name}: {_called(value)}" if name.startswith("number ") and _called(value) else name, value)
        for name, value in named(values)
    ]


def _called(variable: Any) -> str:
    """Return the name of ``variable`` within its layer, or '' if the variable has no name."""
    path = str(getattr(variable, "path", "") or getattr(variable, "name", "") or "")
    return path.rpartition("/")[2].partition(":")[0]


def _value(name: str, value: Any) -> Any:
    try:
        return _inner(value).numpy() if hasattr(_inner(value), "numpy") else tf.convert_to_tensor(value).numpy()
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"verify: {name} is no variable and no tensor with values: {error}") from None


def _inner(variable: Any) -> Any:
    """Return the TensorFlow variable inside a Keras 3 variable. Return any other ``variable`` itself."""
    inner = getattr(variable, "_value", None)  # its ``value`` may be a copy of another type
    return inner if isinstance(inner, tf.Variable) else variable


class Checks:
    """The checks of one reducer: one check for each list of variables whose gradients it reduces.

    ``name`` is the name of the reducer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[tuple[int, ...], Callable[[JobService], None] | None] = {}

    def of(self, variables: Sequence[Any], set_id: int) -> Callable[[JobService], None] | None:
        """Return the function to call before each update of ``variables``, or None if their values cannot be read.

        ``set_id`` is the id of the process set.
        """
        key = tuple(map(id, variables))  # a cheap key, because every eager step calls this
        if key not in self._known:
            if len(self._known) >= KNOWN_LIMIT:
                self._known.clear()
            self._known[key] = self._made([_inner(one) for one in variables if hasattr(one, "assign")], set_id)
        return self._known[key]

    def _made(self, variables: Sequence[Any], set_id: int) -> Callable[[JobService], None] | None:
        with tf.init_scope():
            eager = tf.executing_eagerly()
        if not eager or not variables or any("GPU" in str(getattr(one, "device", "")).upper() for one in variables):
            return None  # no other thread may wait for a GPU, and only a session has its values
        names = [f"{place}: {_called(one)}" for place, one in enumerate(variables)]
        return _Check(self._name, names, variables, set_id)


class _Check:
    """A check of some variables, called before each step.

    The job keeps the check alive, so the check has only weak references to the variables.
    """

    def __init__(self, name: str, names: Iterable[str], variables: Iterable[Any], set_id: int) -> None:
        self._set_id = set_id
        self._variables = [(name, weakref.ref(variable)) for name, variable in zip(names, variables, strict=True)]
        self._verifier = Verifier(name, self._replicas, advice=UNSENT)
        self._job: JobService | None = None

    def __call__(self, job: JobService) -> None:
        if self._job is not job:  # no step has been made in this job yet
            self._job = job
            return
        self._verifier.stepped(job, self._set_id)

    def _replicas(self) -> list[Replica]:
        there = [(name, ref()) for name, ref in self._variables]
        if not tf.executing_eagerly() or any(variable is None for _, variable in there):
            return []
        return [array_replica(name, variable.numpy()) for name, variable in there if variable is not None]
