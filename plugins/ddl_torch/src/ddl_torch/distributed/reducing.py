"""The collectives of a process group that reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddl_torch.autograd import OPERATIONS
from ddl_torch.distributed.arguments import copies_back, dense_of, one_of, op_of, waits
from ddl_torch.distributed.described import DescribedGroup
from ddl_torch.distributed.layout import joined, lands_in
from ddl_torch.distributed.reductions import bitwise, bitwise_name, reduction, require_integers
from ddl_torch.distributed.uncompiled import uncompiled
from ddl_torch.distributed.work import DONE, Works, together
from ddl_torch.sparse import sparse_allreduce_async
from ddlcore.api.reduce_calls import ReduceArguments
from ddlcore.errors import InvalidArgument

Tensors = Sequence[torch.Tensor]


@uncompiled
class ReducingGroup(DescribedGroup):
    """The reductions of a group."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensor, op = one_of(tensors), op_of(opts)
        self._number += 1
        if tensor.layout is not torch.strided:
            return self._sparse(tensor, op, opts)
        how = reduction(op)
        return self._bitwise(tensor, op, opts) if how is None else self._reduced(tensor, how, opts)

    def _reduced(self, tensor: torch.Tensor, how: ReduceArguments, opts: Any) -> Any:
        waiting = waits(opts)
        if waiting and self._unnamed.allreduce(tensor, how, self._limit_s(opts)):
            return DONE
        dense = dense_of(tensor)
        handle = OPERATIONS.allreduce_async(
            dense,
            output=dense,
            op=how.op,
            prescale_factor=how.prescale_factor,
            process_set=self._set,
            waits=waiting,
            part_of=how.part_of,
        )
        return self._work(handle, [tensor], None if dense is tensor else lands_in(tensor), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        self._number += 1
        how = reduction(op_of(opts))
        if how is None or len({(one.dtype, one.device) for one in tensors}) > 1:
            return together([self.allreduce([one], opts) for one in tensors], tensors)
        dense = [dense_of(one) for one in tensors]
        return self._work(self._grouped(dense, how, opts), tensors, copies_back(tensors, dense), opts)

    def _grouped(self, tensors: Tensors, how: ReduceArguments, opts: Any) -> Any:
        """Start one allreduce of all ``tensors``, in place. Return its handle."""
        return OPERATIONS.grouped_allreduce_async(
            tensors,
            outputs=tensors,
            op=how.op,
            prescale_factor=how.prescale_factor,
            process_set=self._set,
            waits=waits(opts),
        )

    def _sparse(self, tensor: torch.Tensor, op: Any, opts: Any) -> Any:
        how = reduction(op)
        if how is None or how.prescale_factor != 1.0:
            raise InvalidArgument("an allreduce of sparse tensors is a SUM or an AVG")
        reduced = sparse_allreduce_async(tensor, None, how.op, process_set=self._set)

        def land(_: Any) -> None:
            with torch.no_grad():
                tensor.copy_(reduced.wait().coalesce())

        return Works([self._work(handle, [], None, opts) for handle in reduced.in_flight], [tensor], land)

    def _bitwise(self, tensor: torch.Tensor, op: Any, opts: Any, part_of: str = "") -> Any:
        rows = require_integers(tensor).detach().contiguous().unsqueeze(0)
        handle = OPERATIONS.allgather_async(rows, process_set=self._set, part_of=part_of + bitwise_name(op))
        return self._work(handle, [tensor], lambda gathered: lands_in(tensor)(bitwise(op, gathered)), opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Reduce to the root. The tensors of the other ranks stay as they are."""
        self._number += 1
        tensor = one_of(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        if self._rank != root:
            tensor = tensor.detach().clone()
        op = op_of(opts if op is None and not isinstance(opts, int) else op)
        if tensor.layout is not torch.strided:
            return self._sparse(tensor, op, opts)
        how, part_of = reduction(op), f"a reduce to rank {root} of the group"
        if how is None:
            return self._bitwise(tensor, op, opts, f"{part_of} by ")
        return self._reduced(tensor, how._replace(part_of=part_of), opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        self._number += 1
        how = reduction(op_of(opts))
        size = len(self._ranks)
        if source.numel() != size * output.numel():
            raise InvalidArgument(
                f"reduce_scatter: the input has {source.numel()} elements, and the output {output.numel()}; "
                f"the input must have {size} times as many"
            )
        rows = source.detach().contiguous().view(size, *output.shape)
        if how is None:
            return self._bitwise_scatter(output, rows.unbind(0), op_of(opts), opts)
        target = output if output.is_contiguous() else None
        waiting = waits(opts)
        limit_s = self._limit_s(opts)
        if waiting and target is not None and self._unnamed.reducescatter(rows, target, how, limit_s):
            return DONE
        handle = OPERATIONS.reducescatter_async(
            rows,
            op=how.op,
            prescale_factor=how.prescale_factor,
            process_set=self._set,
            waits=waiting,
            output=None if target is None else target.detach(),
        )
        return self._work(handle, [output], None if target is not None else lands_in(output), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        output, parts = one_of(outputs), inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        if any(part.shape != output.shape for part in parts):
            return self._uneven_reduce_scatter(output, parts, opts)
        whole = joined(parts)
        return self.reduce_scatter_single(output, torch.stack(list(parts)) if whole is None else whole, opts)

    def _uneven_reduce_scatter(self, output: torch.Tensor, parts: Tensors, opts: Any) -> Any:
        """Reduce every part on every rank, and keep this rank's own: the parts have different shapes."""
        self._number += 1
        how = reduction(op_of(opts))
        if parts[self._rank].numel() != output.numel():
            raise InvalidArgument(
                f"reduce_scatter: output has shape {tuple(output.shape)}, and the input for this rank has shape "
                f"{tuple(parts[self._rank].shape)}"
            )
        if how is None:
            return self._bitwise_scatter(output, parts, op_of(opts), opts)
        copies = [part.detach().clone(memory_format=torch.contiguous_format) for part in parts]
        mine = copies[self._rank]
        return self._work(self._grouped(copies, how, opts), [output], lambda _: lands_in(output)(mine), opts)

    def _bitwise_scatter(self, output: torch.Tensor, parts: Tensors, op: Any, opts: Any) -> Any:
        """Send every rank its part, and reduce what has come."""
        rows = torch.cat([require_integers(part).detach().reshape(-1) for part in parts])
        received = rows.new_empty(len(parts) * output.numel())
        handle = OPERATIONS.alltoall_async(
            rows, [part.numel() for part in parts], process_set=self._set, output=received, part_of=bitwise_name(op)
        )

        def land(_: Any) -> None:
            lands_in(output)(bitwise(op, received.view(len(parts), *output.shape)))

        return self._work(handle, [output], land, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return together([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
