"""Two places of Keras 3 where an optimizer's own methods are met too late: how a model is compiled, and loss scaling.

Each is wrapped once in a process, when the first optimizer is made distributed; for models and optimizers
that have nothing to do with ddl both do what they did.
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

__all__ = ["install", "settle_jit", "step_of"]

log = logging.getLogger("ddl")
_lock = threading.Lock()
_MARK = "_ddl_wrapped"


def step_of(optimizer: Any) -> Step | None:
    """The step of a distributed optimizer, or of the one that it scales losses for; None where neither is one."""
    return _own_step(optimizer) or _own_step(getattr(optimizer, "inner_optimizer", None))


def _own_step(optimizer: Any) -> Step | None:
    step = getattr(optimizer, "__dict__", {}).get("_ddl")
    return step if isinstance(step, Step) and step.optimizer is optimizer else None


def settle_jit(model: Any, asked: Any) -> None:
    """Turns XLA off where Keras alone chose it for a model whose optimizer is distributed; says so on rank 0.

    Raises ValueError where the user asked for it (``asked`` is True) and a step communicates.
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
    """Wraps both places; Keras 3 is imported already."""
    import keras  # here: only who has an optimizer of it needs it

    with _lock:
        _wrap(keras.Model, "compile", _compile)
        _wrap(keras.optimizers.LossScaleOptimizer, "apply", _apply_scaled)


def _wrap(derived: type, name: str, around: Callable[..., Any]) -> None:
    """Puts ``around`` where the method is defined: Keras compares a model's ``compile`` with that one."""
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
    """Reduces before the scaler looks for overflow: all ranks must find the same, or some would skip a step alone."""
    step = _own_step(scaler.inner_optimizer)
    if step is None:
        return bare(scaler, grads, trainable_variables)
    if not scaler.built:
        scaler.build(list(trainable_variables))
    variables = list(scaler._trainable_variables if trainable_variables is None else trainable_variables)

    def apply(gradients: list[Any]) -> None:
        step.reduced = True
        try:
            bare(scaler, step.reduce(gradients, variables), variables)
        finally:
            step.reduced = False

    if step.passes == 1:
        with step.whole():
            apply(list(grads))
    else:
        step.accumulate(grads, variables, apply)
    return None
