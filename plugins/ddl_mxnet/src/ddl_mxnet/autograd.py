"""Makes collectives differentiable by MXNet's autograd.

The backward pass of a collective is a collective too, so all members of the process set must run it. The gradients are
defined as in Horovod for other frameworks; ``ddlcore.api.CollectiveCall`` lists the definitions. Minimum, maximum and
product have no gradient: their backward pass raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import mxnet as mx

from ddl_mxnet.engine import EngineOperations, is_naive
from ddl_mxnet.function import Function
from ddl_mxnet.traffic import EngineTraffic
from ddlcore.api import CollectiveCall, UserCompressor
from ddlcore.types import Average

OPERATIONS = EngineOperations()


@dataclass(frozen=True)
class Call(CollectiveCall):
    """The arguments that the forward pass and the backward pass of one collective have in common.

    ``priority`` is the priority in MXNet's engine. ``group`` is true if the call has several tensors, which form a
    group, and false if it has one tensor.
    """

    compressor: UserCompressor | None = None
    priority: int = 0
    group: bool = False
    turn: list[str] = field(default_factory=list)  # for a call without a name, after it has succeeded: see ``backward``

    advice: ClassVar[str] = "detach() the array, or use Average or Sum"

    def backward(self) -> Call:
        """Return the call for the backward pass: a copy of this call with another name, which ends with ".grad".

        The backward pass has a name even if this call has none, because MXNet may run the backward passes of several
        calls in any order. Without names, the backward passes would not match between the ranks.
        """
        return replace(self, name=f"{self.turn[0] if self.name is None else self.name}.grad")

    def operations(self) -> EngineOperations:
        """Return the object that runs collectives with this call's priority in MXNet's engine."""
        return OPERATIONS.at(self.priority)


def allreduce(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """Start an allreduce of ``tensors``, and return the new arrays at once.

    MXNet's engine writes the values into the new arrays when the allreduce has ended.
    """
    return _recorded(Function(_reduced, _reduced_back), call, tensors)


def allgather(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """Run an allgather of each array of ``tensors``, wait, and return the rows of all members in rank order."""
    return _recorded(Function(_gathered, _gathered_back), call, tensors)


def broadcast(call: Call, tensor: Any, root_rank: int) -> Any:
    """Start a broadcast of the root's ``tensor``, and return the new array at once.

    MXNet's engine writes the root's values into the new array when the broadcast has ended. ``root_rank`` is a rank of
    the world, even within a process set.
    """
    function = Function(lambda call, tensors: [_sent(call, tensors[0], root_rank)], _sent_back, root_rank)
    return _recorded(function, call, [tensor])[0]


def alltoall(call: Call, tensor: Any, splits: Sequence[int] | None) -> tuple[Any, list[int]]:
    """Run an alltoall, and wait until it has ended.

    Return (the rows that were sent to this member, the number of rows that came from each member). ``splits`` are the
    numbers of rows of ``tensor`` for each member; None means equal numbers.
    """
    received: list[int] = []

    def forward(call: Call, tensors: Sequence[Any]) -> list[Any]:
        rows, came = call.operations().alltoall(tensors[0], splits, **call.plain())
        received.extend(came)
        return [rows]

    return _recorded(Function(forward, _exchanged_back, received), call, [tensor])[0], received


def reducescatter(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """Run a reducescatter of each array of ``tensors``, wait, and return this member's rows of each reduced array."""
    return _recorded(Function(_scattered, _scattered_back), call, tensors)


# --- forward and backward


def _recorded(function: Function, call: Call, tensors: Sequence[Any]) -> list[Any]:
    outputs = function.apply(call, tensors)
    # Count only calls that succeed: if a call fails on one rank alone, the counts must stay equal on all ranks.
    if call.name is None:
        call.turn.append(call.job.companion(EngineTraffic).turn(call.process_set.process_set_id))
    return outputs


def _reduced(call: Call, tensors: Sequence[Any]) -> list[Any]:
    operations = call.operations()
    travelling, contexts = list(tensors), [None] * len(tensors)
    if call.compressor is not None:
        pairs = [call.compressor.compress(tensor) for tensor in tensors]
        travelling, contexts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    outputs = [operations.adapter.allocate(tensor) for tensor in travelling]
    if call.group:
        handle = operations.grouped_allreduce_async(travelling, outputs=outputs, **call.reduction())
    else:
        handle = operations.allreduce_async(travelling[0], output=outputs[0], **call.reduction())
    if is_naive():
        handle.wait()
    if call.compressor is not None:
        return [call.compressor.decompress(*pair) for pair in zip(outputs, contexts)]
    return outputs


def _reduced_back(call: Call, inputs: Sequence[Any], gradients: Sequence[Any], _: Any) -> list[Any]:
    call.check_differentiable("grouped_allreduce" if call.group else "allreduce")
    return _reduced(call.backward(), gradients)


def _gathered(call: Call, tensors: Sequence[Any]) -> list[Any]:
    if call.group:
        gathered: list[Any] = call.operations().grouped_allgather_async(tensors, **call.plain()).wait()
        return gathered
    return [call.operations().allgather(tensors[0], **call.plain())]


def _gathered_back(call: Call, inputs: Sequence[Any], gradients: Sequence[Any], _: Any) -> list[Any]:
    back = call.backward()
    rows = [array.shape[0] for array in inputs]
    sizes = back.more("rows", group=False)
    everyones = _gathered(sizes, [mx.nd.array([rows], dtype="int64")])[0].asnumpy()  # (set size, tensors)
    before = everyones[: call.set_rank()].sum(0).tolist()
    reduced = _reduced(replace(back, op=Average), gradients)
    return [one[at : at + mine] for one, at, mine in zip(reduced, before, rows)]


def _sent(call: Call, tensor: Any, root_rank: int) -> Any:
    operations = call.operations()
    output = operations.adapter.allocate(tensor)
    handle = operations.broadcast_async(tensor, root_rank, output=output, **call.plain())
    if is_naive():
        handle.wait()
    return output


def _sent_back(call: Call, inputs: Sequence[Any], gradients: Sequence[Any], root_rank: int) -> list[Any]:
    (reduced,) = _reduced(replace(call.backward(), op=Average), gradients)
    return [reduced if call.job.rank == root_rank else mx.nd.zeros_like(reduced)]


def _exchanged_back(call: Call, inputs: Sequence[Any], gradients: Sequence[Any], received: Sequence[int]) -> list[Any]:
    back = call.backward()
    return [back.operations().alltoall(gradients[0], received, **back.plain())[0]]


def _scattered(call: Call, tensors: Sequence[Any]) -> list[Any]:
    if call.group:
        parts: list[Any] = call.operations().grouped_reducescatter_async(tensors, **call.reduction()).wait()
        return parts
    return [call.operations().reducescatter(tensors[0], **call.reduction())]


def _scattered_back(call: Call, inputs: Sequence[Any], gradients: Sequence[Any], _: Any) -> list[Any]:
    call.check_differentiable("reducescatter")
    factor = call.gathered_scale()
    return _gathered(call.backward(), [gradient * factor for gradient in gradients])
