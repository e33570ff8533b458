"""Puts a Python function into a graph so that the function may block without occupying TensorFlow's inter-op threads.

A function that waits inside ``tf.py_function`` occupies one of those threads, and there may be only one of them. Then
two ranks whose executors start independent collectives in different orders would wait for each other forever. Therefore
this module maps the function over a data set of one element: ``DatasetToSingleElement`` of ``MapDataset`` of
``TensorDataset``. ``DatasetToSingleElement`` is asynchronous and runs the mapped function in threads of its own. It
works the same way in ``tf.function``, in the graphs of sessions, in loops and in branches. Arrays are passed in and out
without a copy.
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
    """The records that this module keeps about one graph while the graph is built."""

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
    """Keep ``thing`` alive as long as the current graph, or a function that contains this graph, exists.

    A reference from a Python function is not the right way: TensorFlow never releases Python functions that are used in
    a ``tf.function``, so ``thing`` would never be released either.
    """
    graph = tf.compat.v1.get_default_graph()
    _notes(graph).kept.append(thing)
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
        _notes(graph).kept.append(thing)


def wire_name(verb: str, name: str | None) -> str:
    """Return the name of an operation in messages. The name is the same on every rank that builds the same graph.

    If ``name`` is given, it is used unchanged the first time in a graph; each later use in the graph gets a number.
    Operations without a name are numbered within their function. The names of TensorFlow's tensors are unsuitable,
    because their numbers may differ between ranks, for example if only one rank prints or writes summaries.
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
    """Return a context manager: operations added to a graph inside it run only after ``tensors`` are computed.

    An optimizer needs this context, because a failed step must change nothing. An optimizer also adds operations that
    use no gradient (a counter, weight decay). Without the context, such operations would run even if the reduction
    fails. Items of ``tensors`` may be None. In eager mode the context does nothing.
    """
    if tf.executing_eagerly():
        return nullcontext()
    there = [one.values if isinstance(one, tf.IndexedSlices) else one for one in tensors if one is not None]
    # One operation waits for all tensors, and all others for this one. If each operation waited for each tensor, hundreds
    # of gradients would make tens of thousands of edges, and following these took milliseconds in each step.
    context: AbstractContextManager[object] = tf.control_dependencies([tf.group(*there)])
    return context


def delay_writes(tensors: Iterable[Any], variables: Iterable[Any]) -> None:
    """Make later writes to ``variables`` in the current ``tf.function`` run only after ``tensors`` have been computed.

    This function is for code that cannot be called inside ``after``. TensorFlow runs a write to a variable after all
    reads that were traced before the write. So this function adds a read that waits for ``tensors``.
    """
    if not tf.executing_eagerly() and tf.compat.v1.executing_eagerly_outside_functions():
        with after(tensors):
            for variable in variables:
                variable.read_value()


def asynchronous(
    function: Function, inputs: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any], label: str
) -> list[Any]:
    """Add a call of ``function`` to the current graph, and return the outputs of the call.

    The graph makes the call when ``inputs`` are ready. ``function`` may block. Its arguments are NumPy arrays, which it
    must not change. It returns a sequence of arrays of the types ``dtypes``. No returned array may share memory with
    another array or with an input, because TensorFlow may reuse the memory. ``shapes`` are the shapes of the outputs,
    as far as they are known. In a ``tf.function``, ``function`` runs even if its outputs are not used, as in eager
    mode, and in no particular order with other operations; use ``ordered`` if the order matters. ``label`` is the
    operation's name in messages to the user.
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
    """Do the same as ``asynchronous`` (add a call of ``function``), but make the calls in the order of tracing.

    All outputs must be scalars. In a ``tf.function``, ``function`` runs after all operations of this module that were
    traced earlier, and before all that are traced later. In the graph of a session, the user defines the order with
    ``tf.control_dependencies``.
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
    """Make TensorFlow run the calls of functions that communicate one after another, wherever they are in ``graph``.

    TensorFlow orders only calls that write the same variables. Other calls, of one function or of two similar
    functions, would run at the same time. Their collectives would have the same names, and the ranks might start them
    in different orders. However, TensorFlow does order calls of functions that contain collectives. TensorFlow
    recognizes such a function by a number attached to an operation. So this function adds an empty call with such a
    number to ``graph`` and to the graphs around it.
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
