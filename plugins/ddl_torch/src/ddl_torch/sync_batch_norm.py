"""Batch normalization over the batches of all ranks. Ranks may have different numbers of rows. Runs on the CPU too.

Forward gathers the mean, the squared deviations and the count of every rank, and combines them in rank order (Chan,
Golub and LeVeque 1979). This avoids the loss of precision that sums of squares would cause. Backward adds two sums per
channel over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ddl_torch import autograd
from ddl_torch.autograd import Call
from ddlcore.api import current_job, global_process_set
from ddlcore.types import Sum


class SyncBatchNorm(_BatchNorm):
    """A layer that normalizes like ``torch.nn.BatchNorm1d/2d/3d``, but over the batches of all ranks together.

    All ranks must run their layers in the same order. Input: (rows, num_features, ...); the number of rows may differ
    between ranks, and may be 0. In evaluation and in a world of one rank, this layer does the same as torch's layers.
    Without ``track_running_stats``, evaluation uses the statistics of this rank's batch. With ``momentum=None``, the
    running statistics are the plain average over all batches.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected input with {self.num_features} channels (got {input.shape[1]})")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input, in the input's type and layout.

        In training every rank must call this method. Raises ValueError if the ranks together have only one value per
        channel.
        """
        job = current_job() if self.training else None
        if job is None or job.size == 1:
            result: torch.Tensor = super().forward(input)
            return result
        self._check_input_dim(input)
        function: Any = _Normalize.apply
        output, mean, variance, count = function(Call(job, global_process_set), input, self.weight, self.bias, self.eps)
        self._track(mean, variance, count)
        normalized: torch.Tensor = output
        return normalized

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        mean, variance, count = _statistics(call, x)
        few = x.numel() <= x.shape[1]  # read the count of all ranks only then: that waits for the GPU
        if few and int(count) <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        kind = mean.dtype
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.call = call
        output = functional.batch_norm(x.to(kind), mean, variance, _as(weight, kind), _as(bias, kind), False, 0.0, eps)
        result = (output.to(x.dtype), mean, variance, count)
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        g = gradient.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        sums = torch.stack([g.sum(dims), (g * normal).sum(dims)])  # (2, channels); of this rank only
        by_bias, by_weight = sums[0], sums[1]
        result: torch.Tensor | None = None
        if ctx.needs_input_grad[1]:
            call = Call(ctx.call.job, ctx.call.process_set, op=Sum)
            of_all = autograd.allreduce(call, sums) / count
            inner = g - of_all[0].view(shape) - normal * of_all[1].view(shape)
            factor = scale if weight is None else scale * weight.to(mean.dtype)
            result = (inner * factor.view(shape)).to(x.dtype)
        if weight is None:
            return None, result, None, None, None
        return None, result, by_weight.to(weight.dtype), by_bias.to(weight.dtype), None


def _as(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _statistics(call: Call, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean and variance of each channel over the values of all ranks, and the number of values per channel.

    Mean and variance are float64 if ``x`` is float64, otherwise float32. The number of values is a float64 scalar.
    """
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    dims = [d for d in range(x.dim()) if d != 1]
    rows = x.numel() // x.shape[1]  # values of a channel on this rank
    if rows:
        variance, mean = torch.var_mean(x.to(kind), dims, correction=0)
    else:
        variance = mean = torch.zeros(x.shape[1], dtype=kind, device=x.device)
    # float32 holds integers exactly up to 2**24 only, so the count travels as two digits to the base 2**24.
    count = torch.tensor([rows & 0xFFFFFF, rows >> 24], dtype=kind).to(x.device, non_blocking=True)
    own = torch.cat([mean, variance * rows, count]).unsqueeze(0)
    everyones = autograd.allgather(call, own)  # (ranks, 2 * channels + 2)
    means, deviations, counts = torch.split(everyones, [x.shape[1], x.shape[1], 2], dim=1)
    numbers = (counts[:, 0].double() + counts[:, 1].double() * 2**24).unsqueeze(1)  # (ranks, 1)
    total = numbers.sum()
    divisor = total.clamp(min=1)
    weights = (numbers / divisor).to(kind)
    joined = (means * weights).sum(0)
    spread = deviations.sum(0) / divisor + ((means - joined) ** 2 * weights).sum(0)
    return joined, spread, total
