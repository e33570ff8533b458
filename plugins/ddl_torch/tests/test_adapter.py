"""The torch adapter passes the standard suite, and refuses unsupported tensors with an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddl_torch.adapter import TorchAdapter
from ddl_torch.conformance import TorchSuite

from ddlcore.contracts.transport import Memory
from ddlcore.types import DType


class TestTorchAdapter(TorchSuite):
    """The standard suite, as `ddl conform torch` runs it."""


@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.zeros(3, dtype=torch.complex32), "complex32 is not supported"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.zeros(3, dtype=torch.complex64)[::2], "contiguous"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dequantize"),
        (lambda: torch.zeros(3, device="meta"), r"\.cpu\(\)"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.zeros(3, dtype=torch.complex64, device="meta"), r"\.cpu\(\)"),
        (lambda: torch.eye(3, dtype=torch.complex64).to_sparse(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "dequantize"),
        (lambda: torch.zeros(1).expand(5), "contiguous"),
        (lambda: [1.0], "as_tensor"),
    ],
    ids=[
        "sparse",
        "pairs16",
        "conjugated",
        "gaps",
        "quantized",
        "meta",
        "negated",
        "meta-complex",
        "sparse-complex",
        "quint8",
        "expanded",
        "list",
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated, not gone
def test_refusals(make: Any, way_out: str) -> None:
    """An unsupported tensor raises ValueError, which says what to call."""
    with pytest.raises(ValueError, match=way_out):
        TorchAdapter().buffer(make(), elementwise=True)


def test_channels_last_is_dense() -> None:
    """A channels-last tensor is described with its strides; collectives that need rows refuse it."""
    tensor = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    adapter = TorchAdapter()
    assert adapter.buffer(tensor, elementwise=True).strides == (60, 1, 15, 3)
    assert adapter.allocate(tensor).stride() == tensor.stride()
    with pytest.raises(ValueError, match="contiguous"):
        adapter.buffer(tensor, elementwise=False)


def test_parameters_are_taken_for_their_values() -> None:
    """A parameter's memory is used directly, and tensors allocated like it require no gradient."""
    parameter = torch.nn.Parameter(torch.ones(3))
    adapter = TorchAdapter()
    assert adapter.buffer(parameter, elementwise=True).address == parameter.data_ptr()
    made = adapter.allocate(parameter)
    assert type(made) is torch.Tensor
    assert not made.requires_grad
    adapter.copy(torch.zeros(3), parameter)
    assert parameter.tolist() == [0.0] * 3


def test_adopted_memory_may_be_written() -> None:
    """A tensor made of adopted memory is an ordinary one and uses that memory itself."""
    memory = Memory(12)
    tensor = TorchAdapter().adopt(memory, (3,), DType.F32, torch.zeros(1))
    tensor.fill_(2.0)
    assert tensor.data_ptr() == memory.address
    assert tensor.tolist() == [2.0] * 3
