"""Decides which of the requested operations run, and in which buckets; refuses what cannot run.

This module is the coordinator's part of negotiation, without I/O, thread or clock. All ranks get the buckets of all
process sets in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import DecodeError

from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.coordinator.items import Item, Items
from ddlcore.coordinator.pending_request import PendingRequest
from ddlcore.coordinator.replay_controller import KnownSchedule, ReplayController
from ddlcore.coordinator.request_table import RequestTable
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.spec import BY_SETTING, Ask, Spec
from ddlcore.messages.to_rank import Bucket, Failure
from ddlcore.runtime.checks import describe, flaw
from ddlcore.types import Kind


class Negotiation:
    """The requests of the ranks of one world, their process sets, and the number of buckets so far."""

    def __init__(
        self,
        size: int,
        policy: FusionPolicy,
        fusion_bytes: int,
        divides_by_size: bool,
        table: RequestTable,
        replay_controller: ReplayController,
        left: Mapping[WorldRank, str],
    ) -> None:
        """Create the object for a world of ``size`` ranks that begins.

        ``divides_by_size``: averages are divided by the number of all members, also while some have joined. ``table``
        holds the requests. ``left`` always holds the ranks that have left, with their reasons, in the order of leaving.
        """
        self.sets: dict[int, tuple[WorldRank, ...]] = {0: tuple(map(WorldRank, range(size)))}
        self.params: dict[str, float] = {"fusion_bytes": fusion_bytes}
        self.table = table
        self.next_index = 0
        self._next_set = 1
        self._size = size
        self._policy = policy
        self._divides_by_size = divides_by_size
        self._replay_controller = replay_controller
        self._left = left

    # --- asking

    def requested(self, rank: WorldRank, asks: Iterable[Ask]) -> tuple[list[PendingRequest], Items]:
        """Record that ``rank`` sends ``asks``. Return the requests that are complete now, and the items to send."""
        ready: list[PendingRequest] = []
        items: Items = []
        bit, find, joined = 1 << rank, self.table.find, self.table.joined
        for ask in asks:
            pending = find((ask.set_id, ask.name))
            if pending is None or ask.spec != pending.spec or self._left or not pending.members & bit:
                pending = self._admit(rank, ask, ready, items)
                if pending is None:
                    continue
            pending.add(rank, bit, ask)
            if pending.asked == pending.members or (joined and not self.table.lacking(pending)):
                ready.append(pending)
        return ready, items

    def _admit(self, rank: WorldRank, ask: Ask, ready: list[PendingRequest], items: Items) -> PendingRequest | None:
        """Return the pending request to which ``ask`` belongs. Create the pending request if there is none.

        If ``ask`` is invalid, append a Failure to ``items`` and return None. If ``ask`` is a call of ``join``, return
        None, too. In this case, append to ``ready`` the requests that are complete because of this join. If all ranks
        have joined now, also append to ``items`` what must be sent because of that.
        """
        members = self.sets.get(ask.set_id)
        if members is None or rank not in members:
            text = f"{describe([ask.name], ask.set_id)}: rank {rank} is not in such a process set (any more)"
            items.append(((rank,), Failure(ask.set_id, (ask.name,), "mismatch", text)))
            return None
        gone = [left for left in self._left if left in members]  # in order of leaving: the first one is the cause
        if gone:
            items.append(((rank,), self._gone(ask.set_id, (ask.name,), gone)))
            return None
        try:
            spec = self.table.spec(ask.spec)
            text = flaw(ask, spec, members, self._size)
        except DecodeError as error:
            text = f"its request cannot be read: {error}"
        if text:
            text = f"{describe([ask.name], ask.set_id)}: {text}"
            items.append(((rank,), Failure(ask.set_id, (ask.name,), "mismatch", text)))
            return None
        if spec.kind is Kind.JOIN:
            self._replay_controller.disturbed()
            ready += self.table.join(rank, ask)
            if len(self.table.joined) == self._size:
                items += self.decide(ready)[0]  # a period never ends while ranks have joined
                ready.clear()
                items += self._all_joined()
            return None
        if spec.of_members:
            members = self._concerned(spec)
            if rank not in members:
                text = f"{describe([ask.name], 0)}: rank {rank} is no member of the process set {list(members)}"
                items.append(((rank,), Failure(0, (ask.name,), "mismatch", text)))
                return None
            pending = self.table.find((ask.set_id, ask.name))
            if pending is not None and pending.spec != ask.spec:
                # The sets have different members, so one of the two might wait for a rank that never calls.
                pending.add(rank, 1 << rank, ask)
                items += self.fail(pending, "mismatch", self.table.objection(pending))
                return None
        return self.table.open(ask, members)

    def _concerned(self, spec: Spec) -> tuple[WorldRank, ...]:
        """Return the ranks that add or remove a process set together: all ranks, or only the members of the set."""
        ranks = spec.ranks or ()
        if not spec.of_members:
            return self.sets[0]
        return tuple(map(WorldRank, ranks)) if spec.kind is Kind.ADD_SET else self.sets.get(ranks[0], ())

    def _all_joined(self) -> Items:
        last = list(self.table.joined)[-1]
        names = {rank: ask.name for rank, ask in self.table.joined.items()}
        self.table.none_joined()
        index = self._take_index()
        return [((rank,), Bucket(index, 0, Kind.JOIN, (name,), result=last)) for rank, name in names.items()]

    def parted(self, rank: WorldRank) -> Items:
        """Return the failures of all requests that need ``rank``, which has left, and remove these requests."""
        items: Items = []
        for pending in self.table.all():
            if rank in self.sets[pending.set_id]:
                failure = self._gone(pending.set_id, (pending.name,), [rank])
                items += self.fail(pending, "lost", failure.text, (rank,))
        for other, ask in self.table.joined.items():  # these ranks wait for a join that can never complete
            items.append(((other,), self._gone(0, (ask.name,), [rank])))
        self.table.none_joined()
        return items

    def _gone(self, set_id: int, names: tuple[str, ...], gone: Sequence[WorldRank]) -> Failure:
        return Failure(set_id, names, "lost", self._left[gone[0]], tuple(gone))

    # --- deciding

    def decide(self, ready: Iterable[PendingRequest]) -> tuple[Items, KnownSchedule | None]:
        """Check the requests ``ready``, which all members have sent, and arrange them in buckets, in the given order.

        Return the items that must be sent, and the schedule that must be replayed from now on; None if there is none.
        """
        items: Items = []
        ready = list(dict.fromkeys(ready))  # a join may add requests again that have just become ready
        for pending in ready:
            text = self.table.objection(pending) if self.table.holds(pending) else ""
            if text:
                items += self.fail(pending, "mismatch", text)
                self._replay_controller.disturbed()
        runnable: list[PendingRequest] = []
        taken: set[PendingRequest] = set()
        for pending in ready:
            if not self.table.holds(pending) or pending in taken:
                continue  # the request has just failed, or was taken together with its group
            known = None if self.table.joined else self._replay_controller.waiting_for(self.table.key(pending))
            if known is not None:
                more, found = self._decided(runnable)
                return items + more, known if found is None else found
            mates = self.table.complete_group(pending)
            taken.update(mates)
            runnable += mates
        more, found = self._decided(runnable)
        return items + more, found

    def _decided(self, runnable: Sequence[PendingRequest]) -> tuple[Items, KnownSchedule | None]:
        """Arrange ``runnable`` in buckets, up to the end of a proven period if these tensors complete one.

        A period is a sequence of tensors that repeats in every step. It is proven if it has repeated often enough, see
        ``PeriodDetector``. Return the items that must be sent, and the schedule of the period; None if no period ends.
        """
        items: Items = []
        rest = list(runnable)
        while rest:
            buckets = self._arrange(rest)
            count, known = self._observe(rest, buckets)
            for bucket in buckets if count == len(rest) else self._arrange(rest[:count]):
                if self.table.holds(bucket[0]):  # not if an earlier bucket has removed its process set
                    items += self._start(bucket)
            if known is not None:
                return items, known  # ranks put the rest, of the next period, into the schedule
            rest = rest[count:]
        return items, None

    def _observe(
        self, runnable: Sequence[PendingRequest], buckets: Sequence[Sequence[PendingRequest]]
    ) -> tuple[int, KnownSchedule | None]:
        """Look for the end of a proven period (see ``_decided``) among ``runnable``.

        Return the number of tensors of ``runnable`` up to the end of the period, and the schedule of the period. If no
        proven period ends among these tensors, return the number of all tensors and None. ``buckets`` are the buckets
        into which ``runnable`` was arranged.
        """
        if self.table.joined:
            self._replay_controller.touched(self.table.key(pending) for pending in runnable)
            return len(runnable), None
        numbers = {pending: self.next_index + i for i, bucket in enumerate(buckets) for pending in bucket}
        tensors = [(self.table.key(pending), numbers[pending], pending.stamp) for pending in runnable]
        return self._replay_controller.decided(
            tensors, lambda i: not self.table.are_mates(runnable[i], runnable[i + 1])
        )

    def _start(self, bucket: Sequence[PendingRequest]) -> Items:
        for pending in bucket:
            self.table.take(pending)
        spec = self.table.spec_of(bucket[0])
        if spec.kind is Kind.REMOVE_SET and spec.ranks is not None and spec.ranks[0] not in self.sets:
            text = f"process set {spec.ranks[0]} is not there (any more)"
            return [(bucket[0].ranks(), Failure(0, (bucket[0].name,), "mismatch", text))]
        return [self.run(bucket), *self._orphans(bucket[0])]

    def fail(self, pending: PendingRequest, error: str, text: str, gone: tuple[WorldRank, ...] = ()) -> Items:
        """Return the failures of ``pending`` and all other tensors of its grouped call, and remove their requests.

        Each failure is for the ranks that requested the tensor. ``error`` is "mismatch" or "lost", and ``text`` is the
        error message. For "lost", ``gone`` are the ranks that have left.
        """
        specs = [self.table.spec(ask.spec) for ask in pending.different_asks()] if error == "mismatch" else []
        kinds = tuple(sorted({spec.kind.name.lower() for spec in specs}))
        parts = tuple(sorted({spec.part_of for spec in specs}))
        doomed = self.table.doom(pending)
        return [(one.ranks(), Failure(one.set_id, (one.name,), error, text, gone, kinds, parts)) for one in doomed]

    def _orphans(self, removal: PendingRequest) -> Items:
        """Return the failures of all requests in the process set that ``removal`` has just removed.

        Each failure is for the ranks that sent the request. If ``removal`` is not the removal of a process set, return
        an empty list.
        """
        spec = self.table.spec_of(removal)
        if spec.kind is not Kind.REMOVE_SET or spec.ranks is None:
            return []
        items: Items = []
        for pending in self.table.removed(spec.ranks[0]):
            where = describe([pending.name], pending.set_id)
            text = f"{where}: the process set was removed before all members had asked"
            items.append((pending.ranks(), Failure(pending.set_id, (pending.name,), "mismatch", text)))
        return items

    def _arrange(self, runnable: Sequence[PendingRequest]) -> list[list[PendingRequest]]:
        """Arrange ``runnable`` in buckets, and return the buckets in the order of their first tensors.

        The fusion policy decides which tensors of allreduces share a bucket. Each tensor of another operation gets a
        bucket of its own.
        """
        fusable = [i for i, p in enumerate(runnable) if self.table.spec_of(p).kind is Kind.ALLREDUCE]
        buckets = [[i] for i in sorted(set(range(len(runnable))).difference(fusable))]
        if fusable:
            described = [self.table.describe(runnable[i], self._replay_controller.compression) for i in fusable]
            for positions in self._policy.arrange(described, self.params):
                buckets.append([fusable[p] for p in positions])
        buckets.sort(key=lambda bucket: bucket[0])
        return [[runnable[i] for i in bucket] for bucket in buckets]

    def run(self, bucket: Sequence[PendingRequest]) -> tuple[Iterable[WorldRank], Item]:
        """Return the item by which the members run ``bucket``, whose requests the table holds no more, and the members."""
        spec = self.table.spec_of(bucket[0])
        members = self.sets[bucket[0].set_id]
        if spec.kind is Kind.ADD_SET:
            return self._add_set(bucket[0], spec)
        if spec.kind is Kind.REMOVE_SET:
            assert spec.ranks is not None
            members = self._concerned(spec)
            del self.sets[spec.ranks[0]]
            self._replay_controller.removed(spec.ranks[0])
            return members, Bucket(self._take_index(), 0, spec.kind, (bucket[0].name,), result=spec.ranks[0])
        short = any(pending.asked != pending.members for pending in bucket)
        ragged = spec.kind.is_ragged
        # The coordinator resolves the setting for all ranks, as it does in a schedule: a search may change the setting,
        # and ranks that resolved it themselves could see the change at different buckets.
        by_setting = any(self.table.spec_of(pending).compressor == BY_SETTING for pending in bucket)
        return members, Bucket(
            self._take_index(),
            bucket[0].set_id,
            spec.kind,
            tuple(pending.name for pending in bucket),
            rows=tuple(self.table.rows(pending, members) for pending in bucket) if ragged else (),
            digests=tuple(self.table.digests(pending, members) for pending in bucket) if spec.is_announced else (),
            specs=tuple(pending.spec for pending in bucket) if short else (),
            compressor=spec.compressor_by(self._replay_controller.compression) if by_setting else "",
            contributors=bucket[0].asked.bit_count() if short and not self._divides_by_size else 0,
        )

    def _add_set(self, pending: PendingRequest, spec: Spec) -> tuple[Iterable[WorldRank], Item]:
        assert spec.ranks is not None
        set_id, self._next_set = self._next_set, self._next_set + 1
        self.sets[set_id] = tuple(map(WorldRank, spec.ranks))
        return self._concerned(spec), Bucket(self._take_index(), 0, Kind.ADD_SET, (pending.name,), result=set_id)

    def _take_index(self) -> int:
        self.next_index += 1
        return self.next_index - 1
