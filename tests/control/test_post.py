"""What a turn of the coordinator says reaches each rank unchanged and in order, in as few messages as may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddlcore.control.post import joined, packed
from ddlcore.messages.coding import decode_from_coordinator
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_rank import Answer, Failure, Farewell, Freeze, FromCoordinator, Lost, Outgoing


def failure(name: str) -> Failure:
    return Failure(0, (name,), "mismatch", "")


def flat(outgoing: Outgoing[LaunchedRank], rank: int) -> list[object]:
    """What ``rank`` is told, answers taken apart."""
    said: list[object] = []
    for to, message in outgoing:
        if to == rank and isinstance(message, Answer):
            said += [(message.epoch, item) for item in message.items]
            said += [("acknowledged", message.serial)] if message.serial else []
        elif to == rank:
            said.append(message)
    return said


def acknowledged_last(said: list[object]) -> list[object]:
    """Items keep their order; where among them a request is acknowledged does not matter, but once it must be."""
    marks = [one for one in said if isinstance(one, tuple) and one[0] == "acknowledged"]
    return [one for one in said if one not in marks] + marks


@st.composite
def turns(draw: st.DrawFn) -> Outgoing[LaunchedRank]:
    shared: list[FromCoordinator] = [
        Answer(0, 0, (failure("a"),)),
        Answer(0, 0, (failure("b"), failure("c"))),
        Freeze(0),
    ]
    shared += [Answer(1, 0, (failure("d"),)), Lost((3,), "gone"), Farewell()]
    outgoing: Outgoing[LaunchedRank] = []
    for serial in range(1, draw(st.integers(0, 12))):
        if draw(st.booleans()):
            message = draw(st.sampled_from(shared))
            outgoing += [(rank, message) for rank in map(LaunchedRank, range(4))]
        else:
            outgoing.append((draw(st.integers(0, 3)), Answer(draw(st.integers(0, 1)), serial, ())))
    return outgoing


@given(turns())
def test_each_rank_hears_the_same_in_the_same_order(outgoing: Outgoing[LaunchedRank]) -> None:
    """Items, their epochs and everything that is no answer, rank by rank; each request is acknowledged once."""
    short = joined(outgoing)
    assert len(short) <= len(outgoing)
    for rank in range(4):
        assert acknowledged_last(flat(short, rank)) == acknowledged_last(flat(outgoing, rank))
    assert [(rank, decode_from_coordinator(data)) for rank, data in packed(outgoing)] == short


def test_answers_of_a_turn_are_one_message() -> None:
    """A rank that asked, and was told of others' tensors before and after, hears of all that at once."""
    first, second = Answer(0, 0, (failure("a"),)), Answer(0, 0, (failure("b"),))
    own = Answer(0, 7, ())
    outgoing: Outgoing[LaunchedRank] = [(0, first), (1, first), (0, own), (0, second), (1, second), (2, second)]
    whole = (failure("a"), failure("b"))
    assert joined(outgoing) == [(0, Answer(0, 7, whole)), (1, Answer(0, 0, whole)), (2, second)]


def test_what_has_another_meaning_stays_apart() -> None:
    """Epochs, two acknowledgements, and whatever stands between."""
    outgoing: Outgoing[LaunchedRank] = [
        (0, Answer(0, 1, ())),
        (0, Answer(0, 2, ())),
        (0, Answer(1, 0, ())),
        (0, Freeze(1)),
    ]
    outgoing.append((0, Answer(1, 0, ())))
    assert joined(outgoing) == outgoing


def test_what_all_ranks_are_told_stays_one_object() -> None:
    """It is encoded once, however many parts it has."""
    parts = [Answer(0, 0, (failure(name),)) for name in "abc"]
    short = joined([(rank, part) for part in parts for rank in map(LaunchedRank, range(100))])
    assert len(short) == 100
    assert len({id(message) for _, message in short}) == 1
    assert len({id(data) for _, data in packed(short)}) == 1
