"""Replaces methods of one Keras optimizer, and finds those that its class overrides. Reduces nothing itself."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from ddl_tf.keras.step import Step
from ddlcore.errors import InvalidArgument

UPDATES = ("update_step", "_resource_apply_dense", "_resource_apply_sparse")  # each updates one variable


class _Met:
    """A wrapper around one method of an optimizer. A copy of the optimizer has the method without the wrapper."""

    def __init__(self, optimizer: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner = optimizer
        self._name = name
        self._around = around
        self._bare = getattr(optimizer, name)
        functools.update_wrapper(self, self._bare, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._bare, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo[id(self._owner)]
        return types.MethodType(getattr(type(copy), self._name), copy)


def meet(optimizer: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the method ``name`` of ``optimizer`` by a call of ``around`` with the method and its arguments."""
    vars(optimizer)[name] = _Met(optimizer, name, around)


def is_overridden(optimizer: Any, name: str) -> bool:
    """Return whether ``optimizer`` has the method ``name`` from elsewhere than Keras, so what it calls is unknown."""
    method = getattr(optimizer, name, None)
    module = getattr(method, "__module__", None) or ""
    return method is not None and module.partition(".")[0] not in ("keras", "tf_keras")


def refuse_unreduced(optimizer: Any, step: Step) -> None:
    """Make ``optimizer`` raise an error for updates that it would make with gradients that are not reduced.

    There are two of them: another optimizer calls a method that updates one variable; and ``minimize``, if the class of
    the optimizer overrides it, updates variables itself. In both cases InvalidArgument is raised on all ranks. A
    ``minimize`` is refused after its first call, because only the call shows what it does.
    """

    def update(name: str, bare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if step.reducer.active and not (step.applying or step.reduced):
            raise InvalidArgument(
                f"{name}() of a DistributedOptimizer ({type(optimizer).__name__}) was called by other code than its "
                "apply_gradients(), so its gradient is not reduced. If another optimizer calls it: pass that one to "
                "DistributedOptimizer, and give it the bare optimizer"
            )
        return bare(*args, **kwargs)

    def minimize(bare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = step.calls
        result = bare(*args, **kwargs)
        if step.reducer.active and step.calls == before:
            raise InvalidArgument(
                f"{type(optimizer).__name__}.minimize() has not called apply_gradients(), so its gradients are not "
                "reduced; let it pass its gradients to apply_gradients(), or compute them with a DistributedGradientTape "
                "and leave DistributedOptimizer out. To add up several passes: backward_passes_per_step"
            )
        return result

    for name in UPDATES:
        if hasattr(optimizer, name):
            meet(optimizer, name, functools.partial(update, name))
    if is_overridden(optimizer, "minimize"):
        meet(optimizer, "minimize", minimize)
