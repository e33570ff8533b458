"""The states of the model of elastic worlds: members, registrations, worlds, and the rule of a quorum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

Ballot = tuple[int, int]  # a world's generation, and the member on whose host the coordinator that opened it runs

DIED, LOST, ALIVE = -1, 0, 1  # the process died, as its host's agent tells; the host is silent; alive
TRAINS, LEAVES, REGISTERED, DONE = "trains", "leaves", "registered", "done"
STAYED, FAILED, AT_POINT = 0, 1, 2  # how a member left its world
FREE, FROZEN, RELEASED = 0, 1, 2  # a member before a freeze, after its answer, and after it has learned the point
FREEZING = -1  # the point of a world whose members are being asked how far they are
NO_POINT = 1 << 20
MEET, FIRST_CHUNK, LAST_CHUNK, STEPS = 0, 1, 2, 3  # the collectives of a world, in their order

MUTANTS = (
    "direct transfer",  # the state of root is received in place, so a failure leaves half of it
    "early update",  # the first tensor is updated when its bucket completes, before the step is complete
    "stale registration",  # a member also accepts a world that answers a registration it has given up
    "forgets accepted",  # a registration does not tell the worlds that the member accepted and that may be effective
    "forgets older",  # a registration tells only the last of these worlds
    "forgets the dead",  # nobody tells which worlds the dead had received
    "no quorum",  # a coordinator opens a world with whoever has registered
    "lowest root",  # root is the lowest member, not the most advanced one
    "no freeze",  # the point where members leave for joiners is chosen without asking how far they are
    "waits without a coordinator",  # a member that answered a freeze waits for the point, whoever is lost
    "counts itself out",  # a member ends its training before all members have applied the last step
)


class Member(NamedTuple):
    """One process, whose identity lasts its life."""

    life: int
    side: int  # of the split network
    applied: int  # steps applied; -1: a joiner that has no state yet
    tensors: tuple[int, int]  # the step to which each tensor belongs
    effective: Ballot | None  # the newest world in which a collective has completed here
    accepted: tuple[Ballot, ...]  # the worlds received since, none of which is known to be effective
    mode: str
    world: Ballot | None
    left: int
    at: int  # the next collective of the world
    launched: bool
    staged: int  # chunks of root's state that have arrived
    hold: int
    server: int  # where it has registered
    ticket: int  # number of its last registration
    given: tuple[tuple[Ballot, int, int], ...]  # by world: how many collectives it has launched, and which side sees it


class World(NamedTuple):
    members: tuple[int, ...]
    tickets: tuple[int, ...]  # by member: the registration that this world answers
    root: int
    applied: int  # root's
    point: int | None  # where all leave, so that joiners come in
    answers: tuple[tuple[int, int], ...]
    parents: tuple[Ballot, ...]  # the worlds of which the coordinator knew that they are, or may be, effective


class Report(NamedTuple):
    """What a member tells when it registers."""

    ticket: int
    applied: int
    effective: Ballot | None
    accepted: tuple[Ballot, ...]


class Budget(NamedTuple):
    """How much may still go wrong in a run."""

    deaths: int = 0
    hosts: int = 0
    splits: int = 0
    suspicions: int = 0  # of a member that lives


NO_FAULTS = Budget()


class State(NamedTuple):
    members: tuple[Member, ...]
    registered: tuple[tuple[tuple[int, Report], ...], ...]  # by coordinator: member and report
    worlds: tuple[tuple[Ballot, World], ...]
    chain: tuple[Ballot, ...]  # the worlds that became effective, in the order of their ballots
    split: bool
    budget: Budget


@dataclass(frozen=True)
class Config:
    """What is explored: so many members and joiners, steps, and faults."""

    members: int
    total: int = 2
    joiners: int = 0
    faults: Budget = NO_FAULTS
    mutant: str = ""


def is_quorum(world: Iterable[int], present: Iterable[int], died: Iterable[int]) -> bool:
    """Return whether ``present`` may decide for ``world``, given those of it that have certainly ``died``.

    More than half of those that have not died, or exactly half of them and the lowest. See docs/design/elastic.md for
    why two parts of a world never both decide, though they may know of different deaths.
    """
    voters = set(world) - set(died)
    here = voters & set(present)
    return 2 * len(here) > len(voters) or (2 * len(here) == len(voters) and bool(voters) and min(voters) in here)


def candidates(reports: Iterable[Report], of_dead: Iterable[Report]) -> tuple[Ballot | None, tuple[Ballot, ...]]:
    """Return the newest world that is effective by ``reports``, and the later ones that may be effective.

    ``of_dead``: which worlds the dead had received, as those tell who tell of their deaths.
    """
    reports = list(reports)
    effective = max((one.effective for one in reports if one.effective is not None), default=None)
    maybe = {ballot for one in (*reports, *of_dead) for ballot in one.accepted}
    maybe |= {one.effective for one in of_dead if one.effective is not None}
    return effective, tuple(sorted(one for one in maybe if effective is None or one > effective))


def put(
    state: State,
    i: int | None,
    member: Member | None,
    ballot: Ballot | None = None,
    world: World | None = None,
) -> State:
    """Return ``state`` with another member ``i``, or another world ``ballot``, or both."""
    if i is not None and member is not None:
        state = state._replace(members=(*state.members[:i], member, *state.members[i + 1 :]))
    if ballot is not None and world is not None:
        state = state._replace(worlds=tuple((key, world if key == ballot else one) for key, one in state.worlds))
    return state
