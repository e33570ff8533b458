"""A Gluon Trainer that updates parameters by gradients averaged over the ranks. reducer.py sums the gradients."""

from __future__ import annotations

import ctypes
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from ddl_mxnet.optimizer import rescales, undistributed
from ddl_mxnet.reducer import OPERATIONS, Reducer, Reduction, SumPlan
from ddl_mxnet.replicas import trainer_verifier
from ddlcore.api import (
    ProcessSet,
    Share,
    check_weighted,
    checked_weight,
    global_process_set,
    gradient_compression,
    reciprocal_of,
)
from ddlcore.api.arrays import allreduce
from ddlcore.errors import DdlInternalError, InvalidArgument
from ddlcore.types import Average, Sum


class _Updater(mx.optimizer.Updater):  # type: ignore[misc]  # MXNet has no types
    """Gluon's updater of parameters. It raises an error for updates that a DistributedTrainer does not make."""

    reducer: Reducer
    inside = False  # whether ``_update`` of the trainer runs

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        if self.reducer.active and not self.inside:
            raise InvalidArgument(
                "a method of a class derived from DistributedTrainer updates parameters without its _update(), which "
                "checks that the gradients are reduced; call super().step(), or self.allreduce_grads() and super().update()"
            )
        super().__call__(index, grad, weight)


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]  # MXNet has no types
    """A Trainer whose ``step`` updates parameters by gradients that are averaged over ``process_set``.

    Every rank must create a trainer after ``init()``, with the same parameters. ``step`` and ``allreduce_grads`` wait
    until MXNet's engine has computed a gradient, and send this gradient while the engine computes the next one. They
    return when all gradients are reduced. Between ``allreduce_grads`` and ``update``, a gradient is the *sum* over the
    ranks (divided by ``gradient_predivide_factor``), as in Horovod; ``update`` divides it by the number of ranks.

    If backward has not computed a gradient on this rank since the last step, this rank contributes zeros to the sum.
    With ``ignore_stale_grad``, such a parameter is updated if at least one rank has computed its gradient. Without it,
    ``step`` raises UserWarning on every rank. A rank outside ``process_set`` trains with its own gradients.

    * ``params``, ``optimizer``, ``optimizer_params``: as for Gluon's Trainer. A KVStore cannot be used.
    * ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, the name of a compressor, or a class that you have
      written. None: the setting ``compression`` decides.
    * ``gradient_predivide_factor`` f: gradients are divided by f before the sum and multiplied by f / size after it.
    * ``prefix``: a prefix for the names under which the parameters' gradients are reduced.
    * ``num_groups``: the number of groups into which gradients are divided; the gradients of a group are reduced
      together. 0: no groups, gradients are fused into buckets as they become ready.
    * ``weight``: what this rank's gradients count for in the average, which is then sum(weight * gradient) /
      sum(weight), divided by the ``batch_size`` of ``step``, which must be the same on all ranks: 1 if the loss is a mean.
      It is a number, a ``Share``, or a function that is called in each step and returns one of them.
      ``trainer.weight = w`` before ``step`` changes it. Gradients of weight 0 count nothing, even if they are NaN. If the
      weights of all ranks are 0, all of them raise InvalidArgument. Gradients must be dense.

    Raises ValueError for invalid arguments, for parameters on several contexts and for sparse weights, and
    NotInitialized before ``init()``. ``step`` raises PeerLost or another DdlInternalError if the job has failed. ``update``
    raises ValueError if ``allreduce_grads`` was not called since the last update, also if the methods of a derived class
    left it out.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        compression: Any = None,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        weight: Any = None,
    ) -> None:
        if prefix is not None and not isinstance(prefix, str):
            raise ValueError(f"prefix must be a string, not {type(prefix).__name__}")
        wire, user = gradient_compression(compression)
        reduction = Reduction(float(gradient_predivide_factor), wire, user, num_groups, process_set)
        bare = undistributed(optimizer)
        if bare is not optimizer:
            warnings.warn(
                "DistributedTrainer averages gradients itself; it takes the optimizer inside the DistributedOptimizer",
                stacklevel=2,
            )
        self._ddl = Reducer(reduction)
        self._weighted = weight is not None
        if self._weighted:
            check_weighted(Average, 1.0 / reduction.predivide, reduction.predivide)
            self.weight = weight
        given = list(params.values()) if isinstance(params, Mapping | mx.gluon.ParameterDict) else params
        super().__init__(params, bare, optimizer_params=optimizer_params, kvstore=None)
        self._check_parameters()
        self._prefix = prefix or ""
        # The given order, usually that of the network, reversed: backward computes gradients from the network's end.
        # (Gluon's Trainer itself sorts parameters by name.)
        self._backwards: list[Any] = list(reversed(given))
        self._names: list[str] = []  # the names under which the gradients of ``_backwards`` are reduced
        self._arranged: list[Any] = []  # the lists of gradients for which ``_plan`` was made
        self._plan = SumPlan(())
        self._watched: list[
            tuple[Any, Any, int]
        ] = []  # parameters that have a gradient, with their arrays, and their places in ``_fresh``
        self._fresh: Any = np.zeros(0, np.float32)  # for each of these parameters: how many ranks have a new gradient
        self._reduced = False  # gradients were reduced since the last update, so ``_fresh`` is valid
        self._stepping = False  # a ``step`` has begun and has not ended
        for updater in self._updaters:
            updater.__class__ = _Updater
            updater.reducer = self._ddl
        # The code of another class than MXNet's may ignore ``rescale_grad``: its gradients are divided in ``_update``.
        self._in_place = not rescales(self._optimizer)
        self._applied = 1.0 if self._in_place else self._ddl.scale
        self._scale *= self._applied
        self._optimizer.rescale_grad *= self._applied  # ``update`` of a derived class may not set it
        self._verifier = trainer_verifier(self)
        self.after_update: list[Callable[[], object]] = []  # called in ``step`` when all updates are queued

    def _check_parameters(self) -> None:
        if self._contexts is not None and len(self._contexts) > 1:
            where = ", ".join(str(context) for context in self._contexts)
            raise ValueError(f"the parameters lie on {len(self._contexts)} contexts ({where}); a rank trains on one")
        sparse = [param.name for param in self._params if param._stype != "default"]
        if sparse:
            raise ValueError(
                f"sparse weights need a KVStore, and ddl has none: {', '.join(sparse)}; "
                "make them with stype='default' (their gradients may be row_sparse)"
            )

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Reduce the gradients over the ranks and update the parameters. The arguments are those of Gluon's Trainer.

        If an exception interrupts a step after the step has reduced gradients, the next call ends the job on all ranks.
        """
        # If the last step was interrupted between reduction and update, the gradients are already sums over the ranks.
        # To reduce them again would sum these sums.
        if self._stepping and self._reduced:
            self._ddl.torn = self._ddl.active
        self._stepping = True
        try:
            super().step(batch_size, ignore_stale_grad)
        except (UserWarning, DdlInternalError):  # all ranks raise these, and no update was begun
            self._stepping = False
            raise
        self._stepping = False

    # --- weights

    @property
    def weight(self) -> Any:
        """What this rank's gradients count for in the average, if the trainer has weights. Set it before ``step``.

        It holds until it is set again. Raises ValueError for what cannot be a weight, and if the trainer was made
        without ``weight=``.
        """
        return self._weight if self._weighted else None

    @weight.setter
    def weight(self, weight: Any) -> None:
        if not self._weighted:
            raise InvalidArgument(
                "trainer.weight: this DistributedTrainer averages without weights; make it with weight=1 on all ranks"
            )
        self._weight = weight if callable(weight) else checked_weight(weight, self._ddl.members)

    def _weigh(self) -> None:
        """Multiply the gradients by this rank's share of the average, and by the number of ranks.

        ``update`` divides by the number of ranks. The sum of the weights is reduced before the gradients: so no product
        exceeds what their type holds.
        """
        if self._plan.sparse:
            names = ", ".join(name for name, _ in self._plan.sparse)
            raise InvalidArgument(f"weight= needs dense gradients; row_sparse are {names}")
        weight = checked_weight(self._weight() if callable(self._weight) else self._weight, self._ddl.members)
        with self._ddl.in_one(InvalidArgument):
            factor = weight.factor if isinstance(weight, Share) else weight * self._reciprocal_of_sum(weight)
            for param in self._backwards:
                if param.grad_req != "null":
                    (gradient,) = param.list_grad()
                    if factor:
                        gradient *= factor * self._ddl.members
                    else:
                        gradient[:] = 0

    def _reciprocal_of_sum(self, weight: float) -> float:
        name, process_set = f"{self._ddl.label}{self._prefix}.weight", self._ddl.reduction.process_set
        total = allreduce(np.array([weight]), name=name, op=Sum, process_set=process_set)
        return reciprocal_of(float(total[0]), "gradient")

    # --- what Gluon's Trainer calls

    def _allreduce_grads(self) -> None:
        if self._ddl.rebind():
            if not self._in_place:
                ratio = self._ddl.scale / self._applied
                self._scale *= ratio
                self._optimizer.rescale_grad *= ratio  # ``step`` has computed it from the old ``_scale`` already
                self._applied = self._ddl.scale
            self._names, self._arranged = [], []
        if not self._ddl.active:
            return
        self._ddl.require_whole()  # first: the lines below write gradients, which may still be in flight
        gradients = [param._grad for param in self._backwards]
        if len(gradients) != len(self._arranged) or not all(map(operator.is_, gradients, self._arranged)):
            self._arrange(gradients)
        self._tell_fresh()
        if self._weighted:
            self._weigh()
        self._ddl.reduce(self._plan)
        self._reduced = True
        self._ddl.torn = False

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if self._ddl.active and not self._reduced:
            raise InvalidArgument(
                "the gradients were not reduced since the last update; call allreduce_grads() before update(), or step(). "
                "A class derived from DistributedTrainer must call allreduce_grads() of DistributedTrainer"
            )
        if self._reduced:
            stale = np.flatnonzero(self._fresh < self._ddl.members)
            if len(stale):
                self._judge(stale, ignore_stale_grad)
        with self._ddl.in_one(UserWarning):  # Gluon raises UserWarning only before it updates anything
            self._reduced = False
            self._apply(ignore_stale_grad)
            for hook in self.after_update:
                hook()
        if self._ddl.active:
            self._verifier.stepped(self._ddl.job, self._ddl.reduction.process_set.process_set_id or 0)

    def _apply(self, ignore_stale_grad: bool) -> None:
        if self._in_place and self._ddl.active:
            for param in self._backwards:
                if param.grad_req != "null":
                    (gradient,) = param.list_grad()
                    gradient *= self._ddl.scale
        for updater in self._updaters:
            updater.inside = True
        try:
            super()._update(ignore_stale_grad)
        finally:
            for updater in self._updaters:
                updater.inside = False

    # --- parameters

    def trained(self) -> list[tuple[str, Any]]:
        """Return (name, array) of each parameter that has a gradient, in the order of the network.

        The names are the same on all ranks.
        """
        pairs = zip(reversed(self._names), reversed(self._backwards))
        return [
            (name.removeprefix("gradient."), param.list_data()[0]) for name, param in pairs if param.grad_req != "null"
        ]

    def _arrange(self, gradients: Sequence[Any]) -> None:
        """Make the plan by which the arrays are reduced. ``gradients`` are the parameters' present gradient arrays.

        This is called at the first step, and again if a parameter has got another gradient array.
        """
        if not self._names:
            self._names = self._agreed_names()
        trained = [
            (name, param) for name, param in zip(self._names, self._backwards, strict=True) if param.grad_req != "null"
        ]
        named = [(name, param.list_grad()[0]) for name, param in trained]
        counts = mx.nd.zeros((max(1, len(named)),), dtype="float32")
        counts.wait_to_read()
        self._plan = SumPlan(named, [(f"{self._ddl.label}{self._prefix}.fresh", counts)])
        address = ctypes.c_void_p()
        check_call(_LIB.MXNDArrayGetData(counts.handle, ctypes.byref(address)))
        memory: Any = (ctypes.c_float * len(named)).from_address(address.value or 0)
        memory.array = counts  # numpy keeps ``memory`` alive, and ``memory`` keeps the array alive
        self._fresh = np.frombuffer(memory, np.float32) if named else np.zeros(0, np.float32)
        self._watched = [(param, param.list_data()[0], place) for place, (_, param) in enumerate(trained)]
        self._arranged = list(gradients)

    def _agreed_names(self) -> list[str]:
        """Return the names under which the gradients are reduced. All members use the names of the first member.

        The names of a member itself cannot be used: Gluon numbers blocks in the order of their creation, and this order
        may differ between ranks. All members must call this. Raises ValueError on every member if the parameters of the
        members differ in number, shape, type or ``grad_req``.
        """
        process_set, job = self._ddl.reduction.process_set, self._ddl.job
        mine = [(param.name, (param.shape, str(param.dtype), param.grad_req)) for param in self._backwards]
        with self._ddl.in_one():
            everyone = OPERATIONS.allgather_object(mine, process_set=process_set, job=job)
        first, ranks = everyone[0], process_set.ranks
        for rank, theirs in zip(ranks, everyone):
            differ = [
                f"{ours[0]} {ours[1]}, not {other[1]}" for ours, other in zip(theirs, first) if ours[1] != other[1]
            ]
            if differ or len(theirs) != len(first):
                what = "; ".join(differ) or f"{len(theirs)} parameters, not {len(first)}"
                raise ValueError(f"rank {rank} does not train the parameters of rank {ranks[0]}, but {what}")
        met: Counter[str] = Counter()
        names = []
        for name, _ in first:
            met[name] += 1  # two parameters of a list may have the same name
            again = f"#{met[name]}" if met[name] > 1 else ""
            names.append(f"{self._ddl.label}{self._prefix}{name}{again}")
        return names

    # --- gradients that backward has not renewed

    def _tell_fresh(self) -> None:
        """Record in ``_fresh`` which gradients are new on this rank, and set all other gradients to zero.

        If old gradients were not set to zero, they would be added to the sum a second time.
        """
        state = ctypes.c_int()
        into, ask = ctypes.byref(state), _LIB.MXNDArrayGetGradState
        self._fresh.fill(1.0)
        for param, data, place in self._watched:
            if ask(data.handle, into) == 0 and not state.value:
                self._fresh[place] = 0.0
                param.list_grad()[0][:] = 0

    def _judge(self, stale: Any, ignore: bool) -> None:
        """Handle the parameters that lack a new gradient on at least one rank.

        ``stale`` are the indices of these parameters in ``_watched``. If ``ignore`` is false, raise UserWarning. If
        ``ignore`` is true, mark each parameter for Gluon: a parameter will be updated if at least one rank has a new
        gradient, and skipped if no rank has one. Every rank decides the same, because the numbers of ranks with a new
        gradient are the same on all ranks.
        """
        for param, data, place in (self._watched[index] for index in stale):
            ranks = int(self._fresh[place])
            if not ignore:
                raise UserWarning(
                    f"Gradient of Parameter `{param.name}` has not been updated by backward since last `step` on "
                    f"{self._ddl.members - ranks} of {self._ddl.members} ranks. If that is intended, call step with "
                    "ignore_stale_grad=True: it is then updated where any rank had a gradient, and skipped elsewhere"
                )
            data._fresh_grad = ranks > 0
