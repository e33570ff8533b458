"""Passes torch parameters to the core, which compares them between ranks. Notices when an optimizer has stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddl_torch_backend import NAME
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddl_torch.reducer import Reducer
from ddl_torch.sharded import is_sharded, refuse_sharded
from ddl_torch.steps import inner_optimizers, is_optimizer
from ddlcore.api import (
    ProcessSet,
    Replica,
    Verifier,
    current_job,
    global_process_set,
    is_initialized,
    named,
    verify_replicas,
)
from ddlcore.errors import InvalidArgument

SEEN = "_ddl_stepped"  # an attribute of optimizers that is in no state_dict and in no copy
UNWRAPPED = (
    "this optimizer is not a DistributedOptimizer: optimizer = ddl.DistributedOptimizer(optimizer, "
    "named_parameters=model.named_parameters()), then ddl.broadcast_parameters(model.state_dict(), root_rank=0), "
    "before the first step. Where each rank is to train a model of its own: verify_first_step=0 "
    "(--no-verify-first-step)"
)
UNSENT = (
    "call ddl.broadcast_parameters(model.state_dict(), root_rank=0) after ddl.init() and before the first step. Where "
    "the ranks are to differ: verify_first_step=0 (--no-verify-first-step)"
)


def verify(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Check that all members of ``process_set`` have bitwise equal parameters. Every member must call this function.

    ``model`` is one of these: a module (its parameters are compared, but not its buffers, because each rank has its own
    running statistics of BatchNorm); an optimizer; a ``state_dict()`` (all its tensors are compared); an iterable of
    tensors or of (name, tensor) pairs. Raises ReplicasDiffer on every member if a tensor differs or if the ranks have
    different tensors. Raises ValueError if ``model`` is anything else.
    """
    pairs: list[tuple[str, torch.Tensor]]
    if isinstance(model, torch.nn.Module):
        pairs = list(model.named_parameters())
    elif is_optimizer(model):
        pairs = _of_optimizer(model)
    else:
        pairs = [pair for pair in named(model) if not isinstance(model, Mapping) or isinstance(pair[1], torch.Tensor)]
    wrong = [name for name, tensor in pairs if not isinstance(tensor, torch.Tensor)]
    if wrong:
        raise InvalidArgument(
            f"verify: {', '.join(wrong)} is no tensor; pass a module, an optimizer or (name, tensor) pairs"
        )
    refuse_sharded("verify", pairs)
    verify_replicas(_replicas(pairs), process_set)


def verify_steps(optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Make ``optimizer``, a DistributedOptimizer, compare its parameters between ranks after some of its steps.

    The settings, such as ``verify_first_step``, say after which steps. ``reducer`` reduces the gradients of
    ``optimizer``.
    """
    for one in (optimizer, *inner_optimizers(optimizer)):
        vars(one)[SEEN] = True
    mine = weakref.ref(optimizer)  # weak: the job holds the verifier, which must not keep the parameters alive

    def replicas() -> list[Replica]:
        there = mine()
        return [] if there is None else _replicas(_of_optimizer(there))

    verifier = Verifier(f"DistributedOptimizer({type(optimizer).__name__})", replicas, advice=UNSENT)

    def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if reducer.active:
            verifier.stepped(reducer.job, reducer.reduction.process_set.process_set_id or 0)

    optimizer.register_step_post_hook(stepped)


def _replicas(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[Replica]:
    made = []
    for name, tensor in pairs:
        kind = str(tensor.dtype).removeprefix("torch.")
        size = tensor.numel() * tensor.element_size()
        made.append(Replica(name, kind, tuple(tensor.shape), size, partial(_host, tensor), tensor.device.type == "cpu"))
    return made


def _host(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the address of the elements in row-major host memory, and a tensor that keeps this memory alive.

    This memory is that of ``tensor`` itself if possible, otherwise a copy.
    """
    dense = tensor.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg()
    dense = dense.cpu().contiguous()
    return dense.data_ptr(), dense


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    reducer = getattr(optimizer, "_ddl", None)
    if isinstance(reducer, Reducer):
        return [(slot.label, slot.param) for slot in reducer.slots]
    pairs = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {number}, parameter {at}" for at in range(len(group["params"]))]
        pairs += list(zip(names, group["params"], strict=True))
    return pairs


# --- optimizers that are not wrapped


def _any_stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """After the first step of an optimizer that is not distributed, compare its parameters between ranks.

    Not in a program of torch.distributed on ddl: torch has many ways to divide a model or an optimizer among ranks.

    torch calls this function after every step of every optimizer in the process. A call after a later step of the same
    optimizer in the same job costs only one lookup.
    """
    seen = vars(optimizer).get(SEEN)
    if seen is True or not is_initialized():
        return
    job = current_job()
    if seen is not None and seen() is job:
        return
    vars(optimizer)[SEEN] = weakref.ref(job)
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == NAME:
        return
    if any(is_sharded(param) for _, param in _of_optimizer(optimizer)):
        return
    mine = weakref.ref(optimizer)

    def replicas() -> list[Replica]:
        there = mine()
        return [] if there is None else _replicas(_of_optimizer(there))

    Verifier(f"{type(optimizer).__name__} (a bare optimizer)", replicas, fatal=False, advice=UNWRAPPED).stepped(job)


_hook: Callable[[], None] = register_optimizer_step_post_hook(_any_stepped).remove
