"""Tests the collectives under Horovod's names: arguments and their order, process sets, compression, refusals."""

from __future__ import annotations

import inspect
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest

from ddlcore.testing import run_world

REDUCTION = ["average", "name", "priority", "prescale_factor", "postscale_factor", "process_set", "op"]
SCATTER = ["op", "name", "priority", "process_set", "prescale_factor", "postscale_factor"]
MOVE = ["name", "priority", "process_set"]


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("allreduce", ["tensor", *REDUCTION]),
        ("allreduce_", ["tensor", *REDUCTION]),
        ("grouped_allreduce", ["tensors", *REDUCTION]),
        ("grouped_allreduce_", ["tensors", *REDUCTION]),
        ("allgather", ["tensor", *MOVE]),
        ("grouped_allgather", ["tensors", *MOVE]),
        ("broadcast", ["tensor", "root_rank", *MOVE]),
        ("broadcast_", ["tensor", "root_rank", *MOVE]),
        ("alltoall", ["tensor", "splits", *MOVE]),
        ("reducescatter", ["tensor", *SCATTER]),
        ("grouped_reducescatter", ["tensors", *SCATTER]),
    ],
)
def test_arguments_stand_in_horovods_order(verb: str, arguments: list[str]) -> None:
    """Arguments have Horovod's order, and ddl's own arguments come last."""
    found = list(inspect.signature(getattr(ddl, verb)).parameters)
    assert found[: len(arguments)] == arguments
    assert set(found[len(arguments) :]) <= {"compression"}


def test_process_sets() -> None:
    """Only the members call, and roots are ranks of the world."""

    def play(rank: int, job: Any) -> None:
        odd = ddl.add_process_set([1, 2])
        if rank:
            array = mx.nd.full((2,), float(rank))
            assert ddl.allreduce(array, op=ddl.Sum, process_set=odd).asnumpy().tolist() == [3.0, 3.0]
            assert ddl.broadcast(array, 2, process_set=odd).asnumpy().tolist() == [2.0, 2.0]
            assert ddl.allgather(array, process_set=odd).shape == (4,)
            with pytest.raises(ValueError, match="root_rank=0"):
                ddl.broadcast(array, 0, process_set=odd)
            ddl.allreduce_(array, name="left", process_set=odd)  # submitted before the set is removed
        assert ddl.remove_process_set(odd)

    run_world(3, play)


class Halving:
    """A user's own compressor."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, float]:
        return tensor * 0.5, 2.0

    @staticmethod
    def decompress(tensor: Any, ctx: float) -> Any:
        return tensor * ctx


@pytest.mark.parametrize(
    "compression", [ddl.Compression.none, ddl.Compression.fp16, ddl.Compression.bf16, "bf16", Halving]
)
def test_compression(compression: Any) -> None:
    """float32 values come back as float32 and approximately equal."""

    def play(rank: int, job: Any) -> None:
        array = mx.nd.arange(8.0) * (rank + 1)
        group = ddl.grouped_allreduce([array, array], op=ddl.Sum, compression=compression)
        part = ddl.reducescatter(array, op=ddl.Sum, compression=compression)
        whole = np.arange(8.0) * 3
        for found, expected in ((group[0], whole), (group[1], whole), (part, whole[4 * rank : 4 * rank + 4])):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found.asnumpy(), expected, rtol=0.01)

    run_world(2, play)


def test_compressors_methods_are_horovods() -> None:
    """compress and decompress can be called directly; they leave types other than floats unchanged."""
    for one in (ddl.Compression.fp16, ddl.Compression.bf16):
        for array in (mx.nd.arange(4.0), mx.nd.arange(4.0).astype("int32")):
            packed, ctx = one.compress(array)
            assert (packed is array) == (array.dtype == np.int32)
            back = one.decompress(packed, ctx)
            assert back.dtype == array.dtype
            assert back.astype("float32").asnumpy().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_wrong_arguments_are_refused_at_the_call() -> None:
    """Invalid arguments raise ValueError in the user's thread, and the job goes on."""

    def play(rank: int, job: Any) -> None:
        array = mx.nd.ones((4,))
        with pytest.raises(ValueError, match="splits"):
            ddl.alltoall(array, splits=mx.nd.array([2.0, 2.0]))
        with pytest.raises(ValueError, match="do not add up"):
            ddl.alltoall(array, splits=[1, 1])
        with pytest.raises(ValueError, match="supersedes"):
            ddl.allreduce(array, average=True, op=ddl.Sum)
        with pytest.raises(ValueError, match="Adasum"):
            ddl.allreduce(array, op=ddl.Adasum)
        with pytest.raises(ValueError, match="tostype"):
            ddl.allreduce_(array.reshape((2, 2)).tostype("row_sparse"))
        with pytest.raises(ValueError, match="is empty"):
            ddl.grouped_allreduce([])
        with pytest.raises(ValueError, match="no handle"):
            ddl.synchronize(array)
        rows, received = ddl.alltoall(array, splits=mx.nd.array([2, 2], dtype="int32"), name="good")
        assert rows.shape == (4,)
        assert received.dtype == np.int32

    run_world(2, play)


def test_built_questions() -> None:
    """Horovod's questions have answers; those about MXNet's build are answered by MXNet."""
    assert not ddl.cuda_built()
    assert not ddl.rocm_built()
    assert not ddl.ddl_built()
    assert isinstance(ddl.nccl_built(), int)
