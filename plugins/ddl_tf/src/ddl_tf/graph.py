"""Puts a Python function into a graph in a way that lets it block: it occupies none of TensorFlow's inter-op threads.

A function that waits inside ``tf.py_function`` occupies one of those threads. There may be only one such thread. Then
two ranks whose executors start independent collectives in different orders would wait for each other forever. Therefore
the function is mapped over a data set of one element: ``DatasetToSingleElement`` of ``MapDataset`` of
``TensorDataset``. That operation is asynchronous and runs the mapped function in threads of its own. It works the same
way in ``tf.function`` and in the graphs of sessions, in loops and branches. Arrays are passed in and out without a
copy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.framework.auto_control_deps_utils import COLLECTIVE_MANAGER_IDS
from tensorflow.python.ops import control_flow_util

from ddl_tf.devices import HOST
from ddlcore.errors import InvalidArgument

IN_ORDER = 0x64646C  # the number attached to calls that must run in order
Function = Callable[..., Sequence[Any]]  # arrays in, arrays out


class _Notes:
    """The records of this module about one graph while it is built."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.kept: list[Any] = []  # concrete functions that the graph calls
        self.begun: list[Any] = []  # operations traced since ``last``
        self.last: Any = None  # the last ordered operation
        self.in_order = False  # whether calls of this graph's function run in the order of tracing


def _notes(graph: Any) -> _Notes:
    notes: _Notes | None = getattr(graph, "_ddl_notes", None)  # in the graph, because our own table would outlive it
    if notes is None:
        notes = graph._ddl_notes = _Notes()
    return notes


def keep(thing: Any) -> None:
    """Keep ``thing`` alive as long as the current graph, or a function that contains it, exists.

    It is not enough that a Python function refers to ``thing``: TensorFlow never releases Python functions that are
    used in a ``tf.function``.
    """
    graph = tf.compat.v1.get_default_graph()
    _notes(graph).kept.append(thing)
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
        _notes(graph).kept.append(thing)


def wire_name(verb: str, name: str | None) -> str:
    """Return the name of an operation in messages: the same on every rank that builds the same graph.

    A given name is used as it is; from its second use in the graph on, a number is added. Operations without a name are
    numbered within their function. The names of tensors are unsuitable, because their numbers may differ between ranks,
    for example if only one rank prints or writes summaries.
    """
    graph = tf.compat.v1.get_default_graph()
    if name is None:
        around = []
        within = graph
        while within is not None:
            around.append(re.sub(r"_\d+$", "", getattr(within, "name", "")))  # such numbers differ between ranks
            within = getattr(within, "outer_graph", None)
        name = "/".join([*(part for part in reversed(around) if part), f"Ddl{verb}"])
    names = _notes(graph).names
    names[name] += 1
    return name if names[name] == 1 else f"{name}_{names[name] - 1}"


def after(tensors: Iterable[Any]) -> AbstractContextManager[object]:
    """Return a context in which a graph gets only operations that run when all of ``tensors`` have been computed.

    An optimizer needs it: what it adds without using a gradient (a counter, weight decay) would otherwise run although
    the reduction fails, and a failed step must change nothing. Tensors may be None; eagerly the context does nothing.
    """
    if tf.executing_eagerly():
        return nullcontext()
    there = [one.values if isinstance(one, tf.IndexedSlices) else one for one in tensors if one is not None]
    # One operation waits for all tensors, and all others for this one. If each operation waited for each tensor, hundreds
    # of gradients would make tens of thousands of edges, and following these took milliseconds in each step.
    context: AbstractContextManager[object] = tf.control_dependencies([tf.group(*there)])
    return context


def delay_writes(tensors: Iterable[Any], variables: Iterable[Any]) -> None:
    """Let writes to ``variables`` that the current ``tf.function`` gets from now on run only after ``tensors``.

    For code that cannot be called within ``after``. TensorFlow runs a write of a variable after all reads that were
    traced before it, so a read that waits for the tensors is enough.
    """
    if not tf.executing_eagerly() and tf.compat.v1.executing_eagerly_outside_functions():
        with after(tensors):
            for variable in variables:
                variable.read_value()


def asynchronous(
    function: Function, inputs: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any], label: str
) -> list[Any]:
    """Return the outputs of ``function``, which the current graph runs when its inputs are ready; it may block.

    The function gets numpy arrays, which it must not change. It returns a sequence of arrays of the types ``dtypes``;
    no array may share memory with another one or with an input, because TensorFlow may reuse the memory. ``shapes`` are
    the shapes of the outputs, as far as they are known. In a ``tf.function`` the function runs even if its outputs are
    not used, as it would eagerly, and in no particular order with other operations; use ``ordered`` if the order
    matters. ``label`` is the name in messages to the user.
    """
    graph = tf.compat.v1.get_default_graph()
    notes = _notes(graph)
    after = [] if notes.last is None else [notes.last]
    outputs = _built(function, inputs, dtypes, label, after)
    notes.begun.append(outputs[0].op)
    for output, shape in zip(outputs, shapes):
        output.set_shape(shape)
    return outputs


def ordered(function: Function, inputs: Sequence[Any], dtypes: Sequence[Any], label: str) -> list[Any]:
    """Do the same as ``asynchronous`` for scalar outputs, but run the function in the order of tracing.

    In a ``tf.function``, it runs after all operations of this module that were traced before it, and before all that
    are traced after it. In the graph of a session, the user defines the order with ``tf.control_dependencies``.
    """
    graph = tf.compat.v1.get_default_graph()
    notes = _notes(graph)
    in_function = graph.building_function
    before = [*notes.begun, *([] if notes.last is None else [notes.last])] if in_function else []
    outputs = _built(function, inputs, dtypes, label, before)
    if in_function:
        notes.begun, notes.last = [], outputs[0].op
    for output in outputs:
        output.set_shape([])
    return outputs


def refuse_xla(label: str) -> None:
    """Raise ValueError if XLA is to compile the current graph: compiled code cannot communicate with other ranks.

    ``label`` names the operation in the message.
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise InvalidArgument(
            f"{label} cannot be compiled: no communication inside a function with jit_compile=True; "
            "leave jit_compile away there, or set it on the parts that do not communicate"
        )


def _built(
    function: Function, inputs: Sequence[Any], dtypes: Sequence[Any], label: str, after: Sequence[Any]
) -> list[Any]:
    graph = tf.compat.v1.get_default_graph()
    refuse_xla(label)
    inputs = list(inputs) or [tf.constant(0)]
    count = len(inputs)
    free = Lock()

    def run(*arrays: Any) -> list[Any]:
        if not free.acquire(blocking=False):  # ranks may start the two runs in different orders
            raise InvalidArgument(
                f"{label} has begun again before it ended; give its tf.while_loop parallel_iterations=1, "
                "and let one thread at a time run the graph"
            )
        try:
            return list(function(*(np.asarray(array) for array in arrays)))
        finally:
            free.release()

    run.__name__ = re.sub(r"\W", "_", label)
    traced = tf.function(lambda *tensors: tf.numpy_function(run, tensors[:count], list(dtypes)), autograph=False)
    with tf.device(HOST), tf.control_dependencies(after):
        concrete = traced.get_concrete_function(*(tf.TensorSpec(None, tensor.dtype) for tensor in inputs))
        unknown = [tf.TensorShape(None)] * len(dtypes)
        source = tf.raw_ops.TensorDataset(
            components=inputs, output_shapes=[tensor.shape for tensor in inputs], name=f"{label}/inputs"
        )
        mapped = tf.raw_ops.MapDataset(
            input_dataset=source,
            other_arguments=[],
            f=concrete,
            output_types=list(dtypes),
            output_shapes=unknown,
            use_inter_op_parallelism=False,  # run in the asynchronous operation's thread, not in the executor's
            name=f"{label}/run",
        )
        outputs = list(
            tf.raw_ops.DatasetToSingleElement(
                dataset=mapped, output_types=list(dtypes), output_shapes=unknown, name=label
            )
        )
    _notes(graph).kept.append(concrete)
    _call_in_order(graph)
    # Otherwise TensorFlow would run such operations of a tf.function one after the other, and start none before the
    # previous one has returned: two ranks that trace in different orders would then wait for each other.
    independent = getattr(getattr(graph, "experimental_acd_manager", None), "run_independently", None)
    if independent is not None:
        independent(source.op)
        independent(outputs[0].op)
    return outputs


def _call_in_order(graph: Any) -> None:
    """Make TensorFlow run the calls of functions that communicate one after the other, wherever they are in a graph.

    TensorFlow orders only calls that write the same variables. Other calls, of one function or of two similar
    functions, would run at the same time with the same names, and the ranks might start them in different orders.
    However, TensorFlow does order calls of functions that contain collectives, which it recognizes by a number attached
    to an operation. So this function adds to ``graph``, and to the graphs around it, an empty call with such a number.
    """
    while getattr(graph, "experimental_acd_manager", None) is not None:
        notes = _notes(graph)
        if not notes.in_order:
            notes.in_order = True
            with graph.as_default(), tf.control_dependencies(None):
                nothing = tf.function(lambda: None, autograph=False).get_concrete_function()
                call = tf.raw_ops.StatefulPartitionedCall(args=[], Tout=[], f=nothing, name="DdlInOrder")
            ops.set_int_list_attr(call, COLLECTIVE_MANAGER_IDS, [IN_ORDER])
            notes.kept.append(nothing)
        graph = graph.outer_graph  # the enclosing function does not see the calls inside a branch or a loop
