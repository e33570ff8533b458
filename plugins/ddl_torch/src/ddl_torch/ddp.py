"""Refuses a model whose gradients torch's DistributedDataParallel and a DistributedOptimizer would both reduce.

The check does not slow down a training step. torch calls ``_wrapping`` only when a module becomes a submodule of
another module. A new DistributedOptimizer looks once for modules that were wrapped earlier.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ddl_torch.reducer import Reducer
from ddlcore.api import ProcessSet, current_job, global_process_set
from ddlcore.errors import ReducedTwice

log = logging.getLogger("ddl")

ADVICE = (
    "Only one of them may. To let ddl reduce them: do not wrap the model. transformers' Trainer and Accelerate wrap it, "
    "and split the batches among the ranks, if they find RANK and WORLD_SIZE in the environment; "
    "`ddl run --no-torch-env`, or ddlcore.run(..., torch_env=False), does not set these. To let torch reduce them: "
    "leave DistributedOptimizer out"
)
UNSURE = (
    "parameters of this DistributedOptimizer (%s) are also in a torch DistributedDataParallel module, and torch numbers "
    "the ranks differently, so it is not known whether both average the same gradients over the same ranks. If they do: "
    "%s"
)

_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()  # those of all DistributedOptimizers that are in use
_hooks: list[Any] = []  # the hook, once it is registered


def check_wrapped(parameters: Collection[tuple[str, torch.Tensor]], process_set: ProcessSet) -> None:
    """Raise ReducedTwice if a DistributedDataParallel module reduces one of ``parameters`` over the same ranks.

    ``parameters`` are the (name, parameter) pairs of a new DistributedOptimizer over ``process_set``. If
    torch.distributed has a process group of more than one rank, this function looks at every object of this process,
    which takes some hundredths of a second. Otherwise it returns at once.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    # isinstance() would run code of the objects: a lazily imported module defines __class__.
    for one in [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]:
        module = one.__dict__.get("_modules", {}).get("module")
        if module is not None:
            _check(parameters, process_set, current_job(), one, module)


def watch_wrapping(reducer: Reducer) -> None:
    """Make the constructor of DistributedDataParallel check every module that it wraps from now on.

    The constructor raises ReducedTwice if the module contains a parameter whose gradient ``reducer`` reduces over at
    least two of the same ranks.
    """
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_wrapping))
    _reducers.add(reducer)


def _wrapping(outer: torch.nn.Module, name: str, inner: torch.nn.Module | None) -> None:
    """Check the model ``inner``, which becomes a submodule of ``outer`` with the attribute name ``name``.

    torch calls this function for every submodule. The check is only needed if ``outer`` is a DistributedDataParallel.
    Its constructor sets the attribute ``module``, and so calls this function, before it sends anything. Raises
    ReducedTwice as ``_check`` does.
    """
    if name != "module" or inner is None or not isinstance(outer, DistributedDataParallel):
        return
    if not _shared(outer, inner):
        return
    gc.collect()  # an optimizer that the program has dropped may be part of a cycle
    for reducer, pairs in _shared(outer, inner):
        _check(pairs, reducer.reduction.process_set, reducer.job, outer, inner)


def _shared(
    outer: DistributedDataParallel, inner: torch.nn.Module
) -> list[tuple[Reducer, list[tuple[str, torch.Tensor]]]]:
    """Return the reducers that also reduce gradients that ``outer`` reduces, each with its parameters in ``inner``.

    ``outer`` is the DistributedDataParallel that wraps ``inner``. Reducers whose job has been closed are left out. The
    parameters are (name, parameter) pairs.
    """
    wrapped = set(_reduced_by(outer, inner))
    found = []
    for reducer in [one for one in _reducers if not one.job.closed]:
        hooked = [slot for slot in reducer.slots if slot.hook is not None]  # none, once the optimizer is gone
        pairs = [(slot.label, slot.param) for slot in hooked if id(slot.param) in wrapped]
        found += [(reducer, pairs)] if pairs else []
    return found


def _check(
    pairs: Iterable[tuple[str, torch.Tensor]], process_set: ProcessSet, job: Any, outer: Any, inner: torch.nn.Module
) -> None:
    """Raise ReducedTwice if ``outer`` reduces a parameter of ``pairs`` over at least two ranks of ``process_set``.

    ``pairs`` are (name, parameter) pairs; ``outer`` is the DistributedDataParallel that wraps ``inner``. If torch and
    ddl number the ranks differently, this function cannot compare the ranks and only logs a warning.
    """
    wrapped = set(_reduced_by(outer, inner))
    names = [name for name, parameter in pairs if id(parameter) in wrapped]
    if not names or len(theirs := _ranks(outer)) < 2:
        return
    ours = range(job.size) if process_set is global_process_set else process_set.ranks
    if (dist.get_rank(), dist.get_world_size()) != (job.rank, job.size):
        log.warning(UNSURE, _told(names), ADVICE)
        return
    # Without another rank in common there is no double work: DDP may reduce within each host and ddl across hosts.
    both = {*theirs} & {*ours}
    if len(both) > 1:
        raise ReducedTwice(
            f"parameters of this DistributedOptimizer ({_told(names)}) are also in a torch DistributedDataParallel "
            f"module, so both would reduce their gradients over the same {len(both)} ranks. {ADVICE}"
        )


def _reduced_by(outer: DistributedDataParallel, inner: torch.nn.Module) -> Iterator[int]:
    """Yield the ids of the parameters that ``outer`` reduces.

    ``outer`` is the DistributedDataParallel that wraps ``inner``.
    """
    ignored = getattr(outer, "parameters_to_ignore", ())
    return (id(parameter) for name, parameter in inner.named_parameters() if name not in ignored)


def _ranks(outer: DistributedDataParallel) -> Sequence[int]:
    """Return the ranks over which ``outer`` reduces gradients, in torch's numbering of ranks.

    A module whose process group was destroyed reduces over none; torch.distributed may have been initialized again.
    """
    group = getattr(outer, "process_group", None)
    try:
        return dist.get_process_group_ranks(group) if group is not None else ()
    except KeyError:  # torch does not know the group any more
        return ()


def _told(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
