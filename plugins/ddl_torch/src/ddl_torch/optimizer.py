"""Makes any torch optimizer step on reduced gradients. The reduction itself is in reducer.py.

The wrapped optimizer stays the same object with a changed class. So its state, ``state_dict()``, ``isinstance`` and
schedulers that were made before or after the wrapping work as before. A hook before ``step`` reduces the gradients that
are not reduced yet. If a closure is passed to ``step``, it is wrapped, so that the gradients that it computes are
reduced.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ddl_torch import autograd
from ddl_torch.autograd import OPERATIONS, Call
from ddl_torch.ddp import check_wrapped, watch_wrapping
from ddl_torch.reducer import Reducer, UnfinishedBackward
from ddl_torch.replicas import verify_steps
from ddl_torch.slots import Reduction, Slot
from ddl_torch.steps import hook_steps, includes, is_optimizer
from ddlcore.api import (
    ProcessSet,
    check_predivide,
    check_weighted,
    global_process_set,
    gradient_compression,
    resolve_op,
)
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741  # an optimizer's class
Named = list[tuple[str, torch.Tensor]]

ZERO_GRAD_TOO_SOON = (
    "optimizer.zero_grad() was called after loss.backward() had been interrupted and before optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition: some gradients were sent to the other ranks, which wait for "
    "the rest. Call optimizer.synchronize() first."
)
SYNCHRONIZED_BEFORE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "The gradients are reduced already and are not reduced again; say so with optimizer.skip_synchronize()."
)


def DistributedOptimizer(
    optimizer: O,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    weight: Any = None,
) -> O:
    """Wrap ``optimizer`` so that it steps on gradients reduced over ``process_set``; return the same object.

    Every rank must wrap its optimizer with the same arguments, after ``init()``. Each ``backward_passes_per_step``-th
    ``backward()`` reduces the gradients. When that call returns, ``.grad`` of every parameter is the reduced gradient:
    clip it, unscale it or log it, as in one process. A parameter that got no gradient on this rank takes part with
    zeros and gets the reduced gradient of the other ranks; if no rank has computed a gradient, the parameter gets
    zeros. If several backward passes precede a step, their gradients add up, and the gradients of each pass are
    reduced. Within ``no_sync()`` gradients accumulate on each rank alone, and the next pass outside of it reduces their
    sum. Ranks outside ``process_set`` step on their own gradients. If a parameter already belongs to another
    DistributedOptimizer, the new optimizer reduces the parameter's gradients from now on. ``optimizer`` may also be one
    that never called torch's constructor, or any object with ``param_groups``, ``state``, ``step`` and ``zero_grad``; it
    becomes a torch.optim.Optimizer.

    * ``named_parameters``: (name, parameter) pairs; ranks match parameters by name, and without names by position.
    * ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, a compressor's name, or a class of your own. If it is
      None, the setting ``compression`` decides.
    * ``gradient_predivide_factor`` f: gradients are divided by f before the sum, and by size / f after it.
    * ``groups``: the number of groups into which parameters are divided, or a list of lists of parameters. The
      gradients of a group are reduced together.
    * ``sparse_as_dense``: make sparse gradients dense; otherwise they are gathered.
    * ``device_dense``, ``device_sparse``: "cpu" stages the dense or the sparse gradients of a GPU in host memory.
    * ``weight``: what the gradients of a backward pass count for in the average, which is then sum(w * g) / sum(w) over
      all passes and ranks: a number (such as that of this rank's tokens), a ``Share``, or a function that is called in
      each pass and returns one of them. ``optimizer.weight = w`` before ``backward()`` changes it. A gradient of weight 0
      counts nothing, even if it is NaN. If all weights of a step are 0, all ranks raise InvalidArgument.

    The optimizer gets new methods: ``no_sync()`` and ``set_backward_passes_per_step(n)``. It also gets
    ``synchronize()`` and ``skip_synchronize()`` for Horovod scripts; these two are not needed after ``backward()``. A
    mixed precision ``GradScaler`` finds the same gradients on all ranks, so all ranks skip the same steps. A copy or an
    unpickled optimizer is not distributed. After ``shutdown()`` and another ``init()`` this optimizer continues in the
    new world. Raises ValueError for invalid arguments, and NotInitialized before ``init()``. Raises ReducedTwice if the
    model is already wrapped in torch's DistributedDataParallel over the same ranks. If the model is wrapped later, the
    constructor of DistributedDataParallel raises ReducedTwice.
    """
    if not is_optimizer(optimizer):
        raise ValueError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if includes(optimizer, _Distributed):
        raise ValueError(
            "this optimizer is a DistributedOptimizer already, or has one inside; wrap each optimizer once"
        )
    _check_passes(backward_passes_per_step)
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    reduction = _reduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    dense, sparse = _stage_on_host("device_dense", device_dense), _stage_on_host("device_sparse", device_sparse)
    reduction = replace(reduction, stage_dense_on_host=dense, stage_sparse_on_host=sparse, weighted=weight is not None)
    if weight is not None:
        _check_weighted(optimizer, reduction)
    named = _named(optimizer, named_parameters)
    _check_groups(groups)
    reducer = Reducer(reduction, backward_passes_per_step, weight)
    if reducer.active:
        check_wrapped(named, process_set)
    hook_steps(optimizer)
    reducer.parameters.add(named, includes(optimizer, torch.optim.SparseAdam))
    watch_wrapping(reducer)
    bare = type(optimizer)
    optimizer.__class__ = type(bare.__name__, (_Distributed, bare), {"__module__": bare.__module__})
    wrapped = cast("_Distributed", optimizer)
    wrapped._ddl = reducer
    wrapped._parameter_names = {param: name for name, param in named}
    wrapped._checked = _parameters(optimizer)
    hook = optimizer.register_step_pre_hook(_before_step)
    # This hook must run first: other hooks, such as those that clip gradients, need reduced gradients.
    optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(_after_step)
    if groups is not None and reducer.active:
        _form_groups(reducer, groups)
    verify_steps(optimizer, reducer)
    weakref.finalize(optimizer, reducer.parameters.release).atexit = False
    return optimizer


class _Distributed(torch.optim.Optimizer if TYPE_CHECKING else object):  # type: ignore[misc]  # a mixin
    """The mixin for a wrapped optimizer's class: the methods that ``DistributedOptimizer`` adds or replaces."""

    _ddl: Reducer
    _parameter_names: dict[torch.Tensor, str]
    _checked: list[torch.Tensor]  # the parameters of all groups at the last ``_check_parameters``
    _skip = False
    _asked = False  # whether the user has called ``synchronize`` (a GradScaler does not count)

    def synchronize(self) -> None:
        """Reduce those gradients of this step that ``backward()`` has not reduced.

        This includes gradients that this rank has not computed. Has no effect after ``backward()``. If a signal handler
        (Ctrl-C, a watchdog) raised an exception at the end of ``backward()``, in ``step()`` or in this method, another
        call of this method continues the same step. Raises IncompleteGradients if that exception kept ``backward()``
        from computing all gradients. If some gradients had been sent before the exception, the other ranks raise
        MismatchError. Then all ranks may call ``zero_grad()`` and compute the step again. Raises PeerLost or another
        DdlInternalError if the job has failed.
        """
        goes_on = self._ddl.open
        self._ddl.synchronize()
        self._asked = not goes_on

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context manager inside which ``step()`` uses the gradients as they are, without reducing them."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager inside which ``backward()`` accumulates gradients on this rank and reduces nothing.

        The first ``backward()`` after the context reduces the accumulated sum, as with DistributedDataParallel.no_sync.
        If no ``backward()`` follows before ``step()``, ``step()`` reduces the sum. All ranks must run the same passes
        inside the context.
        """
        with self._ddl.no_sync():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients only in every ``passes``-th ``backward()``, counted from the next ``backward()`` on.

        All ranks must call this method. Raises ValueError if ``passes`` is below 1, or if this method is called within
        ``backward()``.
        """
        _check_passes(passes)
        if self._ddl.open:
            raise ValueError("set_backward_passes_per_step() was called within backward(); call it after step()")
        self._ddl.set_passes_per_round(passes)

    @property
    def weight(self) -> Any:
        """What the gradients of the next backward passes count for in the average, if the optimizer has weights.

        Set it before ``backward()``; it holds until it is set again. A rank that calls ``step()`` without a backward pass
        has the weight 0. Raises ValueError for what is not a finite number of 0 or more, a Share of this process set,
        or a function, and if DistributedOptimizer was made without ``weight=``.
        """
        return None if self._ddl.weights is None else self._ddl.weights.given

    @weight.setter
    def weight(self, weight: Any) -> None:
        if self._ddl.weights is None:
            raise InvalidArgument(
                "optimizer.weight: this DistributedOptimizer averages without weights; make it with "
                "DistributedOptimizer(…, weight=1) on all ranks"
            )
        self._ddl.weights.set(weight)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, as in torch.

        Raises UnfinishedBackward (an AssertionError and a RuntimeError) if ``backward()`` was interrupted after it had
        sent some of the gradients.
        """
        reducer = self._ddl
        reducer.discard()
        if reducer.open:
            raise UnfinishedBackward(ZERO_GRAD_TOO_SOON)
        self._asked = False
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch. Every rank must add the same parameters.

        Raises ValueError if a parameter's name is already in another group.
        """
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        added = _names_in_group(index, self.param_groups[index])
        taken = set(self._parameter_names.values())
        clash = [name for name, _ in added if name in taken]
        if clash:
            raise ValueError(f"parameter names must be unique; {', '.join(clash)} is in another group already")
        self._parameter_names.update({param: name for name, param in added})
        self._checked = _parameters(self)
        slots = self._ddl.parameters.add(added, includes(self, torch.optim.SparseAdam))
        if self._ddl.parameters.groups:
            for part in _by_device(slots).values():
                self._ddl.parameters.add_group(part)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as in torch.

        A GradScaler reads this property to unscale the gradients and to check them for infinities, so the gradients
        must be reduced at that time. After ``backward()`` they are reduced. If this rank has not called ``backward()``,
        the scaler's access to this property makes this rank take part in the reduction. So the scalers of all ranks
        come to the same decision.
        """
        if sys._getframe(1).f_code.co_name == "_unscale_grads_":  # torch offers no hook for this
            self._ddl.synchronize()
            self._ddl.begin_names_anew()  # ``step`` does this too, but the scaler may skip the step
        groups: list[dict[str, Any]] | None = self.__dict__.get("param_groups")
        return super().param_groups if groups is None else groups  # a wrapper may have a property of its own

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def __reduce_ex__(self, protocol: Any) -> Any:
        bare = type(self).__mro__[2]
        if hasattr(bare, "_bare"):  # a class that ``hook_steps`` has made
            return super().__reduce_ex__(protocol)
        return _bare, (bare,), self.__getstate__()


def _bare(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Reduce the gradients before ``step``.

    If ``step`` gets a closure, wrap the closure, so that each call reduces gradients. torch calls this function with
    the arguments of ``step``. Returns the arguments with the wrapped closure, or None if ``step`` gets no closure.
    """
    reducer: Reducer = optimizer._ddl
    _check_parameters(optimizer)
    asked, optimizer._asked = optimizer._asked, False
    if optimizer._skip:
        if reducer.open:
            raise AssertionError("skip_synchronize(), but gradients are under way: call synchronize() before step()")
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if callable(closure):
        if reducer.open:
            reducer.reduce()
        reducer.next_step()
        reduced = _reducing(closure, optimizer, reducer)
        return ((args[0], reduced, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": reduced})
    if asked and reducer.active and reducer.failed is None and not reducer.wants_round():
        warnings.warn(SYNCHRONIZED_BEFORE, stacklevel=4)
    reducer.synchronize()
    return None


def _after_step(optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Begin the next training step. torch calls this function when the method ``step`` has returned.

    torch does not call it if ``step`` was interrupted, so the gradients of an interrupted ``step`` still count as
    reduced.
    """
    optimizer._ddl.next_step()


def _reducing(closure: Callable[[], Any], optimizer: torch.optim.Optimizer, reducer: Reducer) -> Callable[[], Any]:
    """Return a new closure that calls ``closure`` and then reduces the gradients that ``closure`` has computed.

    For L-BFGS the new closure reduces the loss too, because the steps of L-BFGS depend on the loss.
    """

    reduces_loss = reducer.active and includes(optimizer, torch.optim.LBFGS)

    def reduced() -> Any:
        loss = closure()
        reducer.synchronize()  # a rank whose closure has computed no gradient must take part too
        reducer.next_step()
        if reduces_loss:
            call = Call(reducer.job, reducer.reduction.process_set, op=reducer.reduction.op)
            loss = autograd.allreduce(call, torch.as_tensor(loss).detach())
        return loss

    return reduced


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _check_parameters(optimizer: Any) -> None:
    """Raise ValueError if the user has put a parameter directly into ``param_groups``.

    No hook reduces the gradient of such a parameter.
    """
    now = _parameters(optimizer)
    if len(now) == len(optimizer._checked) and all(map(is_, now, optimizer._checked)):
        return
    known = optimizer._parameter_names
    strange = [f"parameter {i} (shape {tuple(param.shape)})" for i, param in enumerate(now) if param not in known]
    if strange:
        raise ValueError(
            f"{', '.join(strange)} of this optimizer came into param_groups after DistributedOptimizer was made, so "
            "its gradients are not reduced; use optimizer.add_param_group(), or wrap an optimizer that has all "
            "parameters"
        )
    optimizer._checked = now


# --- arguments


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {passes}")


def _check_groups(groups: int | Sequence[Sequence[torch.Tensor]] | None) -> None:
    fits = groups is None or (groups > 0 if isinstance(groups, int) else isinstance(groups, (list, tuple)))
    if not fits:
        raise ValueError("groups should be a positive integer or a list of lists of torch.Tensor.")


def _reduction(
    compression: Any, op: int, predivide: float, sparse_as_dense: bool, process_set: ProcessSet
) -> Reduction:
    reduce_op = resolve_op(op)
    check_predivide(predivide, reduce_op)
    wire, user = gradient_compression(compression)
    return Reduction(reduce_op, 1.0 / predivide, predivide, wire, user, sparse_as_dense, process_set)


def _check_weighted(optimizer: torch.optim.Optimizer, reduction: Reduction) -> None:
    """Raise InvalidArgument if the gradients of ``optimizer`` cannot have weights."""
    check_weighted(reduction.op, reduction.prescale_factor, reduction.postscale_factor)
    if includes(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            "weight= does not work with L-BFGS, whose steps depend on a loss that has no weight; scale the loss of each rank"
        )


def _stage_on_host(argument: str, device: str) -> bool:
    if device not in ("", "cpu"):
        raise ValueError(f'{argument}={device!r} is neither "" (where the gradient is) nor "cpu"')
    return device == "cpu"


def _named(optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, torch.Tensor]] | None) -> Named:
    """Return all parameters of the optimizer as (name, parameter) pairs, in the optimizer's order.

    ``given`` are the user's (name, parameter) pairs. If ``given`` is None, ``_names_in_group`` names the parameters.
    Raises ValueError if ``given`` has duplicate names, lacks a parameter, or is not a sequence of pairs.
    """
    params = [(i, j, p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    if given is None:
        return [pair for i, group in enumerate(optimizer.param_groups) for pair in _names_in_group(i, group)]
    pairs = list(given)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), "
            "usually produced by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        found = ", ".join(duplicates)
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {found}")
    by_param = {param: name for name, param in pairs}
    unnamed = [f"group {i}, parameter {j} (shape {tuple(p.shape)})" for i, j, p in params if p not in by_param]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {'; '.join(unnamed)}"
        )
    return [(by_param[param], param) for _, _, param in params]


def _names_in_group(index: int, group: dict[str, Any]) -> Named:
    """Return the (name, parameter) pairs of one parameter group.

    The names are those that torch has for the parameters, or names made of the parameters' positions. ``index`` is the
    position of ``group`` among the optimizer's groups.
    """
    names = group.get("param_names") or [f"noname.{index}.{place}" for place in range(len(group["params"]))]
    return list(zip(names, group["params"], strict=True))


def _form_groups(reducer: Reducer, groups: int | Sequence[Sequence[torch.Tensor]]) -> None:
    """Form the same groups of parameters on every rank. The gradients of a group are sent together.

    Every member of the process set must call this function. The parameters are ordered as on the first member of the
    process set. ``groups`` is the number of groups, or a list of lists of parameters. Raises ValueError if the ranks
    have different parameters, or if a group given by the user has parameters on several devices.
    """
    process_set = reducer.reduction.process_set
    root = process_set.ranks[0] if process_set is not global_process_set else 0
    mine = [slot.name for slot in reducer.slots]
    order: list[str] = OPERATIONS.broadcast_object(mine, root, process_set=process_set, job=reducer.job)
    if sorted(order) != sorted(mine):
        differ = ", ".join(sorted(set(order) ^ set(mine)))
        raise ValueError(f"groups: rank {reducer.job.rank} and rank {root} have different parameters: {differ}")
    by_name = {slot.name: slot for slot in reducer.slots}
    slots = [by_name[name] for name in order]
    if isinstance(groups, int):
        each, more = divmod(len(slots), groups)
        ends = [(i + 1) * each + min(i + 1, more) for i in range(groups)]
        runs = [slots[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        formed = [part for run in runs for part in _by_device(run).values()]
    else:
        by_param = {slot.param: slot for slot in slots}
        formed = [[by_param[param] for param in group if param in by_param] for group in groups]
        for i, group in enumerate(formed):
            devices = _by_device(group)
            if len(devices) > 1:
                where = " and ".join(map(str, devices))
                raise ValueError(f"groups: group {i} has parameters on {where}; give those of each device a group")
    for group in formed:
        if group:
            reducer.parameters.add_group(group)


def _by_device(slots: Sequence[Slot]) -> dict[torch.device, list[Slot]]:
    """Return a dict from each device to the list of the ``slots`` whose parameters are on that device.

    A slot is the record of one parameter's gradient. The slots are divided by device because all tensors of a bucket
    must be on one device.
    """
    found: dict[torch.device, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.param.device, []).append(slot)
    return found
