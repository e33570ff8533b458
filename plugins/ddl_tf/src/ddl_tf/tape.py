"""A gradient tape whose gradients are reduced over the ranks. The wrapped TensorFlow tape does the recording."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ddl_tf.errors import translating
from ddl_tf.local import LocalVariables, identity, variable_of
from ddl_tf.reducer import Reducer, verbatim
from ddl_tf.reduction import Groups, Reduction, summing
from ddlcore.api import ProcessSet, current_job, global_process_set, resolve_op
from ddlcore.contracts import JobService
from ddlcore.types import Average

REDUCERS_LIMIT = 64  # reducers kept for the same sources; they outlive the tapes, as each step makes a new tape


class ReducedTape(tf.GradientTape):  # type: ignore[misc]  # TensorFlow has no types
    """The tape that ``DistributedGradientTape`` returns. It records by the tape that it wraps."""

    def __init__(self, gradtape: Any, reduction: Reduction, local: LocalVariables, weight: Any) -> None:
        """Wrap ``gradtape``. ``local`` are the variables whose gradients ``reduction`` does not reduce.

        ``weight`` is what this rank's gradients count for.
        """
        if not isinstance(gradtape, tf.GradientTape):
            raise ValueError(f"DistributedGradientTape takes a tf.GradientTape, not {type(gradtape).__name__}")
        if isinstance(gradtape, ReducedTape):
            raise ValueError("this tape is a DistributedGradientTape already; wrap each tape once")
        self._gradtape = gradtape
        self._local = local
        current_job()
        self._reduction = summing(reduction, weight)
        self._weight = weight

    def __getattr__(self, name: str) -> Any:
        if name == "_gradtape":  # not set yet, because a copy is being made
            raise AttributeError(name)
        return getattr(self._gradtape, name)

    def __enter__(self) -> ReducedTape:
        self._gradtape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._gradtape.__exit__(*error)

    def watch(self, tensor: Any) -> None:
        """Call the same method of the wrapped tape."""
        self._gradtape.watch(tensor)

    def stop_recording(self) -> Any:
        """Call the same method of the wrapped tape, and return its result."""
        return self._gradtape.stop_recording()

    def reset(self) -> None:
        """Call the same method of the wrapped tape."""
        self._gradtape.reset()

    def watched_variables(self) -> Any:
        """Call the same method of the wrapped tape, and return its result."""
        return self._gradtape.watched_variables()

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Call the same method of the wrapped tape, and return its result. Nothing is reduced."""
        return self._gradtape.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Call the same method of the wrapped tape, and return its result. Nothing is reduced."""
        return self._gradtape.batch_jacobian(*args, **kwargs)

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of the variable ``source`` local to this rank.

        Call this method on every rank before ``gradient``.
        """
        self._local.register(source)

    @verbatim
    @translating
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the reduced gradients of ``target`` in the structure of ``sources``.

        The gradients of local sources are not reduced, only scaled. Every member must call this method with the same
        sources. ``use_generic_names`` is accepted for compatibility with Horovod and has no effect, because gradients
        are matched by their positions, never by their variables' names. Raises MismatchError if the ranks' gradients
        differ in type or shape, or if a gradient is None on some ranks only.
        """
        flat, gradients = self._own(target, sources, output_gradients, unconnected_gradients)
        return tf.nest.pack_sequence_as(sources, self._reduced(gradients, flat))

    @verbatim
    @translating
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return two lists of pairs of a source and its gradient: those of the local sources, and all others.

        The gradients are the same as those that ``gradient`` returns, and have the order of the sources.
        """
        flat, gradients = self._own(target, sources, output_gradients, unconnected_gradients)
        pairs = list(zip(flat, self._reduced(gradients, flat), strict=True))
        return [one for one in pairs if self._local.holds(one[0])], [
            one for one in pairs if not self._local.holds(one[0])
        ]

    def _own(self, target: Any, sources: Any, output_gradients: Any, unconnected: Any) -> tuple[list[Any], list[Any]]:
        flat = tf.nest.flatten(sources)
        gradients = self._gradtape.gradient(target, flat, output_gradients, unconnected_gradients=unconnected)
        return flat, gradients

    def _reduced(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        return self._local.reduce(partial(_reducer, self._reduction, self._weight), gradients, sources)


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    weight: Any = None,
) -> ReducedTape:
    """Return a tape that records like ``gradtape``, and whose ``gradient`` returns gradients reduced over ``process_set``.

    Every rank must wrap its tape, with the same arguments, after ``init()``. A tape may be wrapped before or after it
    has recorded. All other methods do the same as those of ``gradtape``.

    * ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, a compressor's name, or a class of your own. If it is
      None, the setting ``compression`` decides.
    * ``device_dense``, ``device_sparse``: '/cpu:0' stages the dense or the sparse gradients of a GPU on the host.
    * ``sparse_as_dense``: IndexedSlices are converted to dense tensors; otherwise they are gathered.
    * ``gradient_predivide_factor`` f: gradients are divided by f before the sum and by size / f after it.
    * ``groups`` (``num_groups``): the number of groups of gradients that are sent together, or a list of lists of
      variables.
    * ``scale_local_gradients``: the gradients of local sources (see ``register_local_source``) are divided by the
      number of ranks, as in an average.
    * ``weight``: what this rank's gradients count for in the average, which is then sum(weight * gradient) /
      sum(weight): a number, a tensor (such as that of this rank's tokens), a variable, a ``Share``, or a function that
      returns a number or a Share. In a graph, a number is a constant, and a function is called each time the graph runs.
      Gradients of weight 0 count nothing, even if they are NaN. If the weights of all ranks are 0, all of them raise
      InvalidArgument, or in a graph TensorFlow's InvalidArgumentError.

    Raises ValueError for invalid arguments, and NotInitialized before ``init()``.
    """
    reduction = Reduction(
        resolve_op(op),
        gradient_predivide_factor,
        compression,
        sparse_as_dense,
        device_dense,
        device_sparse,
        groups if groups is not None else num_groups or None,
        process_set,
    )
    return ReducedTape(gradtape, reduction, LocalVariables(scale_local_gradients), weight)


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> ReducedTape:
    """Do the same as ``DistributedGradientTape``, but keep the gradients of ``local_layers`` local to this rank.

    ``local_layers`` is a Keras layer, or several of them. For the other arguments, see ``DistributedGradientTape``.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    tape._local.register_layers(local_layers)
    return tape


class _Named:
    """The data that all tapes over the same list of sources share in one job.

    The data are the name of these tapes in messages, and a reducer for each set of options.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reducers: dict[Any, Reducer] = {}
        self.held: list[Any] = []  # weak references to the variables; their callbacks remove this from its table


class _Table:
    """The data that one job keeps for its tapes, by process set and list of sources. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Any, int] = {}  # number of lists of sources, by process set
        self._named: dict[Any, _Named] = {}

    def find(self, set_id: Any, sources: Sequence[Any]) -> _Named:
        """Return the data for the list ``sources`` in the process set ``set_id``.

        If there are no data yet, create them with the next number of the process set.
        """
        # A variable is identified by its object, because the variables of two models may have equal shapes. A watched
        # tensor is a new object in each step, so only its position in the list counts.
        tracked = [variable_of(source) for source in sources]
        key = (set_id, *(None if one is None else id(one) for one in tracked))
        found = self._named.get(key)
        if found is not None:
            return found
        with self._lock:
            found = self._named.get(key)
            if found is None:
                ordinal = self._counts[set_id] = self._counts.get(set_id, -1) + 1
                found = _Named(f"tape.{ordinal}")
                forget = partial(self._forget, weakref.ref(self), key)
                found.held = [weakref.ref(one, forget) for one in tracked if one is not None]
                self._named[key] = found
        return found

    @staticmethod
    def _forget(table: weakref.ref[_Table], key: Any, _: Any) -> None:
        """Remove the entry ``key``, because one of its variables no longer exists.

        Another variable may get the same identity. This method takes no lock, because the garbage collector may call it
        at any point of the program.
        """
        there = table()
        if there is not None:
            there._named.pop(key, None)


_tables: weakref.WeakKeyDictionary[JobService, _Table] = weakref.WeakKeyDictionary()


def _reducer(reduction: Reduction, weight: Any, sources: Sequence[Any]) -> Reducer:
    """Return the reducer that an earlier tape over these sources has used, or a new one; it uses ``weight`` from now on.

    ``sources`` are the sources whose gradients are reduced. The name of a reducer contains the number of lists of
    sources that were reduced in the process set before this list. All members reduce new lists of sources in the same
    order, so this number is the same on all members. A rank's own local variables, which may differ between ranks, have
    no influence on the name.
    """
    job: JobService = current_job()
    table = _tables.get(job)
    if table is None:
        table = _tables.setdefault(job, _Table())
    process_set = reduction.process_set
    if not sources or (process_set is not global_process_set and job.rank not in process_set.ranks):
        return Reducer(reduction, "tape", weight=weight)  # it reduces nothing, so it needs no number
    named = table.find(process_set.process_set_id, sources)
    groups: Any = reduction.groups
    if isinstance(groups, (list, tuple)):
        groups = tuple(tuple(identity(variable) for variable in group) for group in groups)
    facts = (reduction.op, reduction.gradient_predivide_factor, reduction.sparse_as_dense)
    key = (*facts, reduction.device_dense, reduction.device_sparse, reduction.compression, groups)
    found = named.reducers.get(key)
    if found is None:
        while len(named.reducers) >= REDUCERS_LIMIT:
            named.reducers.pop(next(iter(named.reducers)))
        found = named.reducers[key] = Reducer(reduction, named.name)
    found.weight = weight
    return found
