"""Which gradients are joined into a bucket, and in which groups they are sent."""

from __future__ import annotations

from itertools import chain

from ddl_tf.buckets import MOST_GROUPS, SMALL_BYTES, GradientBucket, GradientLook, cut, pack
from hypothesis import given
from hypothesis import strategies as st

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=60)


def looks(shapes: list[tuple[int, ...]], dtype: str = "float32") -> list[GradientLook]:
    return [GradientLook(dtype, 4, shape) for shape in shapes]


def test_small_tensors_that_are_alike_but_for_the_rows_travel_as_they_are() -> None:
    shapes = [(64, 64), (64,), (64, 64), (10,), (8, 64)]
    assert pack(looks(shapes), [4, 3, 2, 1, 0]) == [GradientBucket((4, 2, 0), (64,)), GradientBucket((3, 1), ())]


def test_a_small_tensor_without_its_like_is_flattened() -> None:
    assert pack(looks([(3, 3, 5), (7,), ()]), [0, 1, 2]) == [GradientBucket((0, 1, 2), ())]


def test_large_tensors_and_those_of_unknown_shape_travel_alone() -> None:
    large = SMALL_BYTES // 4 + 1
    assert pack([*looks([(large,), (5,)]), GradientLook("float32", 4, None)], [0, 1, 2]) == [
        GradientBucket((0,)),
        GradientBucket((2,)),
        GradientBucket((1,), ()),
    ]


def test_types_do_not_mix() -> None:
    mixed = [GradientLook("float32", 4, (5,)), GradientLook("float16", 2, (5,))]
    assert pack(mixed, [0, 1]) == [GradientBucket((0,), ()), GradientBucket((1,), ())]


@given(SHAPES)
def test_each_tensor_is_in_one_parcel_and_its_rows_are_what_it_brings(shapes: list[tuple[int, ...]]) -> None:
    described = looks(shapes)
    buckets = pack(described, range(len(shapes)))
    assert sorted(chain.from_iterable(bucket.members for bucket in buckets)) == list(range(len(shapes)))
    for bucket in buckets:
        if bucket.inner is not None:
            width = 1
            for extent in bucket.inner:
                width *= extent
            brought = sum(described[i].nbytes // 4 for i in bucket.members)
            assert sum(bucket.rows(described[i]) for i in bucket.members) * width == brought


@given(SHAPES, st.integers(0, 4000), st.integers(1, 8000))
def test_runs_keep_the_order_and_are_few(shapes: list[tuple[int, ...]], first: int, most: int) -> None:
    described = looks(shapes)
    places = list(reversed(range(len(shapes))))
    runs = cut(described, places, first, most)
    assert list(chain.from_iterable(runs)) == places
    assert len(runs) <= MOST_GROUPS and all(runs)


def test_the_first_run_is_small_and_the_others_fill_a_batch() -> None:
    described = looks([(1000,)] * 10)
    assert cut(described, list(range(10)), 4000, 12000) == [[0], [1, 2, 3], [4, 5, 6], [7, 8, 9]]
