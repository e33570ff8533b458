"""Describes allreduces and reducescatters: how the values of the ranks are reduced, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddlcore.api.move_calls import one_for_each
from ddlcore.api.objects import checked_name
from ddlcore.api.verb_call import VerbCall, checked_targets, row_target
from ddlcore.api.world import job_of
from ddlcore.errors import InvalidArgument
from ddlcore.messages.spec import Spec
from ddlcore.runtime.fenced import FencedPersistentRequest
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.host_reductions import reducescatter_rows
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import PersistentRequest
from ddlcore.types import CPU, Adasum, Average, Buffer, DType, Kind, ReduceOp, Sum, carrier_of

__all__ = ["ReduceArguments", "allreduce", "check_summable", "persistent_allreduce", "reducescatter"]


class ReduceArguments(NamedTuple):
    """The arguments that say how a collective reduces. All ranks must pass the same; see ``Operations``."""

    op: ReduceOp
    prescale_factor: float
    postscale_factor: float
    compression: str
    part_of: str = ""  # of an allreduce, see ``Operations.persistent_allreduce``

    def spec(self, kind: Kind, source: Buffer, strides: tuple[int, ...] | None, device: str, group: int) -> Spec:
        """Return the description of the reduction of the tensor in ``source``.

        ``device``: see ``VerbCall.device``. ``group``: the number of tensors of a grouped call; 0 for a single
        tensor. Raises InvalidArgument if ``op`` is not possible for the tensor.
        """
        return Spec(
            kind,
            source.dtype,
            source.shape,
            _checked_op(self.op, source),
            -1,
            float(self.prescale_factor),
            float(self.postscale_factor),
            device,
            strides,
            self.compression,
            group,
            part_of=self.part_of,
            element=source.element,
        )


def allreduce(
    call: VerbCall,
    tensors: Sequence[Any],
    outputs: Sequence[Any] | None,
    how: ReduceArguments,
    then: Callable[[list[Any]], Any] | None = None,
) -> Handle:
    """Start an allreduce of ``tensors``; see ``Operations.grouped_allreduce_async``."""
    call.job.compressor(how.compression)
    adapter = call.adapter
    sources = [adapter.buffer(tensor, elementwise=True) for tensor in tensors]
    device = call.device(sources, "allreduce")
    if outputs is None:
        outputs = [adapter.allocate(tensor) for tensor in tensors]
        targets = [adapter.buffer(output, elementwise=True) for output in outputs]
    else:
        targets = checked_targets(adapter, outputs, sources, tensors)
    group = 0 if call.single else len(tensors)
    specs = [how.spec(Kind.ALLREDUCE, source, source.strides, device, group) for source in sources]
    names = call.names(Kind.ALLREDUCE, len(tensors))
    given = list(outputs)
    finish = (lambda _: given[0]) if call.single else (lambda _: given if then is None else then(given))
    return call.submit(names, specs, sources, targets, finish, [*tensors, *given])


def persistent_allreduce(
    call: VerbCall, tensor: Any, output: Any, name: str, how: ReduceArguments
) -> PersistentRequest:
    """Return a persistent request; see ``Operations.persistent_allreduce``."""
    call.job.compressor(how.compression)
    buffer = call.adapter.buffer(tensor, elementwise=True)
    (target,) = checked_targets(call.adapter, [tensor if output is None else output], [buffer], [tensor])
    _checked_op(how.op, buffer)  # a wrong op must not open a device
    device = call.device([buffer], "allreduce")
    spec = how.spec(Kind.ALLREDUCE, buffer, buffer.strides, device, 0)
    what = (
        job_of(call.job).waiter,
        call.set_id,
        f"allreduce.{checked_name(name)}",
        spec,
        call.encoded[spec],
        buffer,
        target,
    )
    return PersistentRequest(*what) if device == CPU.kind else FencedPersistentRequest(*what, call.adapter.after)


def reducescatter(
    call: VerbCall, tensors: Sequence[Any], how: ReduceArguments, outputs: Sequence[Any] | None = None
) -> Handle:
    """Start a reducescatter of ``tensors``; see ``Operations.grouped_reducescatter_async``."""
    given = one_for_each(outputs, tensors)
    check_summable(call, how)
    sources = call.sources_with_rows(tensors, "reducescatter")
    device = call.device(sources, "reducescatter")
    group = 0 if call.single else len(tensors)
    specs = [how.spec(Kind.REDUCESCATTER, source, None, device, group) for source in sources]
    names = call.names(Kind.REDUCESCATTER, len(tensors))
    size, me = len(call.ranks), call.ranks.index(call.job.rank)
    rows = [reducescatter_rows(source.shape[0], size)[me] for source in sources]
    targets = [
        row_target(call.adapter, output, source, count, "reducescatter")
        for output, source, count in zip(given, sources, rows)
    ]

    def finish(outcomes: Sequence[Outcome | None]) -> Any:
        parts = [
            call.adopt(outcome, count, source, tensor) if output is None else output
            for outcome, count, source, tensor, output in zip(outcomes, rows, sources, tensors, given)
            if outcome is not None
        ]
        return parts[0] if call.single else parts

    return call.submit(names, specs, sources, targets, finish, [*tensors, *given])


def check_summable(call: VerbCall, how: ReduceArguments) -> None:
    """Raise InvalidArgument if values that are encoded as ``how`` says cannot be added, which a reducescatter needs."""
    if not call.job.compressor(how.compression).summable:
        raise InvalidArgument(
            f"compression {how.compression!r} is not summable, which reducescatter needs; use another one"
        )


def _checked_op(op: ReduceOp, source: Buffer) -> ReduceOp:
    if op == Adasum:
        raise InvalidArgument("op=Adasum is not available yet; use Average or Sum")
    if type(op) is not ReduceOp:
        try:
            op = ReduceOp(op)
        except ValueError:
            raise InvalidArgument(f"op={op!r} is none of {', '.join(o.name for o in ReduceOp)}") from None
    if source.element:
        _check_element(op, source.element)
    if source.dtype is DType.BOOL and op is Average:
        raise InvalidArgument("the average of bool is not defined; use Min (all), Max (any), or cast the tensor first")
    return op


def _check_element(op: ReduceOp, element: str) -> None:
    """Raise InvalidArgument if elements of a carried type cannot be reduced by ``op``."""
    carrier = carrier_of(element)
    if carrier is None or not carrier.is_complex:
        raise InvalidArgument(
            f"{element} can be gathered, broadcast and exchanged, but not reduced; cast the tensor to a type with which "
            "ddl computes, such as int64 or float32"
        )
    if op not in (Sum, Average):
        raise InvalidArgument(f"op={op.name} is not possible for {element}; complex numbers have Sum and Average")
