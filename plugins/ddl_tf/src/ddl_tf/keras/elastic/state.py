"""The elastic state of a Keras training: a model, its optimizer, and plain values. The optimizer counts the steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ddl_tf.broadcast import broadcast_variables
from ddl_tf.graph import after
from ddl_tf.keras.families import KerasFamily, family_of
from ddl_tf.keras.optimizer import variables_of
from ddl_tf.keras.seams import step_of
from ddl_tf.local import identity, variable_of
from ddlcore.api.elastic import StepState
from ddlcore.errors import InvalidArgument


class TensorFlowKerasState(StepState):
    """The elastic state of a Keras training: a model, its optimizer, and plain values, which become attributes.

    ``model`` must be built. ``optimizer`` defaults to the optimizer of the compiled model. Create the state after the
    model and the optimizer, and before the first call of a ``tf.function`` of your own that applies gradients.
    ``backend`` is accepted for compatibility with Horovod and is not used.

    With ``rollback="step"``, training continues, after a failure, from the last step that any surviving rank has
    applied. ``steps`` is the optimizer's ``iterations``. ``commit()`` keeps the plain values, never a copy of the
    model. The continuation is exact for one optimizer and one step for each ``commit()``.

    With ``rollback="commit"``, ``commit()`` copies model and optimizer, and after a failure all ranks go back to the
    newest copy. ``steps`` counts the calls of ``commit()``. Without an optimizer, the state always works as with
    ``rollback="commit"``.

    Raises ValueError for another value of ``rollback``, for a model that is not built, for an optimizer that is not a
    Keras optimizer, and for a keyword that is the name of an attribute or method of the state itself.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, *, rollback: str = "step", **kwargs: Any
    ) -> None:
        by_step = self._is_by_step(rollback, type(self).__name__)
        if not model.built or not model.weights:
            raise InvalidArgument(
                f"{type(self).__name__}: model {model.name!r} is not built yet; give it an Input, or call it on a "
                "batch first"
            )
        self.model = model
        self.optimizer: Any = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self.positions: list[Any] = []  # the callbacks that update attributes
        super().__init__(**kwargs)
        if self.optimizer is not None:
            _build(self.optimizer, model.trainable_variables)
        self._local = [variable_of(one) for one in model.variables if not one.trainable]
        self._local_values = [tf.Variable(one, trainable=False, name="ddl_kept") for one in self._local]
        self._by_step = by_step and self.optimizer is not None
        if self._by_step:
            self._keep_with_steps()
            if hasattr(model, "train_function"):
                model.train_function = None  # a training step that was traced before would not keep anything
        self._kept: list[Any] = []
        self._keep_all()

    # --- steps

    @property
    def steps(self) -> int:
        """The number of steps that the state contains, or the number of commits, depending on ``rollback``."""
        return int(self._iterations().numpy()) if self._by_step else self._commits

    @steps.setter
    def steps(self, value: int) -> None:
        self._commits = value

    def _iterations(self) -> Any:
        """Return the variable in which the optimizer counts its applied steps.

        Steps skipped for overflow are not counted.
        """
        return variable_of(getattr(self.optimizer, "inner_optimizer", self.optimizer).iterations)

    def _keep_with_steps(self) -> None:
        """Wrap the optimizer's method that applies gradients, so that each applied step copies the local variables.

        The forward pass of the next step changes the local variables: the averages of batch normalization, and the
        seeds of dropout. If that step fails, ``restore`` assigns the copied values to these variables.
        """
        name = "apply" if family_of(self.optimizer) is KerasFamily.KERAS3 else "apply_gradients"
        bare = getattr(self.optimizer, name)

        def applied(grads: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            given = list(grads)
            # Gradients that a tape has reduced: see ``after``. Those that the optimizer reduces, it waits for itself.
            with after(one[0] if isinstance(one, tuple) else one for one in given):
                result = bare(given, *args, **kwargs)
            with after([self._iterations().read_value()]):  # TensorFlow reads it when the step has raised it
                self._keep_local()
            return result

        vars(self.optimizer)[name] = applied

    def _keep_local(self) -> None:
        for kept, variable in zip(self._local_values, self._local, strict=True):
            kept.assign(variable)

    def move(self, **values: int) -> None:
        """Set the attributes ``values``, such as ``epoch`` and ``batch``, which give the training's position.

        With ``rollback="step"``, these attributes belong to the applied steps, so they are kept without a ``commit()``.
        """
        for name, value in values.items():
            setattr(self, name, value)
            if self._by_step:
                self._saved[name] = value

    # --- what elastic.run calls

    def restore(self) -> None:
        super().restore()
        if not self._by_step:
            for variable, value in zip(self._shared(), self._kept, strict=True):
                variable.assign(value)
        for variable, kept in zip(self._local, self._local_values, strict=True):
            variable.assign(kept)

    def _take_root(self, head: None, is_behind: bool) -> None:
        if is_behind:
            broadcast_variables(self._shared(), self.root)  # it assigns when all values have arrived, and not before
        step = step_of(self.optimizer)
        if step is not None:
            step.forget_passes()  # ranks that join have none

    def _shared(self) -> list[Any]:
        """Return the variables that are equal on all ranks: those of the model and those of the optimizer."""
        found = {identity(one): one for one in [*self.model.weights, *variables_of(self.optimizer)]}
        return [variable_of(one) for one in found.values()]

    def _keep_all(self) -> None:
        self._keep_local()
        # A tensor shares the variable's memory until the variable is written.
        self._kept = [] if self._by_step else [tf.identity(variable) for variable in self._shared()]


class KerasState(TensorFlowKerasState):
    """The elastic state of a Keras training: ``TensorFlowKerasState`` without the argument ``backend``."""

    def __init__(self, model: Any, optimizer: Any = None, *, rollback: str = "step", **kwargs: Any) -> None:
        super().__init__(model, optimizer, rollback=rollback, **kwargs)


def _build(optimizer: Any, variables: list[Any]) -> None:
    family = family_of(optimizer)
    if family is None:
        raise InvalidArgument(f"an elastic state takes an optimizer of Keras, not {type(optimizer).__name__}")
    if family is KerasFamily.TF_KERAS_OLDER:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        with tf.init_scope():
            _ = inner.iterations  # this creates it
            inner._create_all_weights(variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(variables)
