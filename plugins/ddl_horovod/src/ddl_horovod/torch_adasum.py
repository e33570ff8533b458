"""Adasum for PyTorch: what the reductions of ``horovod.torch`` and its optimizer do if a script passes op=Adasum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from ddl_horovod.adasum import Background, adasum, name_of
from ddlcore.api import Mapped, ProcessSet, current_job, global_process_set, membership
from ddlcore.errors import InvalidArgument
from ddlcore.types import Adasum

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741  # an optimizer's class
Tensors = list[torch.Tensor]


def verb(single: bool, in_place: bool, waits: bool) -> Callable[..., Any]:
    """Return what one of the eight reductions does with op=Adasum; it takes their arguments by name.

    ``single``: the reduction is of one tensor, not of several. ``in_place``: the result is written to the tensors.
    ``waits``: the reduction returns the result, not a handle. Such a reduction is differentiable: the gradient is reduced in
    the same way. It raises InvalidArgument for tensors that are not of floating point, and NotImplementedError for sparse
    ones.
    """

    def reduce(
        *,
        op: int,
        average: bool | None = None,
        name: str | None = None,
        compression: Any = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        tensor: Any = None,
        tensors: Any = (),
    ) -> Any:
        if average is not None:
            raise InvalidArgument("The op parameter supersedes average. Please provide only one of them.")
        call = _Call(name, process_set, prescale_factor, postscale_factor)
        given = [tensor] if single else list(tensors)
        if waits and not in_place:
            packed = [_compressor(compression).compress(one) for one in given]
            tensors = [one for one, _ in packed]
            reduced: Sequence[Any] = _Function.apply(call, *tensors)  # type: ignore[no-untyped-call]  # of torch
            results = [_compressor(compression).decompress(one, ctx) for one, (_, ctx) in zip(reduced, packed)]
            return results[0] if single else results
        handle = Mapped(call.start(given), lambda results: _delivered(results, given, in_place, single))
        return handle.wait() if waits else handle

    return reduce


def _compressor(compression: Any) -> Any:
    if not hasattr(compression, "compress"):
        raise InvalidArgument(f"op=Adasum takes Compression.none, .fp16 or a class of your own, not {compression!r}")
    return compression


def _delivered(results: Tensors, given: Tensors, in_place: bool, single: bool) -> Any:
    if in_place:
        with torch.no_grad():
            for tensor, result in zip(given, results):
                tensor.copy_(result)
        results = given
    return results[0] if single else results


class _Call:
    """The arguments of one reduction that all its tensors share."""

    def __init__(
        self, name: str | None, process_set: ProcessSet, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        self.job = current_job()
        self.name = name_of(name, self.job, process_set)
        self.process_set = process_set
        self.prescale, self.postscale = prescale, postscale

    def start(self, tensors: Tensors) -> Mapped:
        """Start the reduction of ``tensors`` in a thread; the result of the handle is new tensors."""
        background, handle = self.prepared(tensors)
        background.start()
        return handle

    def prepared(self, tensors: Tensors, name: str = "") -> tuple[Background, Mapped]:
        """Return what starts the reduction of ``tensors``, and the handle whose result is new tensors.

        ``name``: the name of the reduction if it is not that of this call.
        """
        arrays = [self._array(one) for one in tensors]
        background = Background(lambda: adasum(arrays, name or self.name, self.process_set, self.job))
        return background, Mapped(background, lambda reduced: self._tensors(reduced, tensors))

    def run(self, tensors: Tensors, name: str = "") -> Tensors:
        """Return the reduced tensors. ``name``: see ``prepared``."""
        background, handle = self.prepared(tensors, name)
        background.start()
        reduced: Tensors = handle.wait()
        return reduced

    def _array(self, tensor: torch.Tensor) -> Any:
        if tensor.is_sparse:
            raise NotImplementedError(
                "op=Adasum does not support sparse tensors; pass sparse_as_dense=True, or tensor.to_dense()"
            )
        array = tensor.detach().cpu().contiguous()
        array = array.float() if array.dtype == torch.bfloat16 else array  # NumPy lacks it
        return (array if self.prescale == 1.0 else array * self.prescale).numpy()

    def _tensors(self, arrays: Sequence[Any], like: Tensors) -> Tensors:
        results = (torch.from_numpy(array).to(one.device, one.dtype) for array, one in zip(arrays, like))
        return [one if self.postscale == 1.0 else one * self.postscale for one in results]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return tuple(call.run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.call.run(list(gradients), f"{ctx.call.name}.backward")


# --- the optimizer


def optimizer_of(
    *,
    optimizer: O,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int = Adasum,
    **_others: Any,
) -> O:
    """Make ``optimizer`` add up the changes of parameters that the ranks propose, by Adasum, and return it.

    Each rank steps on its own gradients. Then ``step()`` replaces the change of each parameter by the adaptive sum
    of the changes of all ranks. So the learning rate is that of one process. Every rank must wrap its optimizer
    with the same parameters, after ``init()``, and call ``step()`` equally often. ``named_parameters`` pairs the
    parameters of the ranks by name, otherwise by position. Ranks outside ``process_set`` keep their own changes.
    The other arguments are those of ``DistributedOptimizer``: several backward passes add up until ``step()``, and
    arguments about groups and devices have no effect. Raises ValueError for arguments that Adasum does not support.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if gradient_predivide_factor != 1.0:
        raise InvalidArgument("gradient_predivide_factor not supported yet with op != Average")
    if isinstance(optimizer, _AdasumOptimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap each optimizer once")
    current_job()  # raises NotInitialized
    own = [one for group in optimizer.param_groups for one in group["params"]]
    named = (
        dict(named_parameters)
        if named_parameters is not None
        else {f"parameter.{at}": one for at, one in enumerate(own)}
    )
    unnamed = len({id(one) for one in own} - {id(one) for one in named.values()})
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {unnamed} of the optimizer's parameters; pass model.named_parameters()"
        )
    mine = {id(one) for one in own}
    bare = type(optimizer)
    # The step itself, without torch's wrapper, which would call hooks in the middle of ours: after it, the ranks differ.
    step = getattr(bare.step, "__wrapped__", bare.step) if getattr(bare.step, "hooked", False) else bare.step
    added = {"__module__": bare.__module__, "_own_step": step}
    optimizer.__class__ = type(bare.__name__, (_AdasumOptimizer, bare), added)
    torch.optim.Optimizer.__setstate__(optimizer, {})  # lets torch call its hooks around the new ``step``
    if (
        vars(optimizer).pop("step", None) is not None
    ):  # a scheduler has wrapped it in this object, to see whether it is called
        vars(type(optimizer).step)["_wrapped_by_lr_sched"] = True
    wrapped = cast("_AdasumOptimizer", optimizer)
    wrapped._adasum = {name: one for name, one in sorted(named.items()) if id(one) in mine}
    wrapped._adasum_compression = _compressor(compression) if compression is not None else None
    wrapped._adasum_set = process_set
    wrapped._adasum_going = None
    wrapped.backward_passes_per_step = backward_passes_per_step
    return optimizer


@dataclass(frozen=True)
class _Step:
    """A step whose changes are being reduced: the parameters before it, what it returns, and its reduction."""

    before: Tensors
    loss: Any
    background: Background
    handle: Mapped


class _AdasumOptimizer(torch.optim.Optimizer):
    """The methods that come before those of the optimizer's own class."""

    _adasum: dict[str, torch.Tensor]
    _adasum_compression: Any
    _adasum_set: ProcessSet
    _adasum_going: _Step | None
    _own_step: Callable[..., Any]
    _opt_called: bool
    backward_passes_per_step: int

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the gradients of this rank, and replace the changes by the adaptive sums of all ranks' changes.

        If this fails, for example because a rank is lost, the parameters are as they were before. What the optimizer
        itself remembers, such as a momentum, has changed. If a signal handler's exception interrupts a call after this
        rank has begun to send its changes, the next call finishes that step, and ignores its own gradients and
        ``closure``, because the other ranks have got these changes.
        """
        self._opt_called = True
        if not membership(current_job(), self._adasum_set).active:
            return self._own_step(closure)
        going = self._adasum_going
        if going is None:
            before = [one.detach().clone() for one in self._adasum.values()]
            try:
                loss = self._own_step(closure)
                changes = [now.detach() - old for now, old in zip(self._adasum.values(), before)]
                self._adasum_going = going = _Step(before, loss, *self._reduction_of(changes))
            except BaseException:
                if self._adasum_going is None:  # nothing is sent yet
                    self._put(before)
                raise
        going.background.start()
        try:
            sums = going.handle.wait()
        except Exception:
            self._put(going.before)  # otherwise the ranks that are left would go on with different parameters
            self._adasum_going = None
            raise
        self._put([old + change for old, change in zip(going.before, sums)])
        self._adasum_going = None
        return going.loss

    def _put(self, values: Tensors) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._adasum.values(), values):
                parameter.copy_(value)

    def _reduction_of(self, changes: Tensors) -> tuple[Background, Mapped]:
        call = _Call(f"adasum.step.{'.'.join(list(self._adasum)[:1])}", self._adasum_set)
        compression = self._adasum_compression
        if compression is None:
            return call.prepared(changes)
        packed = [compression.compress(one) for one in changes]
        background, handle = call.prepared([one for one, _ in packed])
        return background, Mapped(
            handle, lambda sums: [compression.decompress(one, ctx) for one, (_, ctx) in zip(sums, packed)]
        )

    def synchronize(self) -> None:
        """Do nothing: ``step`` reduces."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError, as in Horovod: nothing has been reduced before ``step``."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Say how many backward passes add up before ``step``. Their gradients add up in any case."""
        self.backward_passes_per_step = passes
