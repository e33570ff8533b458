"""Makes a Keras optimizer step on reduced gradients, by wrapping the method that receives the gradients.

The optimizer's class, configuration and variables do not change. So the optimizer is saved like one that is not
wrapped, and can be loaded without ddl. The method that receives the gradients is ``apply`` in Keras 3,
``aggregate_gradients`` in tf_keras, and ``_aggregate_gradients`` in tf_keras' older optimizers. Each of these methods is
called before clipping, so gradients are clipped after they are reduced. If a class overrides ``apply_gradients``, that
method is wrapped too, because it may not call the others.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ddl_tf.graph import after, delay_writes
from ddl_tf.keras import seams
from ddl_tf.keras.families import KerasFamily, family_of
from ddl_tf.keras.interception import is_overridden, meet, refuse_unreduced
from ddl_tf.keras.step import Step
from ddl_tf.local import LocalVariables
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Groups, Reduction, summing
from ddlcore.api import ProcessSet, global_process_set, resolve_op
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average, ReduceOp, Sum


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    weight: Any = None,
) -> Any:
    """Make ``optimizer`` (of Keras 3 or tf_keras) step on gradients reduced over ``process_set``, and return it.

    Every rank must wrap its optimizers in the same order, with the same arguments, after ``init()``. Gradients are
    reduced before they are clipped, and before mixed precision looks for overflow. Ranks outside ``process_set`` step
    on their own gradients. A copy of the optimizer, and an optimizer loaded from a saved model, is not distributed.

    * ``name``: the name of the optimizer's gradients in messages; by default, made of its class and a number.
    * ``device_dense``, ``device_sparse``: where gradients are reduced: on the host ('/cpu:0' or 'cpu'), or on the
      device where they are ('').
    * ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, a compressor's name, or a class of your own. If it is
      None, the setting ``compression`` decides.
    * ``sparse_as_dense``: sparse gradients (``tf.IndexedSlices``) are converted to dense ones; otherwise they are
      gathered.
    * ``gradient_predivide_factor`` f: gradients are divided by f before the sum and by size / f after it.
    * ``op``: Average or Sum.
    * ``backward_passes_per_step`` n: the gradients of n passes are summed on this rank (or averaged, with
      ``average_aggregated_gradients``), then reduced and applied. ``iterations`` counts only the applied steps.
    * ``groups``: the number of groups of variables whose gradients are sent together, or a list of lists of variables
      (``num_groups`` is the older name).
    * ``scale_local_gradients``: the gradients of variables registered by ``register_local_var``, which are not reduced,
      are divided by the number of ranks.
    * ``weight``: what this rank's gradients count for in the average, see ``DistributedGradientTape``. Pass a variable
      that the training step assigns, or a function. It needs ``backward_passes_per_step=1``.

    The optimizer gets a new method ``register_local_var(variable)``. Raises ValueError for invalid arguments, and
    NotInitialized before ``init()``.
    """
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    family = _family(optimizer)
    _check_passes(backward_passes_per_step)
    reduction = Reduction(
        op=_reduce_op(op),
        gradient_predivide_factor=gradient_predivide_factor,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        groups=groups,
        process_set=process_set,
    )
    check_one_pass(weight, backward_passes_per_step)
    reduction = summing(reduction, weight)
    reducer = Reducer(reduction, name or f"Distributed{type(optimizer).__name__}", unique=True, weight=weight)
    local = LocalVariables(scale_local_gradients)
    step = Step(optimizer, reducer, local, backward_passes_per_step, average_aggregated_gradients)
    vars(optimizer)["_ddl"] = step  # not by __setattr__: Keras would track and save it
    vars(optimizer)["register_local_var"] = step.register_local_var
    refuse_unreduced(_innermost(optimizer), step)
    _MEET[family](optimizer, step)
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Do the same as ``DistributedOptimizer``, but keep the variables of ``local_layers`` local to each rank.

    ``local_layers`` is a Keras layer, or several. The gradients of their variables are not reduced; with
    ``scale_local_gradients``, these gradients are divided by the number of ranks. The layers may be built later, but
    not after the first step.
    """
    wrapped = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    step: Step = vars(wrapped)["_ddl"]
    step.local.register_layers(local_layers)
    return wrapped


# --- where gradients are intercepted


def _meet_keras3(optimizer: Any, step: Step) -> None:
    seams.install()

    def reducing(gradients: Sequence[Any], variables: Sequence[Any], apply_reduced: Callable[..., Any]) -> Any:
        def reduce_and_apply(own: Iterable[Any]) -> Any:
            reduced = step.reduce(own, variables)
            with after(reduced), step.with_reduced():
                return apply_reduced(reduced)

        if step.passes == 1:
            with step.whole():
                return reduce_and_apply(gradients)
        if not optimizer.built:
            optimizer.build(variables)  # variables cannot be created within a condition
        return step.accumulate(gradients, variables, reduce_and_apply)

    def apply(bare: Callable[..., Any], grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        if step.reduced:
            return bare(grads, trainable_variables)
        gradients = list(grads)
        if not gradients:
            return None
        if trainable_variables is None and not optimizer.built:
            return bare(gradients)  # this raises an error that says what is missing
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        return reducing(gradients, variables, lambda reduced: bare(reduced, variables))

    def apply_gradients(bare: Callable[..., Any], grads_and_vars: Iterable[tuple[Any, Any]], *args: Any) -> Any:
        pairs = list(grads_and_vars)
        if step.reduced or not pairs:
            return bare(pairs, *args)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        applied = reducing(
            gradients, variables, lambda reduced: bare(list(zip(reduced, variables, strict=True)), *args)
        )
        return applied if step.passes == 1 else optimizer.iterations

    meet(optimizer, "apply", apply)
    if is_overridden(optimizer, "apply_gradients"):  # it may not call ``apply``
        meet(optimizer, "apply_gradients", apply_gradients)


def _meet_tf_keras(optimizer: Any, step: Step) -> None:
    if not tf.__internal__.tf2.enabled():
        raise ValueError(
            "where TensorFlow 2's behaviour is disabled, tf_keras replaces this optimizer by an older one when it "
            f"compiles a model; use tf.keras.optimizers.legacy.{type(optimizer).__name__}"
        )

    _meet_aggregation(optimizer, step, "aggregate_gradients")


def _meet_tf_keras_older(optimizer: Any, step: Step) -> None:
    _meet_aggregation(optimizer, step, "_aggregate_gradients")


def _meet_aggregation(optimizer: Any, step: Step, method: str) -> None:
    inner = _innermost(optimizer)
    has_own_apply = is_overridden(inner, "apply_gradients")  # it may not call ``method``
    has_own_aggregation = is_overridden(inner, method) or is_overridden(inner, "gradient_aggregator")

    def aggregate(bare: Callable[..., Any], grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars) if step.reduced else reduced_pairs(step, grads_and_vars)
        return bare(pairs) if has_own_aggregation else pairs  # Keras' own sums over tf.distribute's replicas

    def apply_gradients(
        bare: Callable[..., Any], grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        # A loss scaler, and a user who has reduced gradients, say that these are not to be aggregated.
        skips = kwargs.get("skip_gradients_aggregation") or not kwargs.get("experimental_aggregate_gradients", True)
        with step.in_apply():
            if not has_own_apply or skips or step.reduced:
                return bare(grads_and_vars, *args, **kwargs)
            with step.whole():
                pairs = reduced_pairs(step, grads_and_vars)
                with after(gradient for gradient, _ in pairs), step.with_reduced():
                    return bare(pairs, *args, **kwargs)

    meet(inner, method, aggregate)
    meet(inner, "apply_gradients", apply_gradients)
    if step.passes > 1:
        meet(optimizer, "apply_gradients", functools.partial(_accumulating, optimizer, step))


_MEET = {
    KerasFamily.KERAS3: _meet_keras3,
    KerasFamily.TF_KERAS: _meet_tf_keras,
    KerasFamily.TF_KERAS_OLDER: _meet_tf_keras_older,
}


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a loss scaler, or ``optimizer`` itself if it is not a loss scaler.

    The scaler calls the inner optimizer to aggregate the gradients, and checks the gradients for overflow afterwards.
    """
    return getattr(optimizer, "inner_optimizer", optimizer)


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables that the Keras optimizer ``optimizer`` has so far, or [] if ``optimizer`` is None."""
    if optimizer is None:
        return []
    variables = optimizer.variables
    return list(variables() if callable(variables) and not isinstance(variables, list) else variables)


def reduced_pairs(step: Step, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return pairs (gradient, variable) for the optimizer. Gradients of local variables are not reduced, all others are.

    No variable is changed before all gradients are reduced. Every member of the process set must call this function.
    """
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    reduced = step.reduce([gradient for gradient, _ in pairs], variables)
    if step.reducer.active:
        # The moments of Adam too: each depends on one gradient only, and may be there although another one has failed.
        delay_writes(reduced, [step.optimizer.iterations, *variables, *variables_of(step.optimizer)])
    return [(gradient, variable) for gradient, (_, variable) in zip(reduced, pairs, strict=True)]


def _accumulating(
    optimizer: Any,
    step: Step,
    bare: Callable[..., Any],
    grads_and_vars: Iterable[tuple[Any, Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Add up the gradients of several passes, and apply the sums in the last pass.

    ``bare`` is tf_keras' own method ``apply_gradients``, which applies the sums. Gradients that are reduced already are
    applied.
    """
    if step.reduced:
        return bare(grads_and_vars, *args, **kwargs)
    pairs = list(grads_and_vars)
    variables = [variable for _, variable in pairs]
    build = getattr(optimizer, "build", None)  # older optimizers create their variables outside of conditions
    if build is not None:
        with tf.init_scope():
            build(variables)

    def apply(sums: list[Any]) -> None:
        bare(list(zip(sums, variables, strict=True)), *args, **kwargs)

    step.accumulate([gradient for gradient, _ in pairs], variables, apply)
    return optimizer.iterations


# --- arguments


def _family(optimizer: Any) -> KerasFamily:
    family = family_of(optimizer)
    if family is None:
        raise ValueError(
            f"DistributedOptimizer takes an optimizer of Keras 3 or tf_keras, not {type(optimizer).__name__}"
        )
    if seams.step_of(optimizer) is not None:
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap each optimizer once")
    return family


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {passes}")


def check_one_pass(weight: Any, passes: int) -> None:
    """Raise InvalidArgument if gradients with a weight would be added up over several passes."""
    if weight is not None and passes > 1:
        raise InvalidArgument(
            f"weight= needs backward_passes_per_step=1, and it is {passes}: the passes are added up before they have their "
            "weights; use one pass for each step, or a DistributedGradientTape with the sums and the whole weight"
        )


def _reduce_op(op: int) -> ReduceOp:
    resolved = resolve_op(op)
    if resolved not in (Average, Sum):
        raise ValueError(f"op currently only supports Average and Sum; it is {resolved.name}")
    return resolved
