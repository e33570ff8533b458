"""What users write for sizes, operations and types, and what is refused."""

from __future__ import annotations

import pytest
from ddl_doctor.bench.plan import (
    DTYPES,
    OPERATIONS,
    SIZES,
    parse_dtype,
    parse_operations,
    parse_sizes,
)
from ddl_doctor.sizes import exact_size


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", (4,)),
        ("4,64K,1M", (4, 65536, 1 << 20)),
        (" 1 KiB , 2kb,3k,1G ", (1024, 2048, 3072, 1 << 30)),
        ("4,4,8", (4, 8)),
        ("16G", (1 << 34,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    """Powers of 1024, spaces and B allowed, each size once, in the order given."""
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", ",", "0", "-4", "4X", "1.5M", "K", "17G", "4;8"])
def test_sizes_that_are_none(text: str) -> None:
    """One line that names the option."""
    with pytest.raises(ValueError, match=r"^--sizes .*"):
        parse_sizes(text)


@pytest.mark.parametrize("nbytes", [1, 4, 1000, 1024, 1536, 65536, 1 << 20, 3 << 20, 1 << 30])
def test_a_size_is_shown_as_it_may_be_written(nbytes: int) -> None:
    """What the table shows can be copied into --sizes."""
    assert parse_sizes(exact_size(nbytes)) == (nbytes,)


def test_default_sizes_reach_from_one_number_to_64_mib() -> None:
    """The list that the option's help shows."""
    sizes = parse_sizes(SIZES)
    assert (sizes[0], sizes[-1]) == (4, 64 << 20)
    assert list(sizes) == sorted(sizes)


def test_operations() -> None:
    """Any case, each once; another word is refused with the list."""
    assert parse_operations("Allreduce, alltoall,allreduce") == ("allreduce", "alltoall")
    assert parse_operations(",".join(OPERATIONS)) == tuple(OPERATIONS)
    with pytest.raises(ValueError, match="'reduce' is not one of allreduce, allgather"):
        parse_operations("reduce")


@pytest.mark.parametrize(
    ("text", "label"),
    [("f32", "float32"), ("F16", "float16"), ("bf16", "bfloat16"), ("i64", "int64"), ("uint8", "uint8")],
)
def test_dtypes(text: str, label: str) -> None:
    """The short name or the field's."""
    assert parse_dtype(text) == label


def test_no_other_dtype() -> None:
    """Bool is carried by ddl, but its sums are no sums."""
    assert "bool" not in DTYPES.values()
    with pytest.raises(ValueError, match="--dtype bool is not one of u8, i8"):
        parse_dtype("bool")
