"""Copies the variables of one rank to all ranks: eagerly, in a graph, or when a session begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ddl_tf.adapter import brought
from ddl_tf.autograd import ADAPTER, OPERATIONS, running
from ddl_tf.devices import check_device, tell_of_graphs
from ddl_tf.errors import translating
from ddl_tf.graph import asynchronous, wire_name
from ddl_tf.reducer import verbatim
from ddlcore.api import ProcessSet, current_job, global_process_set
from ddlcore.api.world import elastic_member
from ddlcore.errors import InvalidArgument, MismatchError

NO_EAGER = (
    "broadcast_global_variables() does not support eager execution, where there are no global variables; "
    "use broadcast_variables(<model/optimizer variables>)"
)


@verbatim
@translating
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assign to every variable the value that it has on ``root_rank``. In a graph, return an operation that does this.

    Every member of the process set must call this function with the same number of variables, of the same types and
    shapes. If the variables differ, all members raise MismatchError (in eager mode), and no variable has changed.
    Variables of TensorFlow and of Keras are accepted. ``inplace`` is accepted for compatibility with Horovod and has no
    effect. Raises ValueError for a variable that is not built yet.
    """
    return _broadcast("Variables", None, list(variables), root_rank, process_set)


@verbatim
@translating
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Assign to every variable the value that it has on ``root_rank``, and return the variables.

    In a graph, return tensors that have the values of the variables after the broadcast.
    """
    variables = list(variables)
    assigned = _broadcast("InPlace", name, variables, root_rank, process_set)
    if tf.executing_eagerly() or assigned is None:
        return variables
    with tf.control_dependencies([assigned]):
        return [tf.identity(_inner(variable, i)) for i, variable in enumerate(variables)]


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that assigns the root's values to all global variables of the current graph.

    Run the operation after the variables are initialized. Raises RuntimeError in eager mode, where there are no global
    variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(NO_EAGER)
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow has no types
    """A session hook that gives all ranks the root's global variables when a session begins.

    The broadcast happens whether the variables were initialized or restored. Use this hook on every rank, for
    MonitoredTrainingSession and Estimator. ``device`` is '' or a name of the host's CPU, such as '/cpu:0'.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        check_device(device, "device")
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the broadcast operation to the graph. TensorFlow finalizes the graph after this call."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast operation in the new session."""
        session.run(self.bcast_op)


def _broadcast(verb: str, name: str | None, variables: list[Any], root_rank: int, process_set: ProcessSet) -> Any:
    job = current_job()
    members = process_set.resolve(job)[1]
    if root_rank not in members:
        raise InvalidArgument(f"broadcast: root_rank={root_rank} is not a member of {process_set}")
    inner = [_inner(variable, i) for i, variable in enumerate(variables)]
    eager = tf.executing_eagerly()
    if len(members) == 1 and (eager or elastic_member() is None):  # an elastic graph may run in a larger world
        return None if eager else tf.group()
    # Several calls in one graph may run at once, so each needs a name of its own. Eager calls run one after the other.
    label = (name or verb) if eager else wire_name(verb, name)
    values = [tf.convert_to_tensor(variable) for variable in inner]
    signs = [(value.dtype.name, str(value.shape)) for value in values]

    def run(*tensors: Any) -> list[Any]:
        world = running(job)
        everyones = OPERATIONS.allgather_object(signs, f"variable.{label}.signs", process_set, world)
        _check_alike(everyones, process_set.resolve(world)[1])
        handles = [
            OPERATIONS.broadcast_async(
                tensor, root_rank, name=f"variable.{label}.{i}", process_set=process_set, job=world
            )
            for i, tensor in enumerate(tensors[: len(signs)])
        ]
        return [handle.wait() for handle in handles]

    if eager:
        received = run(*(brought(ADAPTER, job, [value])[0] for value in values))
    elif not values:
        return tf.group()
    else:
        tell_of_graphs("variables that are broadcast")
        received = asynchronous(run, values, [v.dtype for v in values], [v.shape for v in values], "DdlBroadcast")
    done = [tf.compat.v1.assign(to, value) for to, value in zip(inner, received, strict=True)]
    return None if eager else tf.group(*done)


def _inner(variable: Any, index: int) -> Any:
    """Return the TensorFlow variable inside the Keras variable ``variable``, or a TensorFlow variable itself.

    Error messages contain ``index`` as the number of ``variable``. Raises ValueError if ``variable`` is not built yet
    or is not a variable.
    """
    if hasattr(variable, "_value") and hasattr(variable, "path"):
        if variable._value is None:
            raise InvalidArgument(
                f"variable {index} ({variable.path!r}) is not built yet; call the model on a batch first"
            )
        return variable._value
    if not hasattr(variable, "assign"):
        raise InvalidArgument(f"variable {index} is a {type(variable).__name__}; pass tf.Variable objects")
    return variable


def _check_alike(everyones: Sequence[Any], members: Sequence[int]) -> None:
    """Raise MismatchError if the variables of the members differ in number, type or shape.

    ``everyones`` has the types and shapes of each member's variables. It is equal on all members, so all of them find
    the same difference. ``members`` are the ranks of the process set.
    """
    for rank, signs in zip(members, everyones, strict=True):
        if len(signs) != len(everyones[0]):
            raise MismatchError(
                f"broadcast: rank {members[0]} has {len(everyones[0])} variables, rank {rank} has {len(signs)}; "
                "is the model, or its optimizer, not built yet on one of them? Call it on a batch first"
            )
        for i, (sign, first) in enumerate(zip(signs, everyones[0], strict=True)):
            if sign != first:
                what = f"{' '.join(first)} on rank {members[0]}, {' '.join(sign)} on rank {rank}"
                raise MismatchError(f"broadcast: variable {i} is {what}; give all ranks the same model")
