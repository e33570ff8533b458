"""Records which ranks have called ``init`` and wait for their world to begin, and ends waits that cannot end well."""

from __future__ import annotations

from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.stall import StallWatch
from ddlcore.coordinator.stall_table import on_ranks
from ddlcore.messages.ranks import LaunchedRank, WorldRank
from ddlcore.messages.to_coordinator import Hello
from ddlcore.messages.to_rank import Farewell, Lost, Outgoing, Refused
from ddlcore.runtime.patience import Patience


class WorldKey(tuple[tuple[LaunchedRank, ...], int]):
    """The ranks of a world, and a count of the worlds of exactly these ranks.

    Its hash is computed once: each of thousands of ranks that enter a world is looked up by it.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


class EnteringRanks:
    """The ranks of one launch that wait in ``init`` until all ranks of their world have called it."""

    def __init__(self, patience: Patience, refuses: str) -> None:
        """Begin without a rank. ``refuses``: "", or why no world can begin."""
        self._patience = patience
        self._refuses = refuses
        self._gathering: dict[WorldKey, dict[LaunchedRank, Hello]] = {}
        self._watches: dict[WorldKey, StallWatch[LaunchedRank]] = {}

    def awaits(self, rank: LaunchedRank) -> bool:
        """Return whether ``rank`` belongs to a world for which others, or itself, wait."""
        return any(rank in key[0] for key in self._gathering)

    def enter(
        self, key: WorldKey, rank: LaunchedRank, hello: Hello
    ) -> tuple[dict[LaunchedRank, Hello], Outgoing[LaunchedRank]]:
        """Record that ``rank`` has called ``init`` for the world ``key``.

        If it is the last one, return what all ranks of the world have sent, and forget the world. Otherwise return an
        empty dict, and the messages to send: to ranks that wait for each other in different worlds, for example.
        """
        present = self._gathering.setdefault(key, {})
        present[rank] = hello
        if len(present) == len(key[0]):
            del self._gathering[key]
            if self._refuses:  # not before all have come: so all get the refusal, and none waits for another
                return {}, [(one, Refused(self._refuses)) for one in present]
            return present, []
        cycle = self._cycle(key) if len(self._gathering) > 1 else set()
        if not cycle:
            return {}, []
        asked = {one: other[0] for other in cycle for one in self._gathering.pop(other)}
        table = "\n".join(f"  rank {one} asked for ranks {list(ranks)}" for one, ranks in sorted(asked.items()))
        text = (
            f"init: the ranks wait for each other in different worlds\n{table}\n"
            "  what next: pass the same comm on every rank"
        )
        return {}, [(one, Refused(text)) for one in asked]

    def lost(self, rank: LaunchedRank, reason: str) -> Outgoing[LaunchedRank]:
        """End the waits for all worlds that need ``rank``, which is lost for ``reason``. Return the messages to send."""
        outgoing: Outgoing[LaunchedRank] = []
        for key in [key for key in self._gathering if rank in key[0]]:
            present = self._gathering.pop(key)
            lost = Lost((WorldRank(key[0].index(rank)),), reason)
            outgoing += [(other, lost) for other in present if other != rank]
        return outgoing

    def give_up(self, rank: LaunchedRank, waited_s: float) -> Outgoing[LaunchedRank]:
        """Return the messages that end the wait of ``rank`` in ``init``. They name the ranks that are missing there.

        If ``waited_s`` is not 0, the time limit of ``rank`` has passed after ``waited_s`` seconds. Then the wait of all
        ranks that wait for the same world ends, and that world is forgotten. If ``waited_s`` is 0, ``rank`` leaves for
        another reason, and the other ranks keep waiting.
        """
        for key, present in self._gathering.items():
            if rank in present:
                who = ", ".join(str(other) for other in key[0] if other not in present)
                text = f"rank {who} of {list(key[0])} had not called init() by then"
                if waited_s <= 0:
                    del present[rank]
                    return [(rank, Refused(text))]
                del self._gathering[key]
                refused = Refused(f"{text}; waited {waited_s:g} s (DDL_START_TIMEOUT_S)", late=True)
                return [(other, refused) for other in sorted(present)]
        return [(rank, Farewell())]

    def overdue(self, now_s: float) -> tuple[list[str], Outgoing[LaunchedRank], dict[LaunchedRank, str]]:
        """Return reports about worlds that cannot begin, because some of their ranks have not called ``init``.

        Also return the messages to send, and the ranks that did not answer when this ended the job, each with what is
        known of it. ``now_s`` is the time of a steady clock.
        """
        known, self._watches = self._watches, {}
        reports: list[str] = []
        due: Outgoing[LaunchedRank] = []
        dead: dict[LaunchedRank, str] = {}
        for key, present in list(self._gathering.items()):
            watch = known.get(key) or self._watch(key)
            texts, outgoing = watch.look(now_s)
            reports += texts
            self._watches[key] = watch
            due += [(rank, told) for rank, told in outgoing if rank in present]
            if watch.over:
                dead.update(watch.dead)
                del self._gathering[key]
        return reports, due, dead

    def _watch(self, key: WorldKey) -> StallWatch[LaunchedRank]:
        present = self._gathering[key]

        def details() -> Details[LaunchedRank]:
            missing = tuple(rank for rank in key[0] if rank not in present)
            return Details(missing, notes=(f"{on_ranks(sorted(present))} called init() and wait for the others",))

        why = "it may be stopped, or busy with what comes before its init()"
        wait = Awaited(("init", key), "in init()", "to call init()", details, why=why)
        return StallWatch(lambda: [wait], key[0], self._patience, ())

    def _cycle(self, start: WorldKey) -> set[WorldKey]:
        """Return the worlds, including ``start``, whose ranks wait for each other in a cycle.

        Such worlds can never begin. The result is empty if there is no cycle.
        """

        def awaited(key: WorldKey) -> set[WorldKey]:
            missing = set(key[0]) - set(self._gathering[key])
            return {other for other, present in self._gathering.items() if other != key and missing & set(present)}

        def reach(key: WorldKey) -> set[WorldKey]:
            seen: set[WorldKey] = set()
            todo = awaited(key)
            while todo:
                other = todo.pop()
                if other not in seen:
                    seen.add(other)
                    todo |= awaited(other)
            return seen

        return {other for other in reach(start) if start in reach(other)} | {start} if start in reach(start) else set()
