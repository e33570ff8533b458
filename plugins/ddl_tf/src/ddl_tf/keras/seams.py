"""Wraps two methods of Keras 3, because some work of ddl must be done before the optimizer's own methods run.

The two methods are ``compile`` of a model and ``apply`` of a loss scaler. Each is wrapped once per process, when the
first optimizer is made distributed. For models and optimizers that do not use ddl, both methods work as before.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from ddl_tf.keras.step import Step
from ddlcore.api import current_job

log = logging.getLogger("ddl")
_lock = threading.Lock()
_MARK = "_ddl_wrapped"


def step_of(optimizer: Any) -> Step | None:
    """Return the Step (the gradient processing) of a distributed optimizer.

    ``optimizer`` may also be a loss scaler around a distributed optimizer. Returns None if neither ``optimizer`` nor
    its inner optimizer is distributed.
    """
    return _own_step(optimizer) or _own_step(getattr(optimizer, "inner_optimizer", None))


def _own_step(optimizer: Any) -> Step | None:
    step = getattr(optimizer, "__dict__", {}).get("_ddl")
    return step if isinstance(step, Step) and step.optimizer is optimizer else None


def settle_jit(model: Any, asked: Any) -> None:
    """Turn XLA off if the optimizer is distributed and Keras has chosen XLA automatically. Rank 0 logs a warning.

    ``asked`` is the user's argument ``jit_compile``. Raises ValueError if the user requested XLA (``asked`` is not
    "auto") and a step communicates with other ranks.
    """
    step = step_of(model.optimizer)
    if step is None or not model.jit_compile:
        return
    if asked == "auto":
        model.jit_compile = False
        if current_job().rank == 0:
            log.warning(
                "%s: jit_compile='auto' would compile the training step with XLA, which compiles no communication; "
                "it is False here",
                model.name,
            )
    elif step.reducer.active:
        raise ValueError(
            f"model {model.name!r} is compiled with jit_compile=True, and XLA compiles no communication: the job would "
            "hang or fail in its first step; leave jit_compile away, or set it to False"
        )


def install() -> None:
    """Wrap both methods (``compile`` and ``apply``), unless they are wrapped already.

    Keras 3 must have been imported.
    """
    import keras  # late: it is needed only for its own optimizers

    with _lock:
        _wrap(keras.Model, "compile", _compile)
        _wrap(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)


def _wrap(derived: type, name: str, around: Callable[..., Any]) -> None:
    """Wrap the method ``name`` in the class that defines it, which is ``derived`` or an ancestor of it.

    The wrapped method calls ``around`` with the original method and all arguments. The method is replaced in the class
    that defines it, because Keras compares a model's ``compile`` with the method of that class.
    """
    owner = next(cls for cls in derived.__mro__ if name in vars(cls))
    bare = vars(owner)[name]
    if hasattr(bare, _MARK):
        return

    @functools.wraps(bare)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(bare, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _compile(bare: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    bare(model, *args, **kwargs)
    given = inspect.signature(bare).bind(model, *args, **kwargs).arguments
    settle_jit(model, given.get("jit_compile", "auto"))


def _apply_scaled(bare: Callable[..., Any], scaler: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Do the same as ``apply`` of a loss scaler, but reduce the gradients before the scaler checks them for overflow.

    All ranks must find the same overflow: otherwise some ranks would skip a step that the other ranks make. ``bare`` is
    the original method.
    """
    step = _own_step(scaler.inner_optimizer)
    if step is None:
        return bare(scaler, grads, trainable_variables)
    if not scaler.built:
        scaler.build(list(trainable_variables))
    variables = list(scaler._trainable_variables if trainable_variables is None else trainable_variables)

    def apply(gradients: list[Any]) -> None:
        reduced = step.reduce(gradients, variables)
        with step.with_reduced():
            bare(scaler, reduced, variables)

    if step.passes == 1:
        with step.whole():
            apply(list(grads))
    else:
        step.accumulate(grads, variables, apply)
    return None
