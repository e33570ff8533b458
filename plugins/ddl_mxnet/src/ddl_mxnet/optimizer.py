"""Makes any MXNet optimizer update by gradients that are averaged over the ranks; how they travel is the reducer's.

The object stays the one that was given: its state, its schedulers and ``isinstance`` are as they were. A Module
hands over all its gradients in one call, so that they are reduced together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import mxnet as mx

from ddl_mxnet.reducer import Plan, Reducer, Reduction
from ddl_mxnet.replicas import UpdateCheck
from ddlcore.api import ProcessSet, global_process_set, gradient_compression, process_sets

__all__ = ["DistributedOptimizer", "undistributed"]

O = TypeVar("O")  # noqa: E741  # an optimizer's class; MXNet has no types
ALL = sys.maxsize  # at once


def DistributedOptimizer(
    optimizer: O,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    process_set: ProcessSet = global_process_set,
) -> O:
    """``optimizer`` itself, which from now on updates by gradients that are averaged over ``process_set``.

    For the Module API: ``module.init_optimizer(optimizer=..., kvstore=None)``. Every rank wraps its optimizer after
    ``init()``. The parameters are paired by their indices. Ranks outside ``process_set`` train by themselves.

    * ``gradient_predivide_factor`` f: gradients are divided by f before the sum and multiplied by f / size after it.
    * ``num_groups``: how many groups of gradients go off together; 0: each by itself, fused as it comes.

    ``rescale_grad`` stays what the user has set (1 / batch size of one rank); the division by the number of ranks
    is added within an update. Raises ValueError for arguments that do not fit, NotInitialized before ``init()``;
    an update raises PeerLost and its kin. An unpickled one is distributed again, in the job that is current then.
    """
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        raise ValueError(
            f"DistributedOptimizer takes an mxnet.optimizer.Optimizer, not {type(optimizer).__name__}; "
            "make one: mx.optimizer.create('sgd', ...)"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap each optimizer once")
    wire, user = gradient_compression(None)  # as the setting says: this function has no argument for it
    reduction = Reduction(float(gradient_predivide_factor), wire, user, num_groups, process_set)
    return cast("O", _wrap(optimizer, Reducer(reduction)))


def _wrap(optimizer: Any, reducer: Reducer) -> Any:
    bare = type(optimizer)
    optimizer.__class__ = type(bare.__name__, (_Distributed, bare), {"__module__": bare.__module__})
    optimizer._ddl = reducer
    optimizer._plans = {}
    optimizer._inside = False
    optimizer._check = UpdateCheck()
    return optimizer


def undistributed(optimizer: Any) -> Any:
    """``optimizer``, or what it was before it became a DistributedOptimizer."""
    if not isinstance(optimizer, _Distributed):
        return optimizer
    bare: Any = type(optimizer).__mro__[2]
    made = bare.__new__(bare)
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in OWN})
    return made


OWN = ("_ddl", "_plans", "_inside", "_check")


class _Distributed(mx.optimizer.Optimizer if TYPE_CHECKING else object):  # type: ignore[misc]  # a mixin over the optimizer's own class
    """What a wrapped optimizer does otherwise than its own class."""

    _ddl: Reducer
    _plans: dict[
        tuple[Any, ...], tuple[list[Any], Plan]
    ]  # by indices: gradients that come in one call, and how they go
    _inside: bool  # an update: the optimizer's own code looks
    _check: UpdateCheck

    @property
    def aggregate_num(self) -> int:
        """How many parameters MXNet hands over in one call: all, that their gradients be reduced together."""
        return cast("int", self.__dict__["aggregate_num"]) if self.__dict__.get("_inside") else ALL

    @aggregate_num.setter
    def aggregate_num(self, number: int) -> None:
        self.__dict__["aggregate_num"] = number

    @property
    def rescale_grad(self) -> float:
        """As the user has set it; within an update also divided by the number of ranks."""
        own = cast("float", self.__dict__["rescale_grad"])
        return own * self._ddl.scale if self.__dict__.get("_inside") else own

    @rescale_grad.setter
    def rescale_grad(self, factor: float) -> None:
        self.__dict__["rescale_grad"] = factor

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As the optimizer's own, by averaged gradients. Every member calls it with the same indices."""
        self._updated(super().update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As ``update``."""
        self._updated(super().update_multi_precision, index, weight, grad, state)

    def _updated(self, update: Any, index: Any, weight: Any, grad: Any, state: Any) -> None:
        if self._inside:  # the optimizer's own code calls itself
            update(index, weight, grad, state)
            return
        several = isinstance(index, (list, tuple))
        self._reduce(list(index) if several else [index], list(grad) if several else [grad])
        self._apply(update, several, index, weight, grad, state)
        self._ddl.torn = False

    def _apply(self, update: Any, several: bool, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._inside = True
        try:
            if not several:
                update(index, weight, grad, state)
                return
            together = self.aggregate_num
            for i in range(0, len(index), together or 1):
                if together:
                    span = slice(i, i + together)
                    update(index[span], weight[span], grad[span], state[span])
                else:
                    update(index[i], weight[i], grad[i], state[i])
        finally:
            self._inside = False
        if several and self._ddl.active:  # one call is one step
            self._check.updated(self._ddl, index, weight)

    def _reduce(self, indices: Sequence[Any], grads: Sequence[Any]) -> None:
        if self._ddl.rebind():
            self._plans.clear()
        if not self._ddl.active:
            return
        key = tuple(indices)
        known, plan = self._plans.get(key, ((), None))
        if plan is None or any(a is not b for a, b in zip(grads, known, strict=True)):
            named = [(f"{self._ddl.label}{index}", grad) for index, grad in zip(indices, grads, strict=True)]
            plan = Plan(named[::-1])  # backward comes from the end
            self._plans[key] = list(grads), plan
        self._ddl.reduce(plan)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduction = self._ddl.reduction
        ranks = None if reduction.process_set is global_process_set else reduction.process_set.ranks
        return _again, (undistributed(self), reduction.predivide, reduction.num_groups, ranks)


def _again(bare: Any, predivide: float, num_groups: int, ranks: Sequence[int] | None) -> Any:
    """Unpickles a DistributedOptimizer, in the job that is current."""
    if ranks is None:
        return DistributedOptimizer(bare, predivide, num_groups)
    known = [set_id for set_id, members in process_sets().items() if list(members) == list(ranks)]
    if not known:
        raise ValueError(f"this optimizer averages over ranks {list(ranks)}; add_process_set({list(ranks)}) first")
    process_set = ProcessSet(ranks)
    process_set.process_set_id = known[0]
    return DistributedOptimizer(bare, predivide, num_groups, process_set)
