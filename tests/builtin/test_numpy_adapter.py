"""The numpy adapter, beyond the conformance suite: what it refuses, and the layouts it tells."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.contracts.transport import Memory, view
from ddlcore.types import DType

adapter = NumpyAdapter()


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, kind) for kind in ("object", "datetime64[s]", "U3", "longdouble", "clongdouble")]
    + [np.zeros(2, [("a", "f4")])],
    ids=lambda array: str(array.dtype),
)
def test_types_that_ddl_does_not_carry(array: Any) -> None:
    """ValueError that names the type and those that will do."""
    with pytest.raises(ValueError, match=re.escape(f"{array.dtype.name} is not supported; ddl carries uint8")):
        adapter.buffer(array, elementwise=True)


@pytest.mark.parametrize("kind", [">f4", ">i8", ">u2", ">f2", ">c8", ">u4"])
def test_foreign_byte_order(kind: str) -> None:
    """Refused, with the conversion that helps; after it the array is taken."""
    array = np.arange(3).astype(kind)
    with pytest.raises(ValueError, match=r"foreign byte order; pass array.astype\('(float|int|uint|complex)"):
        adapter.buffer(array, elementwise=True)
    assert adapter.buffer(array.astype(array.dtype.name), elementwise=True).label == array.dtype.name


@pytest.mark.parametrize("thing", [[1.0, 2.0], 3, np.float32(3), "text", None], ids=repr)
def test_what_is_no_array(thing: Any) -> None:
    """Refused, with the way to make one."""
    with pytest.raises(ValueError, match=r"not (list|int|float32|str|NoneType); convert it with np.asarray"):
        adapter.buffer(thing, elementwise=True)


def test_a_masked_array_is_refused() -> None:
    """Its mask would be lost without a word."""
    masked = np.ma.masked_equal(np.array([1.0, 2.0]), 2.0)  # type: ignore[no-untyped-call, unused-ignore]
    with pytest.raises(ValueError, match="not MaskedArray"):
        adapter.buffer(masked, elementwise=True)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(8)[::2],
        np.zeros(8)[::-1],
        np.broadcast_to(np.zeros(3), (2, 3)),
        np.zeros((4, 6))[:, 1:3],
        np.zeros((4, 6)).T[::2],
    ],
    ids=["step", "backwards", "broadcast", "columns", "turned"],
)
@pytest.mark.parametrize("elementwise", [True, False])
def test_arrays_that_do_not_fill_their_memory(array: Any, elementwise: bool) -> None:
    """Refused, naming the call that makes them contiguous."""
    with pytest.raises(ValueError, match=r"not contiguous; pass np\.ascontiguousarray\(array\)"):
        adapter.buffer(array, elementwise=elementwise)


def test_an_array_that_begins_within_an_element() -> None:
    """Refused: compiled code reads whole elements at their own multiple."""
    array = np.zeros(17, np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match=r"middle of an element; pass a copy of it \(.copy\(\)\)"):
        adapter.buffer(array, elementwise=True)
    assert adapter.buffer(array.copy(), elementwise=True).count == 4


def test_a_read_only_array_is_read() -> None:
    """As an input it is as good as any."""
    array = np.arange(4.0)
    array.flags.writeable = False
    buffer = adapter.buffer(array, elementwise=True)
    assert bytes(view(buffer.address, buffer.nbytes)) == array.tobytes()


@given(st.lists(st.integers(0, 3), max_size=4), st.randoms(use_true_random=False), st.sampled_from(["f4", "i8", "?"]))
def test_every_permutation_is_dense(extents: list[int], random: Any, kind: str) -> None:
    """The strides, in elements, give back the array; axes of one element do not tell layouts apart."""
    axes = list(range(len(extents)))
    random.shuffle(axes)
    array = np.arange(int(np.prod(extents))).astype(kind).reshape(extents).transpose(axes)
    buffer = adapter.buffer(array, elementwise=True)
    flat = np.frombuffer(view(buffer.address, buffer.nbytes), kind)
    if buffer.strides is None:
        seen = flat.reshape(buffer.shape)
        assert array.flags.c_contiguous
    else:
        seen = np.lib.stride_tricks.as_strided(
            flat, buffer.shape, [stride * array.itemsize for stride in buffer.strides]
        )
        assert all(stride == 1 for stride, extent in zip(buffer.strides, buffer.shape) if extent == 1)
    assert np.array_equal(seen, array)


def test_adopted_bfloat16_needs_no_array_of_its_kind() -> None:
    """Where ``like`` is of another type, the type comes from ml_dtypes."""
    memory = Memory(4)
    view(memory.address, 4)[:] = bytes.fromhex("803f0040")  # 1 and 2
    array = adapter.adopt(memory, (2,), DType.BF16, np.zeros(1, np.uint8))
    assert array.dtype.name == "bfloat16"
    assert array.astype(np.float32).tolist() == [1.0, 2.0]


def test_bfloat16_without_ml_dtypes() -> None:
    """The package is looked up only when it is needed, and then its absence is one clear line."""
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.contracts.transport import Memory
from ddlcore.types import DType
print(NumpyAdapter().buffer(np.zeros(2), elementwise=True).count)
try:
    NumpyAdapter().adopt(Memory(4), (2,), DType.BF16, np.zeros(1))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines() == ["2", "numpy has no bfloat16 of its own; pip install ml_dtypes"]
