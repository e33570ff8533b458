"""Puts a Python function into a graph such that it may block: it takes none of TensorFlow's inter-op threads.

A function that waits inside ``tf.py_function`` holds one of those threads. There may be only one, and two ranks
whose executors begin independent collectives in different orders would then wait for each other forever. So the
function stands in a data set of one element, ``DatasetToSingleElement`` of ``MapDataset`` of ``TensorDataset``:
that operation is asynchronous, brings threads of its own, and runs the mapped function in them. It works alike in
``tf.function`` and in the graphs of sessions, in loops and branches. Arrays come and go without a copy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.framework.auto_control_deps_utils import COLLECTIVE_MANAGER_IDS
from tensorflow.python.ops import control_flow_util

from ddl_tf.devices import HOST
from ddlcore.errors import InvalidArgument

__all__ = ["asynchronous", "keep", "ordered", "refuse_xla", "wire_name"]

IN_ORDER = 0x64646C  # the number on calls that are not to overtake one another
Function = Callable[..., Sequence[Any]]  # arrays in, arrays out


class _Notes:
    """What is remembered of one graph while it is built."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.kept: list[Any] = []  # concrete functions that the graph calls
        self.begun: list[Any] = []  # operations since the last one that came after all before it
        self.last: Any = None  # that one
        self.in_order = False  # whether calls of it are run in the order in which they were traced


def _notes(graph: Any) -> _Notes:
    notes: _Notes | None = getattr(graph, "_ddl_notes", None)  # there, for a table of ours would outlive the graph
    if notes is None:
        notes = graph._ddl_notes = _Notes()
    return notes


def keep(thing: Any) -> None:
    """Holds it as long as the present graph, or a function around it, is there.

    Python functions do not do so: TensorFlow never lets go of those that stand in a ``tf.function``.
    """
    graph = tf.compat.v1.get_default_graph()
    _notes(graph).kept.append(thing)
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
        _notes(graph).kept.append(thing)


def wire_name(verb: str, name: str | None) -> str:
    """What an operation of the present graph is called on the wire: the same on every rank that builds the same graph.

    A name that is given stands, with a number from its second use in the graph on. One without a name is counted
    within its function. The names of tensors would not do: they have other numbers on a rank that alone prints or
    writes summaries.
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


def asynchronous(
    function: Function, inputs: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any], label: str
) -> list[Any]:
    """The outputs of ``function`` in the present graph, which runs each time its inputs are ready, and may block.

    It gets numpy arrays that must not be written, and returns a sequence of arrays of ``dtypes``, none of which
    shares memory with another or with an input: TensorFlow may reuse it. ``shapes`` are what is known of theirs.
    In a ``tf.function`` it runs even where nobody asks for its outputs, as it would eagerly, and in no particular
    order with other operations; ``ordered`` changes that. ``label`` is for messages.
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
    """As ``asynchronous``, of scalars; in a ``tf.function``, after all that stands before it, and before what follows.

    In a session's graph the order is the user's to say, by ``tf.control_dependencies``.
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
    """Raises ValueError where the present graph is to be compiled as one, which cannot talk to other ranks."""
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
        if not free.acquire(blocking=False):  # which of the two comes first may differ between ranks
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
            use_inter_op_parallelism=False,  # in the asynchronous operation's thread, not in the executor's
            name=f"{label}/run",
        )
        outputs = list(
            tf.raw_ops.DatasetToSingleElement(
                dataset=mapped, output_types=list(dtypes), output_shapes=unknown, name=label
            )
        )
    _notes(graph).kept.append(concrete)
    _call_in_order(graph)
    # TensorFlow would run such operations of a tf.function one after another, each to its end.
    independent = getattr(getattr(graph, "experimental_acd_manager", None), "run_independently", None)
    if independent is not None:
        independent(source.op)
        independent(outputs[0].op)
    return outputs


def _call_in_order(graph: Any) -> None:
    """Lets the calls of a function that communicates follow one another wherever they stand in one graph.

    TensorFlow orders only calls that write the same variables. Others, of one function or of two that look alike, would
    be under way at once with the same names, and which is the first may differ between ranks. It does order calls
    of functions that hold collectives, by a number on them; so an empty call in this function has such a number.
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
        graph = graph.outer_graph  # a branch's or a loop's own calls do not tell the function around it
