"""Adasum for TensorFlow: what the reductions of ``horovod.tensorflow``, its tape and its optimizer do with op=Adasum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from ddl_tf.autograd import running
from ddl_tf.errors import translating
from ddl_tf.exchange import give_up
from ddl_tf.gradients import checked
from ddl_tf.graph import asynchronous, wire_name
from ddl_tf.local import LocalVariables
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction
from ddl_tf.tape import ReducedTape

from ddl_horovod.adasum import Background, adasum, name_of
from ddl_horovod.tf_steps import local_variable, only_if
from ddlcore.api import ProcessSet, current_job, global_process_set
from ddlcore.errors import InvalidArgument

SPARSE = (
    "The Adasum reduction does not currently support sparse tensors. As a workaround please pass sparse_as_dense=True, or "
    "tf.convert_to_tensor(slices)"
)


def allreduce(*, tensor: Any, **arguments: Any) -> Any:
    """Do what ``horovod.tensorflow.allreduce`` does with op=Adasum: return the adaptive sum of the ranks' tensors."""
    return grouped_allreduce(tensors=[tensor], **arguments)[0]


@translating
def grouped_allreduce(
    *,
    tensors: Sequence[Any],
    op: int,
    average: bool | None = None,
    compression: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **_devices: Any,
) -> list[Any]:
    """Return the adaptive sum of each of ``tensors`` over all ranks, eagerly or in a graph. The sums are differentiable.

    They are computed on the host. Raises InvalidArgument for tensors that are not of floating point, and
    NotImplementedError for sparse ones.
    """
    if average is not None:
        raise InvalidArgument("The op parameter supersedes average. Please provide only one of them.")
    if any(isinstance(one, tf.IndexedSlices) for one in tensors):
        raise NotImplementedError(SPARSE)
    given = [tf.convert_to_tensor(one) for one in tensors]
    packed = [(one, None) if compression is None else compression.compress(one) for one in given]
    call = _Call(name, process_set, prescale_factor, postscale_factor)
    reduced = call.differentiable([one for one, _ in packed])
    pairs = zip(reduced, packed)
    return [one if compression is None else compression.decompress(one, ctx) for one, (_, ctx) in pairs]


class _Call:
    """The arguments of one reduction that all its tensors share, and that all runs of a graph share."""

    def __init__(self, name: str | None, process_set: ProcessSet, prescale: float, postscale: float) -> None:
        self._job = current_job()
        eager = tf.executing_eagerly()
        self._name = name_of(name, self._job, process_set) if eager else wire_name("Adasum", name)
        self._process_set = process_set
        self._prescale, self._postscale = prescale, postscale

    def differentiable(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums. Their gradients are reduced in the same way."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def function(*given: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
            return self._reduced(given, self._name), lambda *gradients: self._reduced(
                gradients, f"{self._name}.backward"
            )

        return list(function(*tensors)) if tensors else []

    def _reduced(self, tensors: Sequence[Any], name: str) -> list[Any]:
        wide = [tf.cast(one, tf.float32) if one.dtype == tf.bfloat16 else one for one in tensors]  # NumPy lacks it
        scaled = [one if self._prescale == 1.0 else one * self._prescale for one in wide]

        def run(*arrays: Any) -> list[Any]:
            return adasum(arrays, name, self._process_set, running(self._job))  # type: ignore[arg-type]  # it is a Job

        if tf.executing_eagerly():
            arrays = [one.numpy() for one in scaled]
            sums = [tf.constant(one) for one in Background(lambda: run(*arrays)).start().wait()]
        else:
            sums = asynchronous(run, scaled, [one.dtype for one in scaled], [one.shape for one in scaled], "DdlAdasum")
        results = [one if self._postscale == 1.0 else one * self._postscale for one in sums]
        return [tf.cast(one, like.dtype) for one, like in zip(results, tensors)]


# --- the tape


def _step_of(tensors: Sequence[Any], compression: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Return the sums for a step. If a signal handler's exception interrupts this, end the job.

    The other ranks get these sums, so this rank's variables would differ from theirs.
    """
    try:
        return list(
            grouped_allreduce(tensors=tensors, op=-1, compression=compression, name=name, process_set=process_set)
        )
    except Exception:
        raise
    except BaseException:
        give_up(current_job())


class _AdasumReducer(Reducer):
    """An object that reduces the gradients of one call of a tape by Adasum."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the adaptive sums of the members' gradients. A None stays None, and others keep their gradients."""
        results = checked(gradients, variables, self.reduction)
        there = [at for at, one in enumerate(results) if one is not None]
        if not self.active:
            return results
        own = [results[at] for at in there]
        sums = _step_of(own, self.reduction.compression, None, self.reduction.process_set)
        for at, one in zip(there, sums):
            results[at] = one
        return results


class _AdasumTape(ReducedTape):
    """A tape whose gradients are the adaptive sums of the ranks' gradients."""

    def _reduced(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        return self._local.reduce(lambda _: _AdasumReducer(self._reduction, "tape"), gradients, sources)


def tape_of(
    *,
    gradtape: Any,
    compression: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient_predivide_factor: float = 1.0,
    scale_local_gradients: bool = True,
    local_layers: Any = None,
    **_others: Any,
) -> ReducedTape:
    """Do what ``DistributedGradientTape`` and ``PartialDistributedGradientTape`` do with op=Adasum.

    Arguments about groups and devices have no effect.
    """
    if gradient_predivide_factor != 1.0:
        raise InvalidArgument("gradient_predivide_factor not supported yet with op != Average")
    reduction = Reduction(compression=compression, sparse_as_dense=sparse_as_dense, process_set=process_set)
    local = LocalVariables(scale_local_gradients)
    local.register_layers(local_layers)
    return _AdasumTape(gradtape, reduction, local, None)


# --- the optimizer


def optimizer_of(
    *,
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient_predivide_factor: float = 1.0,
    **_others: Any,
) -> Any:
    """Return an optimizer of ``tf.compat.v1.train`` that adds up the ranks' changes of variables by Adasum.

    Each rank steps on its own gradients, in each backward pass. In each ``backward_passes_per_step``-th pass, the change of
    each variable since the last time is replaced by the adaptive sum of the changes of all ranks. Arguments about groups and
    devices have no effect. Raises ValueError for optimizers of Keras and for arguments that Adasum does not support.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ValueError("op == Adasum is not supported yet with Keras")
    if average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if gradient_predivide_factor != 1.0:
        raise InvalidArgument("gradient_predivide_factor not supported yet with op != Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {backward_passes_per_step}")
    current_job()  # raises NotInitialized
    name = name or f"Distributed{type(optimizer).__name__}"
    return _AdasumOptimizer(optimizer, name, use_locking, compression, backward_passes_per_step, process_set)


class _AdasumOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # TensorFlow has no types
    """The optimizer that ``optimizer_of`` returns. Its slots and variables are those of the wrapped optimizer."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, compression: Any, passes: int, process_set: ProcessSet
    ) -> None:
        super().__init__(use_locking, name)
        self._optimizer = optimizer
        self._compression = compression
        self._passes = passes
        self._set = process_set
        self._starts: dict[int, Any] = {}  # by variable: its value when the changes were last reduced
        self._count: Any = None  # passes so far

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of this rank, as the wrapped optimizer does."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Step on the gradients of this rank, and reduce the changes in each pass that is due."""
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        if self._passes == 1:
            starts = [tf.identity(one.read_value()) for one in variables]
            with tf.control_dependencies(starts):
                applied = self._optimizer.apply_gradients(pairs, global_step, name)
            with tf.control_dependencies([applied] if applied is not None else []):
                return self._reduce(variables, starts)
        starts = [self._start_of(one) for one in variables]
        if self._count is None:
            with tf.init_scope():
                self._count = local_variable(0, "passes")
        count = tf.convert_to_tensor(self._count.read_value())
        # The first of some passes notes where it starts, so it does not matter how the variables got their first values.
        noted = only_if(
            tf.equal(count % self._passes, 0), lambda: [to.assign(v.read_value()) for to, v in zip(starts, variables)]
        )
        with tf.control_dependencies(noted):
            applied = self._optimizer.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([applied] if applied is not None else []):
            last = tf.equal(tf.convert_to_tensor(self._count.assign_add(1, read_value=True)) % self._passes, 0)
            due = only_if(last, lambda: [self._reduce(variables, [one.read_value() for one in starts])])
        with tf.control_dependencies(due):
            return tf.no_op() if due else None

    def _reduce(self, variables: Sequence[Any], starts: Sequence[Any]) -> Any:
        """Replace the change of each variable since its start by the adaptive sum of the ranks' changes.

        A rank outside the process set keeps its own changes. Who is in it never changes, but the number of all ranks may.
        """
        if self._set is not global_process_set and current_job().rank not in self._set.ranks:
            return tf.group()
        changes = [one.read_value() - start for one, start in zip(variables, starts)]
        try:
            sums = _step_of(changes, self._compression, f"{self._name}.step", self._set)
        except Exception:
            if tf.executing_eagerly():  # otherwise the ranks that are left would go on with different variables
                for one, start in zip(variables, starts):
                    one.assign(start)
            raise
        return tf.group(*[one.assign(start + change) for one, start, change in zip(variables, starts, sums)])

    def _start_of(self, variable: Any) -> Any:
        key = id(variable)
        if key not in self._starts:
            with tf.init_scope():  # outside of a tf.function
                self._starts[key] = local_variable(tf.zeros(variable.shape, variable.dtype.base_dtype), "start")
        return self._starts[key]

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Call the same method of the wrapped optimizer, and return its result."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Call the same method of the wrapped optimizer, and return its result."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self) -> Any:
        """Call the same method of the wrapped optimizer, and return its result."""
        return self._optimizer.variables()
