"""In eager mode, errors are instances of ddl's and TensorFlow's classes.

In graphs, TensorFlow's errors contain our message.
"""

from __future__ import annotations

import pickle
from typing import Any

import ddl_tf as ddl
import pytest
import tensorflow as tf
from ddl_tf.errors import translated

from ddlcore.errors import Closed, DeadlineExceeded, MismatchError, NotInitialized, PeerLost
from plugins.ddl_tf.tests.worlds import evaluate, ranks

pytestmark = pytest.mark.timeout(360)


@pytest.mark.parametrize(
    ("error", "theirs"),
    [
        (ValueError("a"), tf.errors.InvalidArgumentError),
        (NotInitialized("b"), tf.errors.FailedPreconditionError),
        (MismatchError("c"), tf.errors.FailedPreconditionError),
        (Closed("d"), tf.errors.AbortedError),
        (DeadlineExceeded("e"), tf.errors.DeadlineExceededError),
        (PeerLost([1, 2], "died", "allreduce"), tf.errors.UnknownError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_both_classes(error: Exception, theirs: Any) -> None:
    """Either class catches the error; text and attributes are those of the original; the error can be pickled."""
    made: Any = translated(error)
    assert [isinstance(made, kind) for kind in (type(error), theirs)] == [True, True]
    assert str(made) == made.message == str(error)
    assert made.error_code == theirs(None, None, "").error_code
    assert type(made).__name__ == type(error).__name__
    assert translated(made) is made
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), str(again)) == (type(error), str(error))
    assert made.__dict__.items() >= error.__dict__.items()


def test_before_init() -> None:
    """Before ``init()``.

    A FailedPreconditionError that is also a ValueError as in Horovod, when a graph is built or run.
    """
    for error in (tf.errors.FailedPreconditionError, ValueError):
        with pytest.raises(error, match=r"init\(\)"):
            ddl.allreduce(tf.zeros(1))
    with pytest.raises(ValueError, match=r"init\(\)"):
        tf.function(lambda: ddl.rank_op())()


BAD: list[tuple[str, Any, str]] = [
    ("device", lambda x: ddl.allreduce(x, device_dense="/gpu:0"), "device_dense='/gpu:0'"),
    ("sparse device", lambda x: ddl.grouped_allreduce([x], device_sparse="cpu:1"), "device_sparse='cpu:1'"),
    ("root", lambda x: ddl.broadcast(x, 5), "root_rank=5"),
    ("scalar", lambda x: ddl.allgather(x[0]), r"reshape the scalar to \(1,\)"),
    ("splits", lambda x: ddl.alltoall(x, [1.0, 2.0]), "one-dimensional tensor of integers"),
    ("splits' sum", lambda x: ddl.alltoall(x, [1, 1]), "do not add up"),
    ("rows", lambda x: ddl.alltoall(x[:3]), "not divisible"),
    ("both", lambda x: ddl.allreduce(x, True, op=ddl.Sum), "op parameter supersedes average"),
    ("adasum", lambda x: ddl.allreduce(x, op=ddl.Adasum), "Adasum"),
    ("bool", lambda x: ddl.allreduce(x > 0), "average of bool"),
    ("dtype", lambda x: ddl.allreduce(tf.cast(x, tf.uint32)), "uint32 can be gathered"),
    ("none", lambda x: ddl.grouped_allreduce([x, None]), "entry 1 of the list of tensors is None"),
    ("empty", lambda x: ddl.grouped_allgather([]), "empty"),
    ("no list", lambda x: ddl.grouped_allgather(x), "takes a list"),
    ("compression", lambda x: ddl.allreduce(x, compression=3), "compression=3"),
]


def test_bad_arguments() -> None:
    """A wrong argument raises InvalidArgumentError, eagerly also ValueError; no rank waits, and the job continues."""

    def play(rank: int) -> None:
        for what, build, text in BAD:
            with pytest.raises(tf.errors.InvalidArgumentError, match=text) as eager:
                build(tf.ones(4))
            assert isinstance(eager.value, ValueError), what
            with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=text):
                evaluate("function", build, tf.ones(4))
        assert ddl.allreduce(tf.ones(1), op=ddl.Sum).numpy().tolist() == [2.0]

    ranks(play, 2)


@pytest.mark.parametrize(
    "device", ["", "cpu", "CPU", "/cpu:0", "cpu:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"]
)
def test_this_host_has_many_names(device: str) -> None:
    """All names of this host are accepted, for dense and for sparse tensors."""
    assert ranks(lambda rank: ddl.allreduce(tf.ones(1), None, device, device).numpy().tolist(), 1) == [[1.0]]


def test_slices_refuse_what_has_no_meaning() -> None:
    """IndexedSlices refuse other ops and scale factors, as in Horovod; the message says what to do instead."""
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))

    def play(rank: int) -> None:
        with pytest.raises(NotImplementedError, match="convert_to_tensor"):
            ddl.allreduce(slices, op=ddl.Max)
        with pytest.raises(NotImplementedError, match="prescale_factor"):
            ddl.allreduce(slices, prescale_factor=2.0)

    ranks(play, 1)


def test_ranks_that_disagree() -> None:
    """Every rank gets the table of who submitted what, eagerly and in graphs; the job continues."""

    def play(rank: int) -> None:
        def build(x: Any) -> Any:
            return ddl.allreduce(x, name="shapes")

        mine = tf.ones(rank + 1)
        with pytest.raises(tf.errors.FailedPreconditionError, match="ranks disagree") as eager:
            build(mine)
        assert isinstance(eager.value, ddl.HorovodInternalError)
        for mode in ("function", "session"):
            with pytest.raises(tf.errors.UnknownError, match=r"MismatchError: allreduce 'shapes'.*ranks disagree"):
                evaluate(mode, build, mine)
        assert ddl.allreduce(tf.ones(1), op=ddl.Sum).numpy().tolist() == [2.0]

    ranks(play, 2)


def test_a_lost_peer_is_named() -> None:
    """A lost peer raises PeerLost in eager mode, and TensorFlow's error with its text in a function that waits."""

    def play(rank: int) -> None:
        if rank == 1:
            ddl.shutdown()
            return
        with pytest.raises(tf.errors.UnknownError, match="PeerLost: rank 1 lost"):
            evaluate("function", lambda x: ddl.allreduce(x, name="alone"), tf.ones(1))
        with pytest.raises(ddl.PeerLost) as lost:
            ddl.allreduce(tf.ones(1), name="alone")
        assert lost.value.ranks == (1,)

    ranks(play, 2)


def test_xla_is_refused_before_anything_waits() -> None:
    """XLA is refused while the function is traced, with an error that says what to do.

    A compiled function beside the collectives is allowed.
    """

    def play(rank: int) -> None:
        for verb in (ddl.allreduce, lambda x: ddl.barrier()):
            with pytest.raises(tf.errors.InvalidArgumentError, match="leave jit_compile away there"):
                tf.function(verb, jit_compile=True)(tf.ones(1))
        double = tf.function(lambda x: x * 2, jit_compile=True)
        both = tf.function(lambda x: double(ddl.allreduce(double(x), op=ddl.Sum)))
        assert both(tf.ones(1)).numpy().tolist() == [4.0]

    ranks(play, 1)
