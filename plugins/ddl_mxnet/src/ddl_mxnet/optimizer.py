"""Makes an MXNet optimizer update parameters by gradients that are averaged over the ranks. reducer.py sums gradients.

The wrapped optimizer stays the same object, and only its class changes. So its state and its schedulers still work, and
``isinstance`` returns the same as before. An MXNet Module passes all its gradients in one call of the optimizer, so
that all gradients are reduced together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import mxnet as mx

from ddl_mxnet.reducer import Reducer, Reduction, SumPlan
from ddl_mxnet.replicas import UpdateCheck
from ddlcore.api import ProcessSet, find_process_set, global_process_set, gradient_compression

O = TypeVar("O")  # noqa: E741  # an optimizer's class; MXNet has no types
ALL = sys.maxsize  # the number of parameters in one call: no limit


def DistributedOptimizer(
    optimizer: O,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    process_set: ProcessSet = global_process_set,
) -> O:
    """Make ``optimizer`` update parameters by gradients averaged over ``process_set``, and return the same object.

    This function is for the Module API: ``module.init_optimizer(optimizer=..., kvstore=None)``. Every rank must call
    it after ``init()``. Parameters with the same index belong together on all ranks. A rank outside ``process_set``
    trains with its own gradients.

    * ``gradient_predivide_factor`` f: gradients are divided by f before the sum and multiplied by f / size after it.
    * ``num_groups``: the number of groups into which gradients are divided; the gradients of a group are reduced
      together. 0: no groups, gradients are fused into buckets as they become ready.

    The attribute ``rescale_grad`` keeps the value that the user has set, such as 1 / batch size of one rank. During an
    update, gradients are also divided by the number of ranks: those for an optimizer of MXNet by ``rescale_grad``, and
    those for an optimizer of another class in place, because its code may ignore ``rescale_grad``, or pass gradients to
    another optimizer that has its own. If a DistributedOptimizer is unpickled, it averages over
    the ranks again, in the job that is current at that time.

    Raises ValueError for invalid arguments, and NotInitialized before ``init()``. An update raises PeerLost or another
    DdlInternalError if the job has failed.
    """
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        raise ValueError(
            f"DistributedOptimizer takes an mxnet.optimizer.Optimizer, not {type(optimizer).__name__}; "
            "make one: mx.optimizer.create('sgd', ...)"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap each optimizer once")
    wire, user = gradient_compression(None)  # the setting decides: this function has no argument for it
    reduction = Reduction(float(gradient_predivide_factor), wire, user, num_groups, process_set)
    return cast("O", _wrap(optimizer, Reducer(reduction)))


def _wrap(optimizer: Any, reducer: Reducer) -> Any:
    bare = type(optimizer)
    added = {"__module__": bare.__module__, "_in_place": not rescales(optimizer)}
    optimizer.__class__ = type(bare.__name__, (_Distributed, bare), added)
    optimizer._ddl = reducer
    optimizer._plans = {}
    optimizer._inside = False
    optimizer._check = UpdateCheck()
    return optimizer


def rescales(optimizer: Any) -> bool:
    """Return whether ``optimizer`` certainly multiplies gradients by its ``rescale_grad``: all of MXNet's own do."""
    return type(optimizer).__module__.partition(".")[0] == "mxnet"


def undistributed(optimizer: Any) -> Any:
    """Return an optimizer that does not average gradients over ranks.

    If ``optimizer`` is a DistributedOptimizer, return a new object of its original class with the same attributes. If
    it is not, return ``optimizer`` itself.
    """
    if not isinstance(optimizer, _Distributed):
        return optimizer
    bare: Any = type(optimizer).__mro__[2]
    made = bare.__new__(bare)
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in OWN})
    return made


OWN = ("_ddl", "_plans", "_inside", "_check")


class _Distributed(mx.optimizer.Optimizer if TYPE_CHECKING else object):  # type: ignore[misc]  # a mixin
    """The methods and properties that ``DistributedOptimizer`` changes in an optimizer."""

    _ddl: Reducer
    _plans: dict[
        tuple[Any, ...], tuple[list[Any], SumPlan]
    ]  # by the indices of one call: the gradients of the call, and the plan by which these gradients are reduced
    _inside: bool  # whether an update runs: then the optimizer's own code reads the properties below
    _check: UpdateCheck
    _in_place: bool  # whether the averages are made in the gradients; otherwise, by ``rescale_grad``

    @property
    def aggregate_num(self) -> int:
        """The number of parameters that MXNet passes to the optimizer in one call.

        The number has no limit, so that MXNet passes all parameters in one call, and all gradients are reduced
        together. While an update runs, the property has the value of the wrapped optimizer instead.
        """
        return cast("int", self.__dict__["aggregate_num"]) if self.__dict__.get("_inside") else ALL

    @aggregate_num.setter
    def aggregate_num(self, number: int) -> None:
        self.__dict__["aggregate_num"] = number

    @property
    def rescale_grad(self) -> float:
        """The factor by which the optimizer multiplies gradients, as the user has set it.

        While an update of an optimizer of MXNet runs, it is multiplied by ``Reducer.scale``, which turns sums over the
        ranks into averages.
        """
        own = cast("float", self.__dict__["rescale_grad"])
        return own * self._ddl.scale if self.__dict__.get("_inside") and not self._in_place else own

    @rescale_grad.setter
    def rescale_grad(self, factor: float) -> None:
        self.__dict__["rescale_grad"] = factor

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients over the members of the process set, and update the parameters by the averages.

        The arguments are those of MXNet's ``Optimizer.update``. Every member must call this with the same indices.
        """
        self._updated(super().update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients as in ``update``, and call MXNet's ``update_multi_precision`` with the averages."""
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
            plan = SumPlan(named[::-1])  # backward computes the last parameters' gradients first
            self._plans[key] = list(grads), plan
        self._ddl.reduce(plan)
        if self._in_place:
            for grad in grads:
                grad *= self._ddl.scale

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduction = self._ddl.reduction
        ranks = None if reduction.process_set is global_process_set else reduction.process_set.ranks
        return _again, (undistributed(self), reduction.predivide, reduction.num_groups, ranks)


def _again(bare: Any, predivide: float, num_groups: int, ranks: Sequence[int] | None) -> Any:
    """Make a DistributedOptimizer from ``bare``, in the current job. pickle calls this function to unpickle one.

    ``ranks`` are the ranks of the process set; None means the global process set. Raises ValueError if the current job
    has no process set with these ranks.
    """
    if ranks is None:
        return DistributedOptimizer(bare, predivide, num_groups)
    process_set = find_process_set(ranks)
    if process_set is None:
        raise ValueError(f"this optimizer averages over ranks {list(ranks)}; add_process_set({list(ranks)}) first")
    return DistributedOptimizer(bare, predivide, num_groups, process_set)
