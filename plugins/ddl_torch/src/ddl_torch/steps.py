"""Makes torch call step hooks once per step of any optimizer, also of one that never called Optimizer's constructor.

Torch's constructor makes an optimizer's dicts of hooks, and wraps ``step`` of its class. Many published optimizers
(Lookahead, Ranger, wrappers) leave the constructor out. If ``step`` of a class calls ``step`` of its base class, torch
calls the hooks for both. This module corrects both by a class of the optimizer's own, so no other object is affected.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
ATTRIBUTES = ("state", "step", "zero_grad")  # what an object with ``param_groups`` needs to be an optimizer
# Attributes that ddl and torch add, and that a copy does without. A scheduler's ``step`` belongs to one object.
ADDED = ("_ddl", "_parameter_names", "_checked", "_skip", "_asked", "_ddl_stepped", "_zero_grad_profile_name", "step")


def is_optimizer(one: Any) -> bool:
    """Return whether ``one`` is an optimizer: torch's, or an object with the attributes that an optimizer needs."""
    if isinstance(one, Optimizer):
        return True
    if isinstance(one, (type, torch.nn.Module)) or not isinstance(getattr(one, "param_groups", None), list):
        return False
    return all(hasattr(one, name) for name in ATTRIBUTES)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that ``optimizer`` has as attributes, or in lists, tuples or dicts that are attributes.

    Those are left out that have parameters which ``optimizer`` does not have.
    """
    found: list[Any] = []
    own = _parameters(optimizer)
    for value in list(vars(optimizer).values()):
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found += [one for one in several if is_optimizer(one) and one is not optimizer and _parameters(one) <= own]
    return list({id(one): one for one in found}.values())


def includes(optimizer: Any, kind: type) -> bool:
    """Return whether ``optimizer``, or an optimizer inside it at any depth, is a ``kind``."""
    return any(isinstance(one, kind) for one in _all_of(optimizer))


def restores_itself(optimizer: Any) -> bool:
    """Return whether code other than torch's restores the state of ``optimizer``.

    Such code may restore a part only. So the rank whose state is copied must load its own state, too: then all ranks
    have the same.
    """
    return is_optimizer(optimizer) and type(optimizer).load_state_dict is not Optimizer.load_state_dict


def state_of(one: Any) -> dict[str, Any]:
    """Return ``one.state_dict()`` in a form that another process can load. ``one`` may be an optimizer.

    Some optimizers write the ``id`` of a parameter as a key, which means nothing elsewhere. The parameter's position
    takes its place, which torch's ``load_state_dict`` expects.
    """
    state: dict[str, Any] = one.state_dict()
    if not restores_itself(one):
        return state
    places = {id(param): place for place, param in enumerate(p for group in one.param_groups for p in group["params"])}

    def moved(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {places.get(key, key) if isinstance(key, int) else key: value for key, value in part.items()}

    return {name: moved(part) for name, part in state.items()}


def hook_steps(optimizer: Any) -> None:
    """Make torch's step hooks of ``optimizer`` work: each is called once per call of ``optimizer.step``.

    Has no effect where torch does so already. Otherwise ``optimizer`` gets a class of its own, which is also a
    torch.optim.Optimizer, and which has the methods of Optimizer that it lacks. Raises ValueError if ``optimizer`` has
    no ``__dict__``.
    """
    bare = type(optimizer)
    if not hasattr(optimizer, "__dict__"):
        raise ValueError(f"{bare.__name__} has no __dict__ (__slots__?), so no hook can be added to its step()")
    complete = STEP_HOOKS[0] in vars(optimizer)
    steps = sum("step" in vars(cls) for cls in bare.__mro__ if cls is not Optimizer)
    if isinstance(optimizer, _Hooked) or (complete and steps == 1 and getattr(optimizer.step, "hooked", False)):
        return
    added = {} if issubclass(bare, Optimizer) else _passed_on(optimizer)
    has_own_state = complete or _defines(bare, "load_state_dict") or "load_state_dict" in added
    added["step"] = _outermost(_step_of(optimizer))
    bases: tuple[type, ...] = (_Hooked if has_own_state else _HookedWithInner, bare)
    if not issubclass(bare, Optimizer):
        bases += (Optimizer,)
    added |= {"__module__": bare.__module__, "_bare": bare, "_complete": complete}
    optimizer.__class__ = type(bare.__name__, bases, added)
    if not hasattr(optimizer, "defaults"):
        vars(optimizer)["defaults"] = {}
    # As for an unpickled optimizer: makes the dicts of hooks that are missing, and wraps ``step`` of the new class.
    Optimizer.__setstate__(optimizer, {})


class _Hooked(Optimizer if TYPE_CHECKING else object):  # type: ignore[misc]  # a mixin
    """The mixin for the class that ``hook_steps`` makes. A copy has the original class, without hooks."""

    _bare: type
    _complete: bool  # whether Optimizer's constructor was called

    def __reduce_ex__(self, protocol: Any) -> Any:
        bare = self._bare
        state = {name: one for name, one in vars(self).items() if name not in ADDED and name[:11] != "_optimizer_"}
        if _defines(bare, "__reduce__") or _defines(bare, "__reduce_ex__"):
            return _filled(bare, state).__reduce_ex__(protocol)
        if self._complete or _defines(bare, "__getstate__"):
            return _filled, (bare, {}), _filled(bare, state).__getstate__()
        return _filled, (bare, state)  # Optimizer.__getstate__ would leave attributes out


class _HookedWithInner(_Hooked):
    """The mixin for an optimizer without methods for its state: its state includes the states of inner optimizers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, and under the key "inner" a list of the states of the inner optimizers."""
        return {**super().state_dict(), "inner": [one.state_dict() for one in inner_optimizers(self)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` has returned. Groups and state that inner optimizers share remain shared."""
        inner = inner_optimizers(self)
        shared = [
            (one, name)
            for one in inner
            for name in ("param_groups", "state")
            if getattr(one, name) is getattr(self, name)
        ]
        own = set(vars(self))
        super().load_state_dict(state_dict)
        for one, state in zip(inner, state_dict["inner"], strict=True):
            one.load_state_dict(state)
        for one, name in shared:
            if name in own:
                self.__dict__[name] = getattr(one, name)
            else:
                self.__dict__.pop(name, None)  # a property reads it from the inner optimizer


def _filled(bare: Any, attributes: dict[str, Any]) -> Any:
    made = bare.__new__(bare)
    vars(made).update(attributes)
    return made


def _defines(bare: type, method: str) -> bool:
    """Return whether ``bare`` has the method from elsewhere than torch's Optimizer and ``object``."""
    own = getattr(bare, method, None)
    return own is not None and own not in (getattr(Optimizer, method, None), getattr(object, method, None))


def _passed_on(optimizer: Any) -> dict[str, Any]:
    """Return methods for those that ``optimizer`` gets by ``__getattr__``, so that Optimizer's do not replace them."""
    missing = [name for name in vars(Optimizer) if name[0] != "_" and not hasattr(type(optimizer), name)]

    def passing(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: self.__getattr__(name)(*args, **kwargs)

    return {
        name: passing(name) for name in missing if not name.startswith("register_step") and hasattr(optimizer, name)
    }


def _step_of(optimizer: Any) -> Callable[..., Any]:
    """Return ``step`` of ``optimizer`` as a function that takes the optimizer first.

    A learning rate scheduler, or the user, may have replaced ``step`` in this object; then it is taken from there.
    """
    own = vars(optimizer).pop("step", None)
    if own is not None:
        return functools.wraps(own)(lambda _self, *args, **kwargs: own(*args, **kwargs))
    if hasattr(type(optimizer), "step"):
        step: Callable[..., Any] = type(optimizer).step
        return step
    return lambda self, *args, **kwargs: self.__getattr__("step")(*args, **kwargs)


def _outermost(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` as a method that hides the hooks of the optimizer while it runs.

    Torch calls the hooks before and after this method. If torch has wrapped ``step`` itself too, or a method that
    ``step`` calls, it finds none there.
    """

    @functools.wraps(step)
    def outermost(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        hooks = {name: own[name] for name in STEP_HOOKS}
        own.update({name: OrderedDict() for name in STEP_HOOKS})
        try:
            return step(self, *args, **kwargs)
        finally:
            own.update(hooks)

    vars(outermost)["hooked"] = False  # not as ``wraps`` has copied it: torch is to wrap this method
    return outermost


def _parameters(optimizer: Any) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _all_of(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    for one in inner_optimizers(optimizer):
        yield from _all_of(one)
