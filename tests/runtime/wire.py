"""The transports of a model: which ranks have entered a collective, and with the data of which calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Content", "Flight", "Sets", "Wire"]

Sets = Mapping[int, tuple[int, ...]]
Content = tuple[str, int] | None  # (name, how-manieth call of it on that rank); None is a dummy


@dataclass
class Flight:
    """A collective that a rank's engine is in."""

    set_id: int
    number: int  # how many of the set it had entered before
    finish: Callable[[], None]


@dataclass
class _Meeting:
    signature: object
    contents: dict[int, tuple[Content, ...]] = field(default_factory=dict)


class Wire:
    """Stands for all transports. It pairs the n-th collectives of the members of a process set; these must be equal."""

    def __init__(self, sets: Sets) -> None:
        self.sets = dict(sets)
        self.meetings: dict[tuple[int, int], _Meeting] = {}
        self.entered: dict[tuple[int, int], int] = {}

    def enter(self, set_id: int, rank: int, signature: object, contents: tuple[Content, ...]) -> int:
        number = self.entered.get((set_id, rank), 0)
        self.entered[set_id, rank] = number + 1
        meeting = self.meetings.setdefault((set_id, number), _Meeting(signature))
        assert meeting.signature == signature, f"ranks meet in different collectives: {meeting.signature}, {signature}"
        meeting.contents[rank] = contents
        return number

    def is_complete(self, set_id: int, number: int) -> bool:
        return len(self.meetings[set_id, number].contents) == len(self.sets[set_id])

    def real(self, set_id: int, number: int) -> bool:
        """Whether all members brought data; that they brought the same calls' is asserted."""
        rows = list(self.meetings[set_id, number].contents.values())
        if any(content is None for row in rows for content in row):
            return False
        assert len(set(rows)) == 1, f"calls that do not belong together were reduced: {rows}"
        return True
