"""Passes MXNet parameters to the core, which compares them between ranks; knows no gradient."""

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
    """Check that all members of ``process_set`` have bitwise equal parameters; every member must call it.

    ``params``: a block or its ``collect_params()``, a dict of names and NDArrays (``module.get_params()`` returns such
    dicts), or an iterable of NDArrays. Parameters of a block are compared by their position, because Gluon's names
    differ between ranks; parameters without a gradient (running statistics) are skipped, because each rank has its own.
    Raises ReplicasDiffer on every member if an array differs or if the ranks have different arrays. Raises ValueError
    for anything else in ``params``, and for a parameter that has no values yet.
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
    """Return the verifier that compares a DistributedTrainer's parameters between ranks.

    The settings say after which steps it does so.
    """
    mine = weakref.ref(trainer)  # weak: the job holds the verifier, which must not keep the parameters alive

    def replicas() -> list[Replica]:
        there = mine()
        return [] if there is None else [_replica(name, array) for name, array in there.trained()]

    return Verifier("DistributedTrainer", replicas, advice=UNSENT)


class UpdateCheck:
    """A check that compares between ranks the arrays which one call of a DistributedOptimizer has updated."""

    def __init__(self) -> None:
        # Filled within ``updated`` only: the job holds this object, which must not keep the arrays alive.
        self._arrays: list[tuple[str, Any]] = []
        self._verifier = Verifier("DistributedOptimizer", self._replicas, advice=UNSENT)

    def updated(self, reducer: Reducer, indices: Sequence[Any], weights: Sequence[Any]) -> None:
        """Count one step, in which ``weights`` were updated, and compare them if the settings name this step.

        ``indices`` are those by which the optimizer knows the arrays.
        """
        self._arrays = [(f"index {index}", one) for index, one in zip(indices, weights, strict=True)]
        try:
            self._verifier.stepped(reducer.job, reducer.reduction.process_set.process_set_id or 0)
        finally:
            self._arrays = []

    def _replicas(self) -> list[Replica]:
        return [_replica(name, array) for name, array in self._arrays]


def _replica(name: str, array: Any) -> Replica:
    """Return the description of an array for comparison.

    ``on_host`` is False even for arrays in host memory: reading an array waits for MXNet's engine, and the control
    thread must not wait for the engine.
    """
    dense = array if array.stype == "default" else array.tostype("default")

    def host() -> tuple[int, Any]:
        values = dense.asnumpy()
        return values.ctypes.data, values

    kind = getattr(dense.dtype, "__name__", str(dense.dtype))
    size = dense.size * (2 if kind == "bfloat16" else np.dtype(dense.dtype).itemsize)
    return Replica(name, kind, tuple(dense.shape), size, host, on_host=False)
