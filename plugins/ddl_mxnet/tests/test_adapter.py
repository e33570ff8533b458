"""The MXNet adapter passes the standard suite, and refuses unsupported arrays with an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ddl_mxnet  # first, because it patches numpy before MXNet is imported
import mxnet as mx
import numpy as np
import pytest
from ddl_conform.adapter_verbs import AdapterVerbs
from ddl_mxnet.adapter import MxnetAdapter
from ddl_mxnet.conformance import Arrays, MxnetSuite
from ddl_mxnet.engine import EngineOperations

from ddlcore.api import Operations
from ddlcore.contracts.transport import Memory, view
from ddlcore.testing import run_world
from ddlcore.types import DType

assert ddl_mxnet.__doc__
DTYPES = frozenset(DType) - {DType.U16, DType.I16}


@pytest.fixture(autouse=True)
def numpy_shapes() -> Iterator[None]:
    """Switch MXNet to NumPy's shapes in all threads: otherwise it has no scalars and no arrays without elements."""
    before = mx.util.set_np_shape(2)  # 2: in all threads
    yield
    mx.util.set_np_shape(before)


class TestMxnetAdapter(MxnetSuite):
    """The standard suite, as `ddl conform mxnet` runs it."""


@pytest.mark.long
class TestEngineOperations(Arrays, AdapterVerbs):
    """The suite for collectives of MXNet's engine, which waits for the arrays while the calls do not."""

    def on_ranks(self, function: Callable[[int, int, Operations], None]) -> None:
        operations = EngineOperations()
        for size in self.sizes:
            run_world(size, lambda rank, job: function(rank, job.size, operations), deadline_s=self.deadline_s)


@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (lambda: mx.nd.zeros((3, 2)).tostype("row_sparse"), r"row_sparse.*tostype\('default'\).*sparse_grad=False"),
        (lambda: mx.nd.zeros((3, 2)).tostype("csr"), r"csr.*tostype\('default'\)"),
        (lambda: [1.0], "mx.nd.array"),
        (lambda: mx.sym.Variable("x"), "Symbol.*hybridize"),
    ],
    ids=["row_sparse", "csr", "list", "symbol"],
)
@pytest.mark.parametrize("operations", [Operations(MxnetAdapter()), EngineOperations()], ids=["plain", "engine"])
def test_refusals(make: Any, way_out: str, operations: Operations) -> None:
    """An unsupported array raises ValueError, which says what to call."""
    with pytest.raises(ValueError, match=way_out):
        operations.adapter.buffer(make(), elementwise=True)


def test_the_class_of_arrays_is_kept() -> None:
    """Arrays of mx.np stay arrays of mx.np, whether made like one or from memory; other arrays do not become such."""
    adapter = MxnetAdapter()
    for like in (mx.nd.ones((3,)), mx.np.ones((3,))):
        assert type(adapter.allocate(like)) is type(like)
        assert type(adapter.adopt(Memory(12), (3,), DType.F32, like)) is type(like)


def test_a_buffer_waits_for_what_is_written_and_read() -> None:
    """After ``buffer`` the memory holds the values and may be written: no earlier operation reads it any more."""
    array = mx.nd.random.normal(shape=(700, 700))
    square = mx.nd.dot(array, array)
    later = mx.nd.dot(square, square)
    before = square.copy()
    buffer = MxnetAdapter().buffer(square, elementwise=True)
    view(buffer.address, buffer.nbytes)[:] = bytes(buffer.nbytes)
    np.testing.assert_allclose(later.asnumpy(), np.dot(before.asnumpy(), before.asnumpy()), rtol=1e-2, atol=1e-1)
    assert not square.asnumpy().any()


def test_layouts_of_onednn_are_seen() -> None:
    """An array that a convolution leaves in another layout is converted when it is waited for, and never misread."""
    data = mx.nd.random.normal(shape=(2, 16, 8, 8))
    weight = mx.nd.random.normal(shape=(32, 16, 3, 3))
    made = mx.nd.Convolution(data, weight, no_bias=True, kernel=(3, 3), num_filter=32)
    expected = mx.nd.Convolution(data, weight, no_bias=True, kernel=(3, 3), num_filter=32).asnumpy()
    buffer = MxnetAdapter().buffer(made, elementwise=True)
    found = np.frombuffer(view(buffer.address, buffer.nbytes), np.float32).reshape(expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_torch_computes_in_the_same_process() -> None:
    """MXNet and torch both compute, although each brings its own threading and matrix libraries."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    assert (torch.ones(99, 99) @ torch.ones(99, 99))[0, 0].item() == 99
    assert mx.nd.dot(mx.nd.ones((99, 99)), mx.nd.ones((99, 99)))[0, 0].asscalar() == 99
    assert (torch.ones(99, 99) @ torch.ones(99, 99))[0, 0].item() == 99
