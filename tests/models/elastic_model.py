"""A model of elastic worlds: deaths, lost hosts, a split network, joiners, and coordinators that are lost.

Members train in a world, in steps of two buckets, until all steps are applied. Each move is one thing that can happen at
a time: a member launches a collective, sees it complete, notices a failure, registers for the next world, or receives
it; a coordinator opens a world or sets the point at which joiners come in; a process, a host or the network fails. The
promises are those of docs/design/elastic.md:

- the tensors of a member are all of the same step, at any moment;
- all members of a world launch a bucket for the same step;
- each world in which something happened was formed by a quorum of the one before it, so two worlds never live;
- no run ends while a quorum waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.models.elastic_state import (
    ALIVE,
    AT_POINT,
    DIED,
    DONE,
    FAILED,
    FIRST_CHUNK,
    FREE,
    FREEZING,
    FROZEN,
    LAST_CHUNK,
    LEAVES,
    LOST,
    MEET,
    NO_POINT,
    REGISTERED,
    RELEASED,
    STAYED,
    STEPS,
    TRAINS,
    Ballot,
    Config,
    Member,
    Report,
    State,
    World,
    candidates,
    is_quorum,
    put,
)
from tests.models.explore import Violation


class ElasticMove(NamedTuple):
    name: str
    after: State
    is_fault: bool = False


class Elastic:
    """All moves of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.mutant = config.mutant

    def start(self) -> State:
        config, first = self.config, (0, 0)
        ids = tuple(range(config.members))
        member = Member(
            ALIVE, 0, 0, (0, 0), first, (), TRAINS, first, STAYED, STEPS, False, 0, FREE, -1, 0, ((first, STEPS, -1),)
        )
        joiner = member._replace(applied=-1, tensors=(-1, -1), effective=None, mode=LEAVES, world=None, at=0, given=())
        world = World(ids, tuple(0 for _ in ids), 0, 0, None, (), ())
        everyone = (member,) * config.members + (joiner,) * config.joiners
        return State(everyone, tuple(() for _ in everyone), ((first, world),), (first,), False, config.faults)

    # --- who reaches whom

    def serves(self, state: State, server: int, member: Member) -> bool:
        """Return whether the coordinator on the host of ``server`` can be reached by ``member``."""
        host = state.members[server]
        return host.life != LOST and host.side == member.side

    def farewell(self, world: World) -> int:
        return STEPS + 2 * (self.config.total - world.applied)

    def is_broken(self, state: State, ballot: Ballot, world: World, member: Member) -> bool:
        """Return whether ``member`` may notice that its world cannot go on.

        The world has lost a member, or will lack one; or the member has lost the coordinator, without which it may be
        held before a point that it never learns.
        """
        if not self.serves(state, ballot[1], member) and self.mutant != "waits without a coordinator":
            return True
        for other, ticket in zip(world.members, world.tickets):
            one = state.members[other]
            if one.life != ALIVE or one.side != member.side:
                return True
            if one.world == ballot:
                if one.left == FAILED:
                    return True
            elif one.mode != REGISTERED or one.server != ballot[1] or one.ticket != ticket:
                return True  # it will not come any more
        return False

    # --- transitions

    def moves(self, state: State) -> Iterator[ElasticMove]:
        """Yield everything that can happen next, with its name."""
        worlds = dict(state.worlds)
        for i, one in enumerate(state.members):
            if one.life != ALIVE:
                continue
            if one.mode == TRAINS:
                assert one.world is not None
                yield from self._train(state, i, one, one.world, worlds[one.world])
            elif one.mode == LEAVES:
                yield from self._register(state, i, one, worlds)
            elif one.mode == REGISTERED:
                yield from self._registered(state, i, one, worlds)
        for server in range(len(state.members)):
            if state.members[server].life != LOST:
                yield from self._serve(state, server, worlds)
        yield from self._faults(state)

    def _train(self, state: State, i: int, one: Member, ballot: Ballot, world: World) -> Iterator[ElasticMove]:
        mine = state.members[ballot[1]]
        hears = mine.life != LOST and mine.side == one.side
        if self.is_broken(state, ballot, world, one):
            failed = one._replace(mode=LEAVES, left=FAILED, launched=False, staged=0, hold=FREE)
            yield ElasticMove(f"{i} notices a failure", put(state, i, failed))
        if world.point == FREEZING and one.hold == FREE and hears:
            reached = one.at + one.launched
            asked = world._replace(answers=(*world.answers, (i, reached)))
            yield ElasticMove(f"{i} answers the freeze", put(state, i, one._replace(hold=FROZEN), ballot, asked))
        if world.point is not None and world.point >= 0 and one.hold != RELEASED and hears:
            yield ElasticMove(f"{i} learns the point", put(state, i, one._replace(hold=RELEASED)))
        if not one.launched:
            if one.hold == RELEASED and one.at == world.point:
                yield ElasticMove(
                    f"{i} leaves at the point", put(state, i, one._replace(mode=LEAVES, left=AT_POINT, hold=FREE))
                )
            elif one.hold != FROZEN and (one.hold == FREE or world.point is None or one.at < world.point):
                yield ElasticMove(f"{i} launches {one.at}", self._launch(state, i, one, ballot, world))
        elif all(self._sees(state, one, other, ballot) for other in world.members):
            yield ElasticMove(f"{i} completes {one.at}", self._complete(state, i, one, ballot, world))

    def _launch(self, state: State, i: int, one: Member, ballot: Ballot, world: World) -> State:
        if one.at >= STEPS and one.applied != world.applied + (one.at - STEPS) // 2:
            raise Violation(f"member {i} launches collective {one.at} of {ballot} at step {one.applied}")
        given = {key: (reached, seen) for key, reached, seen in one.given}
        given[ballot] = (one.at + 1, one.side if state.split else -1)
        kept = tuple((key, *value) for key, value in sorted(given.items()))[-3:]
        return put(state, i, one._replace(launched=True, given=kept))

    def _sees(self, state: State, one: Member, other: int, ballot: Ballot) -> bool:
        for key, reached, side in state.members[other].given:
            if key == ballot and reached > one.at:
                return reached > one.at + 1 or side in (-1, one.side)
        return False

    def _complete(self, state: State, i: int, one: Member, ballot: Ballot, world: World) -> State:
        chain = state.chain
        at, after = one.at, one._replace(at=one.at + 1, launched=False)
        if at == MEET:
            if ballot not in chain:
                chain = self._joined(state, ballot, world)
            after = after._replace(effective=ballot, accepted=())
        elif at in (FIRST_CHUNK, LAST_CHUNK):
            if one.applied < world.applied:
                after = after._replace(staged=one.staged + 1)
                if self.mutant == "direct transfer":
                    tensors = (world.applied, one.tensors[1]) if at == FIRST_CHUNK else (one.tensors[0], world.applied)
                    after = after._replace(tensors=tensors)
                if after.staged == 2:
                    after = after._replace(applied=world.applied, tensors=(world.applied, world.applied), staged=0)
        elif at == self.farewell(world):
            after = after._replace(mode=DONE)
        elif (at - STEPS) % 2:
            after = after._replace(applied=one.applied + 1, tensors=(one.applied + 1, one.applied + 1))
            if self.mutant == "counts itself out" and after.at == self.farewell(world):
                after = after._replace(mode=DONE)
        elif self.mutant == "early update":
            after = after._replace(tensors=(one.applied + 1, one.applied))
        return put(state, i, after)._replace(chain=chain)

    def _joined(self, state: State, ballot: Ballot, world: World) -> tuple[Ballot, ...]:
        """Return the worlds that have become effective, with ``ballot``, whose collective completes for the first time.

        A member may see that after a later world has begun, if all members had launched the collective before some of
        them left. That is no harm if the later world was formed by those who knew that this one may be effective.
        """
        earlier = tuple(one for one in state.chain if one < ballot)
        later = tuple(one for one in state.chain if one > ballot)
        if earlier[-1] not in world.parents:
            raise Violation(f"world {ballot} begins beside {earlier[-1]}, of which it does not know")
        if later and ballot not in dict(state.worlds)[later[0]].parents:
            raise Violation(f"world {later[0]} has begun beside {ballot}, of which it does not know")
        return (*earlier, ballot, *later)

    def _register(self, state: State, i: int, one: Member, worlds: Mapping[Ballot, World]) -> Iterator[ElasticMove]:
        usual = one.world[1] if one.world is not None else max(worlds)[1]
        reachable = [at for at in range(len(state.members)) if self.serves(state, at, one)]
        for server in [usual] if usual in reachable else reachable:
            yield ElasticMove(f"{i} registers at {server}", self._enter(state, i, one, server))

    def _enter(self, state: State, i: int, one: Member, server: int) -> State:
        ticket = one.ticket + 1
        accepted = one.accepted
        if self.mutant == "forgets accepted":
            accepted = ()
        elif self.mutant == "forgets older":
            accepted = accepted[-1:]
        report = Report(ticket, one.applied, one.effective, accepted)
        entries = {**dict(state.registered[server]), i: report}
        registered = list(state.registered)
        registered[server] = tuple(sorted(entries.items()))
        after = put(state, i, one._replace(mode=REGISTERED, server=server, ticket=ticket))
        return after._replace(registered=tuple(registered))

    def _registered(self, state: State, i: int, one: Member, worlds: Mapping[Ballot, World]) -> Iterator[ElasticMove]:
        for ballot, world in worlds.items():
            if i in world.members and ballot[1] == one.server and ballot != one.world:
                answered = world.tickets[world.members.index(i)]
                if answered == one.ticket or (self.mutant == "stale registration" and answered < one.ticket):
                    yield ElasticMove(f"{i} receives {ballot}", self._accept(state, i, one, ballot))
        if self.mutant == "stale registration":
            for ballot, world in worlds.items():
                if i in world.members and ballot[1] != one.server and (one.effective or (-1, 0)) < ballot != one.world:
                    yield ElasticMove(f"{i} receives {ballot} late", self._accept(state, i, one, ballot))
        reachable = [at for at in range(len(state.members)) if self.serves(state, at, one)]
        # A coordinator that is lost is given up; and all meet, in the end, at the first one that can be reached.
        others = [at for at in reachable if at != one.server] if one.server not in reachable else reachable[:1]
        for server in others:
            if server != one.server and not (one.server in reachable and server > one.server):
                yield ElasticMove(f"{i} registers at {server} instead", self._enter(state, i, one, server))

    def _accept(self, state: State, i: int, one: Member, ballot: Ballot) -> State:
        accepted = one._replace(
            mode=TRAINS,
            world=ballot,
            left=STAYED,
            at=MEET,
            launched=False,
            staged=0,
            hold=FREE,
            accepted=(*one.accepted, ballot),
        )
        return put(state, i, accepted)

    def _serve(self, state: State, server: int, worlds: Mapping[Ballot, World]) -> Iterator[ElasticMove]:
        host = state.members[server]
        reports = dict(state.registered[server])
        joiners = [i for i, one in reports.items() if one.applied < 0 and one.effective is None]
        mine = [ballot for ballot in worlds if ballot[1] == server]
        if joiners and mine and worlds[max(mine)].point is None:
            world = worlds[max(mine)]
            asked = world._replace(point=FREEZING)
            if self.mutant == "no freeze":
                told = [state.members[i] for i in world.members if state.members[i].world == max(mine)]
                asked = world._replace(point=self._boundary(world, [one.at for one in told][:1] or [STEPS]))
            yield ElasticMove(f"coordinator {server} freezes", put(state, None, None, max(mine), asked))
        for ballot in mine:
            world = worlds[ballot]
            if world.point == FREEZING and len(world.answers) == len(world.members):
                point = self._boundary(world, [reached for _, reached in world.answers])
                yield ElasticMove(
                    f"coordinator {server} sets the point", put(state, None, None, ballot, world._replace(point=point))
                )
        if reports:
            yield from self._open(state, server, host, reports, worlds)

    def _boundary(self, world: World, reached: list[int]) -> int:
        """Return the end of the step that the most advanced member has begun; no point if it ends the training."""
        steps = -(-max(0, max(reached) - STEPS) // 2)
        point = STEPS + 2 * steps
        return point if point < self.farewell(world) else NO_POINT

    def _open(
        self, state: State, server: int, host: Member, reports: dict[int, Report], worlds: Mapping[Ballot, World]
    ) -> Iterator[ElasticMove]:
        effective, maybe = candidates(reports.values(), self._of_dead(state, host.side))
        carried = [i for i, one in reports.items() if one.applied >= 0]
        if effective is None or not carried:
            return
        parents = (effective, *maybe)
        died = [i for i, one in enumerate(state.members) if one.life == DIED and one.side == host.side]
        if self.mutant != "no quorum" and not all(is_quorum(worlds[one].members, reports, died) for one in parents):
            return
        missing = {i for one in parents for i in worlds[one].members} - set(reports)
        suspected = [i for i in missing if state.members[i].life == ALIVE and state.members[i].side == host.side]
        if any(state.members[i].mode == DONE for i in suspected):
            return  # a member that ended tells it, so the job is complete, see ``waits``
        budget = state.budget
        if suspected:
            if not budget.suspicions:
                return
            budget = budget._replace(suspicions=budget.suspicions - 1)
        known = [ballot for one in reports.values() for ballot in (one.effective, *one.accepted) if ballot is not None]
        own = [ballot for ballot in worlds if ballot[1] == server]
        generation = 1 + max(ballot[0] for ballot in (*known, *own))
        best = max(one.applied for one in reports.values())
        root = min(i for i, one in reports.items() if one.applied == best)
        if self.mutant == "lowest root":
            root = min(carried)
        members = tuple(sorted(reports))
        tickets = tuple(reports[i].ticket for i in members)
        world = World(members, tickets, root, reports[root].applied, None, (), parents)
        registered = list(state.registered)
        registered[server] = ()
        after = state._replace(
            registered=tuple(registered),
            worlds=tuple(sorted((*state.worlds, ((generation, server), world)))),
            budget=budget,
        )
        yield ElasticMove(f"coordinator {server} opens {(generation, server)} with {members}", after)

    def _of_dead(self, state: State, side: int) -> list[Report]:
        """Return what the agents on ``side`` of the network tell of those whose processes have died."""
        if self.mutant == "forgets the dead":
            return []
        died = [one for one in state.members if one.life == DIED and one.side == side]
        return [Report(one.ticket, one.applied, one.effective, one.accepted) for one in died]

    def _faults(self, state: State) -> Iterator[ElasticMove]:
        budget = state.budget
        for i, one in enumerate(state.members):
            if one.life == LOST or one.mode == DONE:
                continue
            if budget.deaths and one.life == ALIVE:
                after = put(state, i, one._replace(life=DIED))
                yield ElasticMove(
                    f"{i} dies", after._replace(budget=budget._replace(deaths=budget.deaths - 1)), is_fault=True
                )
            if budget.hosts:
                after = put(state, i, one._replace(life=LOST))
                yield ElasticMove(
                    f"the host of {i} is lost",
                    after._replace(budget=budget._replace(hosts=budget.hosts - 1)),
                    is_fault=True,
                )
        if budget.splits and not state.split:
            count = len(state.members)
            for mask in range(1, 1 << (count - 1)):  # the last member stays on side 0
                sides = tuple(one._replace(side=mask >> i & 1) for i, one in enumerate(state.members))
                after = state._replace(members=sides, split=True, budget=budget._replace(splits=budget.splits - 1))
                yield ElasticMove(f"the network splits: {mask:0{count}b}", after, is_fault=True)

    # --- promises

    def check(self, state: State) -> None:
        """Raise Violation if a member's tensors belong to different steps, or to another step than its count."""
        for i, one in enumerate(state.members):
            if one.life == ALIVE and (one.launched is False) and one.tensors != (one.applied, one.applied):
                raise Violation(f"member {i} holds tensors of the steps {one.tensors} and counts {one.applied}")

    def check_end(self, state: State) -> None:
        """Raise Violation if nothing can happen any more, and a quorum waits."""
        worlds = dict(state.worlds)
        for side in (0, 1):
            here = {i: one for i, one in enumerate(state.members) if one.life == ALIVE and one.side == side}
            waiting = {i: one for i, one in here.items() if one.mode != DONE}
            if any(one.mode == DONE for one in here.values()):
                late = [i for i, one in waiting.items() if 0 <= one.applied < self.config.total and one.left != STAYED]
                if late and any(self._shared(one, waiting[i]) for one in here.values() for i in late):
                    raise Violation(f"members {late} have not applied the last step, and others have ended")
                continue  # the job is complete
            reports = {i: Report(0, one.applied, one.effective, one.accepted) for i, one in waiting.items()}
            # All meet, in the end, at the first coordinator; it also knows what members have told who are lost since.
            servers = [i for i, one in enumerate(state.members) if one.life != LOST and one.side == side]
            told = [report for i, report in state.registered[servers[0]] if i not in reports] if servers else []
            effective, maybe = candidates((*reports.values(), *told), self._of_dead(state, side))
            if effective is None or not any(one.applied >= 0 for one in waiting.values()):
                continue
            if all(one.applied == self.config.total for one in waiting.values()):
                continue
            died = [i for i, one in enumerate(state.members) if one.life == DIED and one.side == side]
            if all(is_quorum(worlds[one].members, reports, died) for one in (effective, *maybe)):
                raise Violation(f"members {sorted(waiting)} wait for ever")

    def _shared(self, done: Member, late: Member) -> bool:
        return done.mode == DONE and done.world == late.world
