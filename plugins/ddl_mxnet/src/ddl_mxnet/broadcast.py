"""Copies the parameters of one rank to all ranks, including parameters whose shape is not known yet."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import Parameter, ParameterDict

from ddl_mxnet.reducer import OPERATIONS
from ddlcore.api import current_job
from ddlcore.errors import InvalidArgument

READY, DEFERRED, BARE = "ready", "deferred", "not initialized"


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite every parameter on all ranks with its values on ``root_rank``. Every rank must call this function.

    ``params`` is ``net.collect_params()``, or a dict from names to parameters or NDArrays. ``module.get_params()``
    returns such dicts; after the broadcast, pass them to ``module.set_params``. All ranks must pass the same names.
    ``prefix`` is put before the names under which the parameters are broadcast.

    A parameter with deferred initialization has no shape before the first forward pass. Such a parameter is broadcast
    in the first forward pass, as soon as it is initialized. But if ``root_rank`` already has the values of the
    parameter, from a checkpoint for example, the parameter is broadcast at once, and gets its shape from the root.

    Raises ValueError if ``params`` has another type. Raises ValueError on every rank if the ranks have different names
    or shapes, if a parameter is not initialized, or if a parameter has values on another rank but not on the root.
    """
    if not isinstance(params, Mapping | ParameterDict):
        raise InvalidArgument(
            f"invalid params of type: {type(params)}; pass net.collect_params(), or a dict of names and NDArrays"
        )
    if prefix is not None and not isinstance(prefix, str):
        raise InvalidArgument(f"prefix must be a string, not {type(prefix).__name__}")
    named = sorted(params.items())
    wrong = [str(name) for name, value in named if not isinstance(value, Parameter | mx.nd.NDArray)]
    if wrong:
        raise InvalidArgument(
            f"invalid params: {', '.join(wrong)} is no parameter and no NDArray; use broadcast_object"
        )
    job = current_job()
    if not 0 <= root_rank < job.size:
        raise InvalidArgument(f"root_rank={root_rank} is not a rank of this world of {job.size} ranks")
    if job.size == 1:
        return
    mine = [(str(name), *_state(value)) for name, value in named]
    everyone = OPERATIONS.allgather_object(mine, job=job)
    _check(everyone, root_rank)
    handles = []
    for (name, value), (_, state, shape) in zip(named, everyone[root_rank]):
        label = f"parameter.{prefix or ''}{name}"
        if state == DEFERRED:
            _broadcast_later(value, root_rank, label)
            continue
        if isinstance(value, Parameter) and _state(value)[0] == DEFERRED:
            value.shape = shape
            value._finish_deferred_init()
        for array in value.list_data() if isinstance(value, Parameter) else [value]:
            handles.append(OPERATIONS.broadcast_async(array, root_rank, output=array, name=label, job=job))
    for handle in handles:
        handle.wait()


def _state(value: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return two values for a parameter or an array: its state, and its shape or None if the shape is not known.

    The states are: READY, it has values. DEFERRED, it gets its values in the first forward pass. BARE, it is not
    initialized.
    """
    if not isinstance(value, Parameter):
        return READY, tuple(value.shape)
    if value._data is not None:
        return READY, tuple(value.shape)
    shape = None if value.shape is None else tuple(value.shape)
    return DEFERRED if value._deferred_init else BARE, shape


def _check(everyone: list[list[tuple[str, str, Any]]], root_rank: int) -> None:
    """Raise ValueError if the parameters of the ranks do not match. Every rank raises the same error.

    ``everyone`` contains a list for each rank, with (name, state, shape) of each parameter of this rank.
    """
    root = everyone[root_rank]
    for rank, theirs in enumerate(everyone):
        names, expected = {name for name, *_ in theirs}, {name for name, *_ in root}
        if names != expected:
            differ = ", ".join(sorted(names ^ expected))
            raise InvalidArgument(
                f"broadcast_parameters: rank {rank} and rank {root_rank} have different names: {differ}"
            )
        for (name, state, shape), (_, wanted, right) in zip(theirs, root):
            if BARE in (state, wanted):
                where = rank if state == BARE else root_rank
                raise InvalidArgument(
                    f"broadcast_parameters: {name} is not initialized on rank {where}; call initialize() first"
                )
            if state == READY and wanted == DEFERRED:
                raise InvalidArgument(
                    f"broadcast_parameters: {name} has values on rank {rank} and none on rank {root_rank}, the root; "
                    "run one forward pass there, or give its input size (in_units, in_channels)"
                )
            if state == wanted == READY and shape != right:
                raise InvalidArgument(
                    f"broadcast_parameters: {name} has shape {shape} on rank {rank} and {right} on rank {root_rank}"
                )


def _broadcast_later(param: Any, root_rank: int, label: str) -> None:
    """Change ``param`` so that its values are broadcast from ``root_rank`` as soon as the parameter is initialized.

    ``label`` is the name of the broadcast.
    """
    made = param._init_impl

    def init_then_broadcast(self: Any, data: Any, ctx_list: Any) -> None:
        made(data, ctx_list)
        self._init_impl = made  # broadcast once only
        for array in self.list_data():
            OPERATIONS.broadcast_async(array, root_rank, output=array, name=label).wait()

    param._init_impl = types.MethodType(init_then_broadcast, param)
