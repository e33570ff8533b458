"""The collectives of a process group that move tensors as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddl_torch.autograd import OPERATIONS
from ddl_torch.distributed.arguments import dense_of, one_of, waits
from ddl_torch.distributed.described import DescribedGroup
from ddl_torch.distributed.layout import joined, lands_in, spread
from ddl_torch.distributed.uncompiled import uncompiled
from ddl_torch.distributed.work import DONE, together
from ddlcore.errors import InvalidArgument

Tensors = Sequence[torch.Tensor]


@uncompiled
class MovingGroup(DescribedGroup):
    """The broadcasts, gathers, scatters and exchanges of a group."""

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        self._number += 1
        tensor = one_of(tensors)
        root = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank
        waiting = waits(opts)
        if waiting and self._unnamed.broadcast(tensor, self._ranks[root], self._limit_s(opts)):
            return DONE
        dense = dense_of(tensor)
        handle = OPERATIONS.broadcast_async(
            dense, self._ranks[root], output=dense, process_set=self._set, waits=waiting
        )
        return self._work(handle, [tensor], None if dense is tensor else lands_in(tensor), opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        self._number += 1
        if output.numel() != len(self._ranks) * source.numel():
            raise InvalidArgument(
                f"all_gather: the output has {output.numel()} elements, and the input {source.numel()}; the output must "
                f"have {len(self._ranks)} times as many"
            )
        if output.is_contiguous():
            return self._gathered(source, output.detach(), [output], None, opts)
        return self._gathered(source, None, [output], lands_in(output), opts)

    _allgather_base = all_gather_single

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._number += 1
        source, targets = one_of(inputs), outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        whole = joined(targets) if targets[0].shape == source.shape else None
        return self._gathered(source, whole, targets, None if whole is not None else spread(targets), opts)

    def _gathered(self, source: torch.Tensor, output: torch.Tensor | None, outputs: Any, land: Any, opts: Any) -> Any:
        """Gather ``source`` into ``output``.

        ``output`` None: gather into a new tensor, which has one row for each rank. ``land`` then copies its rows to the
        user's ``outputs``.
        """
        rows = source.detach().contiguous().unsqueeze(0)
        if output is None:  # all ranks give ddl an output, and so say that their sizes are equal
            output = rows.new_empty((len(self._ranks), *source.shape))
        waiting = waits(opts)
        if waiting and self._unnamed.allgather(rows, output, self._limit_s(opts)):
            if land is not None:
                land(output)
            return DONE
        handle = OPERATIONS.allgather_async(rows, process_set=self._set, waits=waiting, output=output)
        return self._work(handle, outputs, land, opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return together([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Any:
        flat = [one for row in outputs for one in row]
        by_input = list(zip(*outputs))  # outputs[rank][input]
        return together([self.allgather([list(o)], [i], opts) for o, i in zip(by_input, inputs)], flat)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, received: Any, sent: Any, opts: Any = None
    ) -> Any:
        self._number += 1
        size, rows = len(self._ranks), source.detach().contiguous()
        if not sent and not received and (source.shape[:1] != output.shape[:1] or source.shape[0] % size):
            raise InvalidArgument(
                f"all_to_all_single: the input has shape {tuple(source.shape)} and the output {tuple(output.shape)}; "
                f"without split sizes, their first dimensions are equal, and {size} divides them"
            )
        if (sent and sum(sent) != source.shape[0]) or (received and sum(received) != output.shape[0]):
            raise InvalidArgument(
                f"all_to_all_single: the split sizes {list(sent)} and {list(received)} do not add up to the first "
                f"dimensions of the input, {source.shape[0]}, and of the output, {output.shape[0]}"
            )
        splits = list(sent) or ([source.shape[0] // size] * size if received else None)
        if output.is_contiguous():
            return self._exchanged(rows, splits, output.detach(), [output], None, opts)
        return self._exchanged(rows, splits, rows.new_empty(output.shape), [output], lands_in(output), opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Exchange tensors whose shapes may all differ: they travel as their elements one after the other."""
        self._number += 1
        rows = torch.cat([one.detach().reshape(-1) for one in inputs])
        received = [one.numel() for one in outputs]

        def land(result: torch.Tensor) -> None:
            for output, piece in zip(outputs, result.split(received)):
                lands_in(output)(piece)

        sent = [one.numel() for one in inputs]
        return self._exchanged(rows, sent, rows.new_empty(sum(received)), outputs, land, opts)

    def _exchanged(
        self,
        rows: torch.Tensor,
        sent: Any,
        output: torch.Tensor,
        outputs: Any,
        land: Any,
        opts: Any,
        part_of: str = "",
    ) -> Any:
        waiting = waits(opts)
        if waiting and sent is None and self._unnamed.alltoall(rows, output, self._limit_s(opts)):
            if land is not None:
                land(output)
            return DONE
        handle = OPERATIONS.alltoall_async(
            rows, sent, process_set=self._set, waits=waiting, output=output, part_of=part_of
        )
        return self._work(handle, outputs, None if land is None else lambda result: land(result[0]), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Gather to the root: an exchange in which all send to it alone."""
        self._number += 1
        root = opts if isinstance(opts, int) else opts.rootRank
        source, part_of = one_of(inputs), f"a gather to rank {root} of the group"
        rows = source.detach().contiguous().unsqueeze(0)
        sent = [int(rank == root) for rank in range(len(self._ranks))]
        if self._rank != root:
            return self._exchanged(rows, sent, rows.new_empty((0, *source.shape)), [], None, opts, part_of)
        targets = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        target = rows.new_empty((len(self._ranks), *source.shape))
        return self._exchanged(rows, sent, target, targets, spread(targets), opts, part_of)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Scatter from the root: an exchange in which it alone sends."""
        self._number += 1
        root = opts if isinstance(opts, int) else opts.rootRank
        output, size, part_of = one_of(outputs), len(self._ranks), f"a scatter from rank {root} of the group"
        sent = [0] * size
        rows = output.detach().new_empty((0, *output.shape))
        if self._rank == root:
            parts = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
            whole = joined(parts)
            rows = torch.stack([part.detach() for part in parts]) if whole is None else whole
            sent = [1] * size
        if output.is_contiguous():
            return self._exchanged(rows, sent, output.detach().unsqueeze(0), [output], None, opts, part_of)
        target = rows.new_empty((1, *output.shape))
        return self._exchanged(rows, sent, target, [output], lambda got: lands_in(output)(got[0]), opts, part_of)
