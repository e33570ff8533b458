"""Records how many steps the worlds of an elastic job have trained, and decides whether processes may go on from there."""

from __future__ import annotations

from collections.abc import Collection

from ddlcore.messages.elastic import Ballot, Register


class KnownSteps:
    """The steps that one elastic job has trained. A later world must not begin with fewer steps."""

    def __init__(self) -> None:
        self.opened_with = -1  # the most steps that a member had applied when the last world opened
        self.taken: Ballot = (0, 0)  # the newest world whose members are known to have taken over the state
        self.has_begun = False  # whether all members of a world have been there, so that there is a state to lose
        self._steps_of: dict[Ballot, int] = {}  # for each of the last worlds of which it is not known that they began
        self._least = -1  # the most steps of the newest world that is known to have begun

    def opened(self, ballot: Ballot, steps: int) -> None:
        """Record that the world ``ballot`` opens, in which a member has applied ``steps`` steps and none has more."""
        self.opened_with = self._steps_of[ballot] = steps

    def took_over(self, ballot: Ballot) -> None:
        """Record that all members of the world ``ballot`` have taken over the state, in their own memory."""
        self.taken = max(ballot, self.taken)
        # An older world that is over may have had more steps: those of a root that died before others took over its state.
        self._least = self._steps_of.get(self.taken, self._least)
        self._steps_of = {key: steps for key, steps in self._steps_of.items() if key > self.taken}

    def objection(self, waiting: Collection[Register]) -> str:
        """Return why the processes that wait cannot follow on a world; "" if one of them has the state of the training.

        ``waiting`` are their registrations.
        """
        if self.has_begun and not any(one.generation for one in waiting):
            return "all ranks that had the state of the training have ended"
        # A world that has not begun does not count: if its root dies before the others have taken over its state,
        # they compute its last step again, as if it had died before it registered.
        newest = max((one.steps for one in waiting), default=-1)
        if newest < self._least or newest < 0 <= self.opened_with:
            return "the ranks with the newest state of the training have ended"
        return ""
