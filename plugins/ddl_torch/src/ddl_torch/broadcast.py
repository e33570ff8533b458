"""Copies one rank's state to all ranks: parameters, the state of an optimizer, any object.

No function of this module calls ``step`` of an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddl_torch.adapter import dense_strides
from ddl_torch.autograd import OPERATIONS
from ddl_torch.ops import start_broadcast
from ddl_torch.sharded import refuse_sharded
from ddl_torch.steps import includes, restores_itself, state_of
from ddlcore.api import ProcessSet, global_process_set, rank
from ddlcore.errors import InvalidArgument


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite every tensor in ``params`` with the values that the tensor has on the rank ``root_rank``.

    ``params``: a ``state_dict()``, ``named_parameters()``, or another iterable of (name, tensor) pairs. Every rank must
    call this function with the same names. Raises ValueError if ``params`` is anything else, or if a tensor is sharded.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    handles = []
    named = _named_tensors(params)
    refuse_sharded("broadcast_parameters", named)
    for name, tensor in named:
        dense = tensor.detach()
        if not dense.is_contiguous() and dense_strides(dense) is None:
            dense = dense.contiguous()
            copies.append((tensor, dense))
        handles.append(start_broadcast(dense, root_rank, f"parameter.{name}"))
    for handle in handles:
        handle.wait()
    for tensor, dense in copies:
        tensor.detach().copy_(dense)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        pairs = list(params)
    else:
        raise InvalidArgument(
            f"invalid params of type: {type(params)}; pass model.state_dict() or model.named_parameters()"
        )
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise InvalidArgument(
            "invalid params: an iterable must give tuples (name, tensor); pass model.named_parameters()"
        )
    wrong = [str(name) for name, value in pairs if not isinstance(value, torch.Tensor)]
    if wrong:
        raise InvalidArgument(f"invalid params: {', '.join(wrong)} is no tensor; send it with broadcast_object")
    return pairs


@dataclass(frozen=True)
class _Place:
    """The name, shape and type of a tensor. They take the tensor's place in a state that is sent as an object."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool  # otherwise it was on the device of its parameter


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Replace the state and hyperparameters of ``optimizer`` with those on the rank ``root_rank``.

    Parameters do not change. Every rank must call this function. ``model`` is ignored; it exists for compatibility with
    Horovod. Raises ValueError for L-BFGS, whose state has no fixed form, if a parameter is sharded, and if the
    optimizers of the ranks have different parameters.
    """
    if includes(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            "cannot broadcast torch.optim.LBFGS state; broadcast the parameters and begin with a new optimizer"
        )
    params = [(f"parameter {i}", one) for i, one in enumerate(p for g in optimizer.param_groups for p in g["params"])]
    refuse_sharded("broadcast_optimizer_state", params)
    is_root = rank() == root_rank
    tensors: dict[str, torch.Tensor] = {}
    own = state_of(optimizer) if is_root else {}
    sent = OPERATIONS.broadcast_object(_taken_out(own, "optimizer", tensors) if is_root else None, root_rank)
    state = own if is_root else _restored(sent, optimizer.param_groups, tensors)
    broadcast_parameters(tensors, root_rank)
    if not is_root or restores_itself(optimizer):
        optimizer.load_state_dict(state)


def copy_of_root(state: Any, root_rank: int) -> Any:
    """Return a copy of the state of the rank ``root_rank``. The root gets its own state back.

    A state is a tree of dicts, lists and tuples with tensors and picklable values. Every rank must call this function
    with a state of its own, whose tensors are not changed. On ranks other than the root, the result has new tensors. A
    new tensor is in host memory if the root's tensor is in host memory. Otherwise, it is on the device of the first
    tensor in this rank's ``state`` that is not in host memory, or in host memory if there is no such tensor.
    """
    is_root = rank() == root_rank
    tensors: dict[str, torch.Tensor] = {}
    outline = _taken_out(state, "state", tensors)
    homes = [tensor.device for tensor in tensors.values() if not tensor.is_cpu]
    outline = OPERATIONS.broadcast_object(outline if is_root else None, root_rank)
    if not is_root:
        tensors = {}
        state = _put_back(outline, _first(homes), tensors)
    broadcast_parameters(tensors, root_rank)
    return state


def _taken_out(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a copy of ``value`` with a placeholder for every tensor, and put the tensors into the dict ``tensors``.

    The key of a tensor in ``tensors`` is ``path``, followed by the tensor's position in ``value``.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return _Place(path, tuple(value.shape), value.dtype, value.is_cpu)
    if isinstance(value, dict):
        return {key: _taken_out(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_taken_out(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _restored(state: dict[str, Any], groups: Sequence[Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return ``state`` with an uninitialized tensor for every placeholder, and put these tensors into ``tensors``.

    A new tensor is in host memory if the root's tensor is in host memory. Otherwise, it is on the device of this rank's
    parameter to which it belongs, or of a first parameter if it belongs to none. ``groups``, the optimizer's parameter
    groups, contains the parameters.
    """
    homes = [[param.device for param in group["params"]] for group in groups]
    by_key = {"state": [home for group in homes for home in group], "param_groups": [_first(group) for group in homes]}
    whole = {}
    for key, value in state.items():
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        known = by_key.get(key, [])
        if pairs is None or not known:
            whole[key] = _put_back(value, _first(by_key["param_groups"]), tensors)
            continue
        made = {i: _put_back(one, _at(known, i), tensors) for i, one in pairs}
        whole[key] = made if isinstance(value, dict) else list(made.values())
    return whole


def _at(homes: Sequence[torch.device], place: Any) -> torch.device:
    return homes[place] if isinstance(place, int) and place < len(homes) else _first(homes)


def _first(homes: Sequence[torch.device]) -> torch.device:
    return homes[0] if homes else torch.device("cpu")


def _put_back(value: Any, home: torch.device, tensors: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` with an uninitialized tensor for every placeholder, and put these tensors into ``tensors``.

    A new tensor is in host memory if the root's tensor is in host memory. Otherwise, it is on the device ``home``.
    """
    if isinstance(value, _Place):
        device = torch.device("cpu") if value.on_host else home
        tensors[value.name] = torch.empty(value.shape, dtype=value.dtype, device=device)
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: _put_back(item, home, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_put_back(item, home, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object that the rank ``root_rank`` passes as ``obj``, on every member of the process set.

    The root's object must be picklable. The bytes of the object are checked before they are unpickled.
    """
    return OPERATIONS.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return a list with the object ``obj`` of every member, in rank order.

    Every member of the process set must call this function with a picklable object.
    """
    return OPERATIONS.allgather_object(obj, name, process_set)
