"""Horovod's collectives on TensorFlow tensors, eagerly, in functions and in sessions: values, shapes and refusals."""

from __future__ import annotations

from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf

from ddlcore.testing import oracle
from ddlcore.types import DType
from plugins.ddl_tf.tests.worlds import MODES, SIZE, evaluate, ranks

pytestmark = pytest.mark.timeout(360)


def own(rank: int, *shape: int) -> Any:
    return tf.fill(shape or (4,), float(rank + 1))


@MODES
def test_allreduce(mode: str) -> None:
    """Allreduce averages by default; scale factors, every op and compression give the right values."""

    def build(x: Any) -> list[Any]:
        return [
            ddl.allreduce(x),
            ddl.allreduce(x, name="sum", op=ddl.Sum),
            ddl.allreduce(x, op=ddl.Sum, prescale_factor=2.0, postscale_factor=0.5),
            ddl.allreduce(x, op=ddl.Min),
            ddl.allreduce(x, op=ddl.Max),
            ddl.allreduce(x, op=ddl.Product),
            ddl.allreduce(x, None, "/cpu:0", "cpu", ddl.Compression.fp16, ddl.Sum),
        ]

    def play(rank: int) -> list[float]:
        return [float(result[0]) for result in evaluate(mode, build, own(rank))]

    assert ranks(play) == [[2.0, 6.0, 6.0, 1.0, 3.0, 6.0, 6.0]] * SIZE


@MODES
def test_every_dtype(mode: str) -> None:
    """One group may have all of ddl's types, including bfloat16 and bool; scalars and empty tensors work too."""
    kinds = [(dtype, shape) for dtype in DType for shape in ((), (0,), (2, 3))]

    def build(*tensors: Any) -> Any:
        return ddl.grouped_allreduce(tensors, op=ddl.Max), ddl.grouped_allgather([t for t in tensors if t.shape.rank])

    def values(rank: int) -> list[Any]:
        return [oracle.values(d, int(np.prod(s)), rank).reshape(s) for d, s in kinds]

    def play(rank: int) -> None:
        reduced, gathered = evaluate(mode, build, *values(rank))
        everyones = list(zip(*(values(r) for r in range(SIZE))))
        for result, inputs in zip(reduced, everyones):
            assert np.asarray(result).dtype == inputs[0].dtype
            np.testing.assert_array_equal(result, oracle.reduce([np.asarray(i) for i in inputs], ddl.Max))
        for result, inputs in zip(gathered, [i for i in everyones if i[0].ndim]):
            np.testing.assert_array_equal(result, np.concatenate(inputs))

    ranks(play)


CARRIED = ("complex64", "complex128", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn")


@MODES
def test_types_that_travel_as_others(mode: str) -> None:
    """Complex tensors can be added and averaged. Tensors of all these types can be moved, and no bit changes."""

    def build(*tensors: Any) -> Any:
        sums = [ddl.allreduce(t, op=op) for t in tensors[:2] for op in (ddl.Sum, ddl.Average)]
        gathered = ddl.grouped_allgather(tensors)
        spread = [ddl.broadcast(t, SIZE - 1) for t in tensors]
        return sums, gathered, spread, [ddl.alltoall(t) for t in tensors]

    def values(rank: int) -> list[Any]:
        random = np.random.default_rng(rank)
        pairs = random.normal(size=(2, SIZE, 2)).astype(np.float32)  # exact in complex64, too
        raw = random.integers(0, 120, (SIZE, 2), np.uint8)
        types = [tf.dtypes.as_dtype(name).as_numpy_dtype for name in CARRIED]
        return [
            (pairs[0] + 1j * pairs[1]).astype(kind)
            if np.dtype(kind).kind == "c"
            else raw.view(kind)
            if np.dtype(kind).itemsize == 1
            else np.iinfo(kind).max - raw.astype(kind)
            for kind in types
        ]

    def play(rank: int) -> None:
        sums, gathered, spread, exchanged = evaluate(mode, build, *values(rank))
        everyones = list(zip(*(values(r) for r in range(SIZE))))
        for i, inputs in enumerate(everyones[:2]):
            for result, divisor in zip(sums[2 * i : 2 * i + 2], (1, SIZE)):
                assert np.asarray(result).dtype == inputs[0].dtype
                np.testing.assert_allclose(result, sum(inputs) / divisor, rtol=1e-5, atol=1e-5)
        for name, inputs, whole, copy, parts in zip(CARRIED, everyones, gathered, spread, exchanged, strict=True):
            wanted = (np.concatenate(inputs), inputs[-1], np.stack([each[rank] for each in inputs]))
            for found, expected in zip((whole, copy, parts), wanted, strict=True):
                assert np.asarray(found).dtype == expected.dtype, name
                assert np.asarray(found).tobytes() == expected.tobytes(), name

    ranks(play)


@MODES
def test_gather_and_broadcast(mode: str) -> None:
    """Allgather joins different numbers of rows; broadcast gives the root's values.

    Static shapes are as complete as possible.
    """

    def build(x: Any) -> list[Any]:
        gathered, sent = ddl.allgather(x), ddl.broadcast(x[:1], 1)
        if mode != "eager":
            assert (gathered.shape.as_list(), sent.shape.as_list()) == ([None, 2], [1, 2])
        return [gathered, *ddl.grouped_allgather([x, x[:1]], "group"), sent]

    def play(rank: int) -> None:
        everyones = np.concatenate([np.full((r + 1, 2), r + 1.0) for r in range(SIZE)])
        alone, first, second, sent = evaluate(mode, build, own(rank, rank + 1, 2))
        np.testing.assert_array_equal(alone, everyones)
        np.testing.assert_array_equal(first, everyones)
        assert second[:, 0].tolist() == [1.0, 2.0, 3.0]
        assert sent.tolist() == [[2.0, 2.0]]

    ranks(play)


@MODES
def test_alltoall(mode: str) -> None:
    """Without splits only the rows are returned.

    With splits also an int32 tensor of how many rows came from each rank.
    """

    def build(x: Any, splits: Any) -> Any:
        return ddl.alltoall(x), *ddl.alltoall(x, splits), *ddl.alltoall(x, [1, 2, 0])

    def play(rank: int) -> None:
        even, rows, received, _, listed = evaluate(mode, build, own(rank, 3), tf.constant([0, 1, 2], tf.int32))
        assert even.tolist() == [1.0, 2.0, 3.0]
        assert rows.tolist() == [1.0] * rank + [2.0] * rank + [3.0] * rank
        assert (received.dtype, received.tolist()) == (np.int32, [rank] * SIZE)
        assert listed.tolist() == [[1] * SIZE, [2] * SIZE, [0] * SIZE][rank]

    ranks(play)


@MODES
def test_reducescatter(mode: str) -> None:
    """Reducescatter averages by default, gives the first ranks one more row, and may be grouped and scaled."""

    def build(x: Any) -> list[Any]:
        return [
            ddl.reducescatter(x),
            *ddl.grouped_reducescatter([x, x], op=ddl.Sum, prescale_factor=0.5),
            ddl.reducescatter(x, "cpu", ddl.Compression.bf16, ddl.Max, "named"),
        ]

    def play(rank: int) -> None:
        mine = [2, 1, 1][rank]
        results = evaluate(mode, build, own(rank, 4, 2))
        assert [result.tolist() for result in results] == [[[v] * 2] * mine for v in (2.0, 3.0, 3.0, 3.0)]

    ranks(play)


@MODES
def test_slices(mode: str) -> None:
    """IndexedSlices stay slices: all ranks' rows are joined, and divided for Average.

    A group may contain dense tensors too.
    """

    def slices(rows: Any) -> Any:
        count = rows.shape[0]
        return tf.IndexedSlices(rows, tf.range(count, dtype=tf.int64), tf.constant([5, 2], tf.int64))

    def build(rows: Any, x: Any) -> Any:
        average, total = ddl.allreduce(slices(rows)), ddl.allreduce(slices(rows), op=ddl.Sum)
        mixed = ddl.grouped_allreduce([x, slices(rows), x], op=ddl.Sum)
        assert isinstance(mixed[1], tf.IndexedSlices)
        assert average.dense_shape is not None
        return [tf.convert_to_tensor(s) for s in (average, total, *mixed)], total.indices

    def play(rank: int) -> None:
        (average, total, first, both, last), indices = evaluate(mode, build, own(rank, rank + 1, 2), own(rank))
        expected = [6.0, 5.0, 3.0, 0.0, 0.0]
        assert total[:, 0].tolist() == expected
        assert both[:, 0].tolist() == expected
        np.testing.assert_allclose(average[:, 0], np.array(expected) / SIZE, rtol=1e-6)
        assert indices.tolist() == [0, 0, 1, 0, 1, 2]
        assert first.tolist() == last.tolist() == [6.0] * 4

    ranks(play)


@MODES
def test_who_we_are(mode: str) -> None:
    """Ranks and sizes are int32 scalars; the size of a process set is available too."""

    def build() -> list[Any]:
        return [
            ddl.size_op(),
            ddl.rank_op(),
            ddl.local_size_op(),
            ddl.local_rank_op(),
            ddl.size_op(1),
            ddl.process_set_included_op(),
            ddl.process_set_included_op(1, name="included"),
        ]

    def play(rank: int) -> list[Any]:
        ddl.add_process_set([0, 2])
        results = evaluate(mode, build)
        assert {result.dtype for result in results} == {np.dtype("int32")}
        return [int(result) for result in results]

    assert ranks(play) == [[3, r, 3, r, 2, 1, int(r != 1)] for r in range(SIZE)]


@MODES
def test_process_sets(mode: str) -> None:
    """Only members call a process set's collectives; root ranks are ranks of the world."""

    def play(rank: int) -> Any:
        pair = ddl.add_process_set([0, 2])
        if rank == 1:
            with pytest.raises(ValueError, match="not a member"):
                ddl.allreduce(own(rank), process_set=pair)
            return None

        def build(x: Any) -> list[Any]:
            return [ddl.allreduce(x, op=ddl.Sum, process_set=pair), ddl.broadcast(x, 2, process_set=pair)]

        return [result.tolist() for result in evaluate(mode, build, own(rank, 1))]

    assert ranks(play) == [[[4.0], [3.0]], None, [[4.0], [3.0]]]


@MODES
def test_join(mode: str) -> None:
    """After a join, the other ranks' allreduce continues with values that change nothing.

    All ranks get the last rank to join.
    """

    def play(rank: int) -> tuple[list[float], int]:
        sums = []
        for _ in range(rank + 1):
            sums += evaluate(mode, lambda x: ddl.allreduce(x, op=ddl.Sum, name="step"), own(rank, 1), times=1).tolist()
        last = evaluate(mode, ddl.join, times=1)
        assert last.dtype == np.int32
        return sums, int(last)

    assert ranks(play) == [([6.0], 2), ([6.0, 5.0], 2), ([6.0, 5.0, 3.0], 2)]


def test_a_barrier_in_a_function_keeps_its_place() -> None:
    """Operations before a barrier have run when it ends, and those after it begin after it."""
    seen: list[list[str]] = [[] for _ in range(SIZE)]

    def play(rank: int) -> None:
        class Noting:
            @staticmethod
            def compress(tensor: Any) -> tuple[Any, None]:
                def note(x: Any) -> Any:
                    seen[rank].append("before" if tensor.shape.rank == 1 else "after")
                    return x

                return tf.ensure_shape(tf.numpy_function(note, [tensor], tensor.dtype), tensor.shape), None

            @staticmethod
            def decompress(tensor: Any, ctx: None) -> Any:
                return tensor

        def build(x: Any) -> Any:
            first = ddl.allreduce(x, op=ddl.Sum, compression=Noting)
            ddl.barrier()
            return first, ddl.allreduce(x, op=ddl.Sum, name="second")

        for result in evaluate("function", build, own(rank)):
            assert result.tolist() == [6.0] * 4
        assert ddl.barrier() is None

    ranks(play)
    assert seen == [["before"] * 2] * SIZE


def test_results_nobody_asks_for() -> None:
    """In a tf.function a collective runs even if its result is unused: only one rank may print the result."""

    def play(rank: int) -> None:
        def step(x: Any) -> Any:
            average = ddl.allreduce(x)
            return average if rank == 0 else x

        assert tf.function(step)(own(rank)).numpy().tolist() == ([2.0] * 4 if rank == 0 else own(rank).numpy().tolist())

    ranks(play)


@pytest.mark.parametrize("mode", ["function", "session"])
def test_a_rank_may_have_more_in_its_graph(mode: str) -> None:
    """If only rank 0's graph has extra tensors, their names differ between ranks, but collectives are still matched."""

    def play(rank: int) -> None:
        def build(x: Any) -> Any:
            if rank == 0:
                x = tf.debugging.check_numerics(x + 0.0, "rank 0 looks")
            return ddl.allreduce(x * 2.0, op=ddl.Sum), ddl.allgather(x * 3.0)

        reduced, gathered = evaluate(mode, build, own(rank, 1))
        assert (reduced.tolist(), gathered.tolist()) == ([12.0], [3.0, 6.0, 9.0])

    ranks(play)


def test_tensors_that_are_not_computed_yet() -> None:
    """If eager operations run asynchronously, a collective waits for its inputs."""
    before = tf.config.experimental.get_synchronous_execution()
    tf.config.experimental.set_synchronous_execution(False)
    try:

        def play(rank: int) -> float:
            x = own(rank, 300, 300)
            for _ in range(5):
                x = tf.matmul(x, tf.eye(300))
            return float(ddl.allreduce(x, op=ddl.Sum)[7, 7])

        assert ranks(play) == [6.0] * SIZE
    finally:
        tf.config.experimental.set_synchronous_execution(before)


def test_loops_and_branches() -> None:
    """A collective may run repeatedly in loops and branches; in a session's loop, only once at a time."""
    v1 = tf.compat.v1

    def many(x: Any) -> Any:
        total = tf.TensorArray(tf.float32, 5)
        for i in tf.range(5):
            if i % 2 == 0:  # noqa: SIM108  # a branch of the graph
                total = total.write(i, ddl.allreduce(x[i], op=ddl.Sum))
            else:
                total = total.write(i, tf.zeros([]))
        return total.stack()

    def body(i: Any, total: Any, x: Any) -> Any:
        return i + 1, total.write(i, ddl.allreduce(x[i] * 2, op=ddl.Sum)), x

    def loop(x: Any, parallel: int) -> Any:
        start = [0, tf.TensorArray(tf.float32, 50), x]
        return v1.while_loop(lambda i, *_: i < 50, body, start, parallel_iterations=parallel)[1].stack()

    def play(rank: int) -> None:
        result = evaluate("function", many, own(rank, 5))
        assert result.tolist() == [6.0, 0.0, 6.0, 0.0, 6.0]
        assert evaluate("session", lambda x: loop(x, 1), own(rank, 50)).tolist() == [12.0] * 50
        with pytest.raises(tf.errors.InvalidArgumentError, match="parallel_iterations=1"):
            evaluate("session", lambda x: loop(x, 10), own(rank, 50))

    ranks(play)


def test_numpy_and_variables_are_tensors() -> None:
    """Everything that TensorFlow converts to tensors is accepted, and is not changed."""

    def play(rank: int) -> None:
        variable, array = tf.Variable(own(rank)), np.full(2, rank, np.int64)
        assert ddl.allreduce(variable, op=ddl.Sum).numpy().tolist() == [6.0] * 4
        assert ddl.allreduce(array, op=ddl.Sum).numpy().tolist() == [3] * 2
        assert ddl.allreduce([1.0, 2.0]).numpy().tolist() == [1.0, 2.0]
        assert variable.numpy().tolist() == own(rank).numpy().tolist()
        assert array.tolist() == [rank] * 2

    ranks(play)


def test_objects() -> None:
    """Objects are sent eagerly and while a graph is built; the session is not needed."""

    def play(rank: int) -> None:
        assert ddl.broadcast_object({"rank": rank}, 2) == {"rank": 2}
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            assert ddl.broadcast_object([rank], 1, session, "object") == [1]
            assert ddl.broadcast_object_fn(1, session, "again")(rank) == 1
            assert ddl.allgather_object((rank, None), session) == [(r, None) for r in range(SIZE)]

    ranks(play)


def test_a_users_compressor() -> None:
    """A user's compressor runs around the reduction, on tensors of the current mode."""

    class Halves:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return tf.cast(tensor, tf.float16), tensor.dtype

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            assert tensor.dtype is tf.float16
            return tf.cast(tensor, ctx)

    def play(rank: int) -> None:
        for mode in ("eager", "function", "session"):
            result = evaluate(mode, lambda x: ddl.grouped_allreduce([x, x], compression=Halves), own(rank))
            assert [(r.dtype, r.tolist()) for r in result] == [(np.float32, [2.0] * 4)] * 2

    ranks(play)


def test_the_built_in_compressors_work_on_tensors() -> None:
    """Scripts may call the built-in compressors themselves; integers are not changed."""
    for compression, short in ((ddl.Compression.fp16, tf.float16), (ddl.Compression.bf16, tf.bfloat16)):
        packed, ctx = compression.compress(tf.ones(2))
        assert packed.dtype is short
        assert compression.decompress(packed, ctx).dtype is tf.float32
        assert compression.compress(tf.ones(2, tf.int32))[1] is None
    assert ddl.Compression.none.decompress(*ddl.Compression.none.compress(tf.ones(2))).dtype is tf.float32
