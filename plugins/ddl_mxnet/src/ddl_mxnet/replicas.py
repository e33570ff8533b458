"""Checks that all ranks have the same MXNet parameters. The core does the comparison."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon.parameter import Parameter, ParameterDict

from ddl_mxnet.reducer import Reducer
from ddlcore.api import ProcessSet, Replica, Verifier, global_process_set, named, verify_replicas
from ddlcore.errors import InvalidArgument

UNSENT = (
    "call ddl.broadcast_parameters(net.collect_params(), root_rank=0) after ddl.init() and before the first step. "
    "Where the ranks are to differ: verify_first_step=0 (--no-verify-first-step)"
)


def verify(params: Any, process_set: ProcessSet = global_process_set) -> None:
    """Check that all members of ``process_set`` have the same parameters, bit by bit. Every member must call this.

    ``params`` is a Gluon block or the result of its ``collect_params()``, a dict from names to NDArrays (as
    ``module.get_params()`` returns), or an iterable of NDArrays. The parameters of a block are compared by their
    position, because Gluon's names may differ between ranks. Parameters without a gradient, such as running statistics,
    are not compared, because each rank has its own values.

    Raises ReplicasDiffer on every member if the values of an array differ, or if the members do not have the same
    arrays. Raises ValueError if ``params`` contains other objects, or a parameter that has no values yet.
    """
    if isinstance(params, mx.gluon.Block):
        params = params.collect_params()
    pairs = list(params.items()) if isinstance(params, Mapping | ParameterDict) else named(params)
    replicas = []
    for place, (name, value) in enumerate(pairs):
        if isinstance(value, Parameter):
            if value.grad_req == "null":
                continue
            if value._data is None:
                raise InvalidArgument(f"verify: {name} has no values yet; run one forward pass first")
            replicas.append(_replica(f"{place}: {name.rpartition('_')[2]}", value.list_data()[0]))
        elif isinstance(value, mx.nd.NDArray):
            replicas.append(_replica(str(name), value))
        else:
            raise InvalidArgument(f"verify: {name} is a {type(value).__name__}, no parameter and no NDArray")
    verify_replicas(replicas, process_set)


def trainer_verifier(trainer: Any) -> Verifier:
    """Return the Verifier that compares the parameters of ``trainer``, a DistributedTrainer, between the ranks.

    The settings say after which steps the parameters are compared.
    """
    mine = weakref.ref(trainer)  # weak: the job holds the verifier, which must not keep the parameters alive

    def replicas() -> list[Replica]:
        there = mine()
        return [] if there is None else [_replica(name, array) for name, array in there.trained()]

    return Verifier("DistributedTrainer", replicas, advice=UNSENT)


class UpdateCheck:
    """Compares arrays between the ranks after one call of a DistributedOptimizer has updated them."""

    def __init__(self) -> None:
        # Not empty only during ``updated``: the job refers to this object, which must not keep the arrays alive.
        self._arrays: list[tuple[str, Any]] = []
        self._verifier = Verifier("DistributedOptimizer", self._replicas, advice=UNSENT)

    def updated(self, reducer: Reducer, indices: Sequence[Any], weights: Sequence[Any]) -> None:
        """Count one step. If the settings say so for this step, compare ``weights`` between the ranks.

        ``weights`` are the arrays that the step has updated, and ``indices`` are their indices in the optimizer.
        ``reducer`` is the optimizer's reducer.
        """
        self._arrays = [(f"index {index}", one) for index, one in zip(indices, weights, strict=True)]
        try:
            self._verifier.stepped(reducer.job, reducer.reduction.process_set.process_set_id or 0)
        finally:
            self._arrays = []

    def _replicas(self) -> list[Replica]:
        return [_replica(name, array) for name, array in self._arrays]


def _replica(name: str, array: Any) -> Replica:
    """Return the Replica that describes ``array`` for a comparison between ranks.

    Its attribute ``on_host`` is False even for an array in host memory, so that the control thread does not read the
    array. A thread that reads the array waits for MXNet's engine, and the control thread must not wait for it.
    """
    dense = array if array.stype == "default" else array.tostype("default")

    def host() -> tuple[int, Any]:
        values = dense.asnumpy()
        return values.ctypes.data, values

    kind = getattr(dense.dtype, "__name__", str(dense.dtype))
    size = dense.size * (2 if kind == "bfloat16" else np.dtype(dense.dtype).itemsize)
    return Replica(name, kind, tuple(dense.shape), size, host, on_host=False)
