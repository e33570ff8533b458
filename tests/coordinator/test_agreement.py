"""What ranks tell of their parameters is compared step by step; a difference is worded and told to all."""

from __future__ import annotations

import struct

import pytest

from ddlcore.coordinator.agreement import EXPLAIN_S, Agreement, distance, grouped
from ddlcore.errors import DdlInternalError, ReplicasDiffer
from ddlcore.messages.observing import Differ, Digests, Explain, Notice, Sample, Settled
from ddlcore.messages.ranks import WorldRank

NAMES = ("a (float32 2)", "b (float32 2)", "c (float32 2)")


def told(step: int, *digests: int, fatal: bool = True, label: str = "SGD", names: tuple[str, ...] = NAMES) -> Digests:
    packed = struct.pack(f"{len(digests)}q", *digests)
    return Digests(0, label, step, repr(names).encode(), packed, fatal, tensors=names)


def world(size: int) -> Agreement:
    return Agreement(size, {0: tuple(range(size)), 1: (1, 2)})


def test_equal_digests_are_answered_by_nothing() -> None:
    """A check that finds no difference costs each rank one message."""
    one = world(3)
    for step in (1, 5, 10):
        assert [one.hear(rank, told(step, 1, 2, 3)) for rank in range(3)] == [[], [], []]


def test_a_difference_names_tensor_ranks_and_steps() -> None:
    """The first tensor of two that differ, who has which, and the last step at which all agreed; every rank is told."""
    one = world(4)
    for rank in range(4):
        one.hear(rank, told(5, 1, 2, 3))
    for rank in (0, 1, 3):
        assert one.hear(rank, told(10, 1, 2, 3)) == []
    asked = one.hear(2, told(10, 1, 7, 8))
    assert asked == [(rank, Explain(0, "SGD", 10, 1)) for rank in range(4)]
    for rank in (0, 1, 2):
        assert one.sampled(rank, Sample("float32", struct.pack("2f", 1.0, 2.5 if rank == 2 else 2.0))) == []
    outgoing = one.sampled(3, Sample())
    assert [rank for rank, _ in outgoing] == [0, 1, 2, 3]
    differ = outgoing[0][1]
    assert isinstance(differ, Differ)
    assert (differ.tensor, differ.groups, differ.step, differ.agreed_step) == (NAMES[1], ((0, 1, 3), (2,)), 10, 5)
    assert differ.distances == ((2, 0.5),)
    for words in (
        "after its step 10",
        NAMES[1],
        "1 more differs",
        "rank 2 is alone",
        "agreed: 5",
        "rank 2 0.5",
        "next:",
    ):
        assert words in differ.text
    assert one.hear(0, told(15, 1, 2, 3)) == [], "the job is over"


def test_values_that_do_not_come_are_not_waited_for() -> None:
    """A rank that does not answer keeps nobody from being told, after some seconds or when it has gone."""
    one = world(2)
    one.hear(0, told(1, 1, 2, 3))
    one.hear(1, told(1, 1, 2, 4))
    assert one.look(100.0) == []
    assert [type(message) for _, message in one.look(100.1 + EXPLAIN_S)] == [Differ, Differ]
    one = world(2)
    one.hear(0, told(1, 1, 2, 3))
    one.hear(1, told(1, 1, 2, 4))
    one.sampled(0, Sample())
    assert [rank for rank, _ in one.gone(1)] == [0]


def test_a_step_is_compared_when_all_that_still_can_have_told() -> None:
    """Who has left or joined is not waited for; who is merely late is; steps are judged in their order."""
    gone = world(3)
    gone.hear(0, told(5, 1, 2, 3))
    gone.hear(1, told(5, 1, 2, 4))
    assert [type(message) for _, message in gone.gone(2)] == [Explain, Explain]
    joined: set[WorldRank] = set()
    one = Agreement(2, {0: (0, 1)}, lambda: joined)
    one.hear(0, told(5, 1, 2, 3))
    one.hear(0, told(10, 1, 2, 3))
    assert one.settle(0) == [], "rank 1 may still tell of these steps"
    joined.add(1)
    assert one.look(1.0) == [(0, Settled())]


def test_a_warning_is_given_once_and_ends_nothing() -> None:
    """After the first step a difference is a line in the lowest rank's log, once an optimizer."""
    one = world(2)
    one.hear(0, told(1, 1, 2, 3, fatal=False))
    ((rank, notice),) = one.hear(1, told(1, 9, 2, 3, fatal=False))
    assert rank == 0
    assert isinstance(notice, Notice)
    assert NAMES[0] in notice.text
    assert "broadcast_parameters" in notice.text
    one.hear(0, told(2, 1, 2, 3, fatal=False))
    assert one.hear(1, told(2, 9, 2, 3, fatal=False)) == []
    assert one.differ is None


def test_other_tensors_are_a_difference_too() -> None:
    """Ranks that do not have the same parameters are shown how many each has, and the first that is another."""
    one = world(2)
    one.hear(0, told(1, 1, 2, 3))
    outgoing = one.hear(1, told(1, 1, 2, names=NAMES[:2]))
    differ = outgoing[0][1]
    assert isinstance(differ, Differ)
    assert differ.tensor == ""
    assert "rank 0: 3 tensors; number 2 is c (float32 2)" in differ.text
    assert "rank 1: 2 tensors; number 2 is nothing" in differ.text


def test_tensors_are_paired_by_name() -> None:
    """Ranks may have their parameters in different orders; the first that differs is in the order of the lowest rank."""
    one = world(2)
    one.hear(0, told(1, 1, 2, 3))
    assert one.hear(1, told(1, 3, 1, 2, names=(NAMES[2], *NAMES[:2]))) == []
    one.hear(0, told(2, 1, 2, 3))
    asked = one.hear(1, told(2, 4, 1, 5, names=(NAMES[2], *NAMES[:2])))
    assert asked == [(0, Explain(0, "SGD", 2, 1)), (1, Explain(0, "SGD", 2, 2))]


def test_optimizers_and_process_sets_are_compared_apart() -> None:
    """What differs between process sets, or between two optimizers, is no difference."""
    one = world(3)
    for rank in range(3):
        assert one.hear(rank, told(1, 1, 2, 3)) == []
        assert one.hear(rank, told(1, 4, 5, 6, label="SGD number 2")) == []
    of_two = [Digests(1, "SGD", 1, b"d", struct.pack("q", rank), True, tensors=("w",)) for rank in (1, 1)]
    assert one.hear(1, of_two[0]) == []
    assert one.hear(2, of_two[1]) == []


def test_digests_of_nothing_that_was_described_are_refused() -> None:
    """What makes no sense changes nothing."""
    one = world(2)
    with pytest.raises(DdlInternalError, match="did not describe"):
        one.hear(0, Digests(0, "SGD", 1, b"?", b"", True))
    with pytest.raises(DdlInternalError, match="did not describe"):
        one.hear(0, told(1, 1, 2))


def test_memory_is_bounded() -> None:
    """A member that never tells does not make the others' digests pile up."""
    one = world(2)
    for step in range(1000):
        one.hear(0, told(step, 1, 2, 3))
    assert len(one._optimizers[0, "SGD"].told) <= 64


def test_distances_of_every_type() -> None:
    """The largest absolute difference, of bfloat16 too; NaN where only one is none; unknown types are left out."""
    assert distance(Sample("float64", struct.pack("2d", 1, 2)), Sample("float64", struct.pack("2d", 1, -2))) == 4.0
    assert distance(Sample("bfloat16", b"\x80\x3f"), Sample("bfloat16", b"\x00\x40")) == 1.0
    assert distance(Sample("int8", b"\x01"), Sample("int8", b"\xff")) == 2
    nan, number = Sample("float32", struct.pack("f", float("nan"))), Sample("float32", struct.pack("f", 1.0))
    far = distance(nan, number)
    assert far is not None
    assert far != far
    assert distance(nan, nan) == 0.0
    assert distance(Sample("complex64", b"12345678"), Sample("complex64", b"12345678")) is None
    assert distance(number, Sample()) is None


def test_groups_stand_in_order_of_size() -> None:
    """The largest first, then by their lowest rank."""
    assert grouped({0: "x", 1: "y", 2: "y", 3: "z"}) == ((1, 2), (0,), (3,))


def test_the_error_travels() -> None:
    """A pickled ReplicasDiffer keeps what it knows: results of ddlcore.run come so."""
    import pickle

    error = ReplicasDiffer("text", "w", [[0, 2], [1]], 10, 5, {1: 0.5})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.tensor, again.groups, again.step, again.agreed_step, again.distances) == (
        "text", "w", ((0, 2), (1,)), 10, 5, {1: 0.5},
    )  # fmt: skip
