"""Compares the model parameters of the ranks after each step, by their digests, and describes a difference.

This module is part of the coordinator and does no I/O. No rank waits for a comparison: ranks report their digests and
continue to train. A step is compared when all members have reported it, except those that have left or joined.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ddlcore.errors import DdlInternalError
from ddlcore.messages.observing import Differ, Digests, Explain, Notice, Sample, Settled
from ddlcore.messages.ranks import AnyRank, WorldRank
from ddlcore.messages.to_rank import Outgoing

KEPT = 64  # how many steps of one optimizer may wait for reports; of more, the oldest is dropped
EXPLAIN_S = 8.0  # how long the ranks may take to send their values of the tensor that differs
FORGOTTEN = (
    "call broadcast_parameters(model.state_dict(), root_rank=0) after init() and before the first step, and step with "
    "ddl.DistributedOptimizer(optimizer). Where the ranks are to differ: verify_first_step=0 (--no-verify-first-step)"
)
DRIFTED = (
    "look for code that changes parameters on some ranks only, and for non-deterministic code (operations, data or "
    "random numbers that a parameter depends on); broadcast_parameters makes the parameters one again"
)
ALONE = "; {who} is alone: if it is alone again, on the same host, suspect the memory or the GPU there (`ddl doctor`)"
FORMATS = {
    "float64": "d", "float32": "f", "float16": "e", "bfloat16": "H", "int64": "q", "int32": "i", "int16": "h",
    "int8": "b", "uint8": "B", "uint16": "H", "bool": "?",
}  # fmt: skip


@dataclass
class _Optimizer:
    """The reports of the ranks about the parameters of one optimizer, and the last step at which they were equal."""

    told: dict[int, dict[WorldRank, Digests]] = field(default_factory=dict)  # by step, then by rank
    agreed: int = -1  # the last step at which all ranks had equal parameters
    descriptions: dict[bytes, tuple[str, ...]] = field(default_factory=dict)
    warned: bool = False


@dataclass
class _Explaining:
    """A difference that was found between the ranks, and the values that the ranks have sent so far to explain it."""

    differ: Differ
    advice: str
    count: int  # the number of tensors that differ
    asked: tuple[WorldRank, ...]
    samples: dict[WorldRank, Sample] = field(default_factory=dict)
    since_s: float | None = None


class Agreement:
    """Compares the parameters of the ranks of one world. All ranks here are ranks of this world.

    ``size`` is the size of the world. ``sets`` contains the ranks of each process set. ``joined`` returns the ranks
    that have called join.
    """

    def __init__(
        self, size: int, sets: Mapping[int, tuple[WorldRank, ...]], joined: Callable[[], Collection[WorldRank]] = tuple
    ) -> None:
        self._size = size
        self._sets = sets
        self._joined = joined
        self._optimizers: dict[tuple[int, str], _Optimizer] = {}
        self._gone: set[WorldRank] = set()
        self._settling: set[WorldRank] = set()
        self._explaining: _Explaining | None = None
        self.differ: Differ | None = None  # the difference because of which the job ended

    def hear(self, rank: WorldRank, message: Digests) -> Outgoing[WorldRank]:
        """Handle the digests that ``rank`` reports, and return the messages to send.

        Raises DdlInternalError if the digests do not belong to tensors that the rank has described.
        """
        if self.differ is not None or self._explaining is not None:
            return []
        one = self._optimizers.setdefault((message.set_id, message.label), _Optimizer())
        if message.tensors:
            one.descriptions[message.described] = message.tensors
        tensors = one.descriptions.get(message.described)
        if tensors is None or len(message.digests) != 8 * len(tensors):
            raise DdlInternalError(f"rank {rank} told digests of tensors that it did not describe")
        one.told.setdefault(message.step, {})[rank] = message
        if len(one.told) > KEPT:
            del one.told[min(one.told)]
        return self._compare()

    def settle(self, rank: WorldRank) -> Outgoing[WorldRank]:
        """Handle the message Settle of ``rank``, and return the messages to send.

        By this message, the rank says that it wants to leave as soon as all of its reports have been compared.
        """
        self._settling.add(rank)
        return self._compare()

    def gone(self, rank: WorldRank) -> Outgoing[WorldRank]:
        """Record that ``rank`` has left or died, so that no comparison waits for it. Return the messages to send."""
        self._gone.add(rank)
        self._settling.discard(rank)
        return self._compare() + (self._explained() if self._explaining is not None else [])

    def sampled(self, rank: WorldRank, message: Sample) -> Outgoing[WorldRank]:
        """Handle the answer of ``rank`` to Explain, and return the messages to send."""
        if self._explaining is None:
            return []
        self._explaining.samples[rank] = message
        return self._explained()

    def look(self, now_s: float) -> Outgoing[WorldRank]:
        """Do the work that depends on time, and return the messages to send. This is called about once a second.

        ``now_s`` is the present time of the caller's clock. If a difference was found, the ranks were asked for their
        values. If some of these values have not arrived after EXPLAIN_S seconds, stop waiting for them. If no
        difference was found, compare the reported digests again: a rank that has joined since the last comparison is
        not waited for any more.
        """
        waiting = self._explaining
        if waiting is None:
            return self._compare()
        if waiting.since_s is None:
            waiting.since_s = now_s
        return self._explained(now_s - waiting.since_s > EXPLAIN_S)

    # --- comparing

    def _compare(self) -> Outgoing[WorldRank]:
        outgoing: Outgoing[WorldRank] = []
        joined = set(self._joined())
        for (set_id, _), one in self._optimizers.items():
            members = set(self._sets.get(set_id, ())) - self._gone - joined
            for step in sorted(one.told):
                if self.differ is None and self._explaining is None and members <= one.told[step].keys():
                    outgoing += self._judge(one, step, one.told.pop(step))
        return outgoing + self._settle()

    def _settle(self) -> Outgoing[WorldRank]:
        """Return a message Settled for each rank that wants to leave and whose reports have all been compared."""
        if self.differ is not None or self._explaining is not None:
            return []  # these ranks will be told about the difference
        pending = {rank for one in self._optimizers.values() for told in one.told.values() for rank in told}
        settled = sorted(self._settling - pending)
        self._settling &= pending
        return [(rank, Settled()) for rank in settled]

    def _judge(self, one: _Optimizer, step: int, told: dict[WorldRank, Digests]) -> Outgoing[WorldRank]:
        first = told[min(told)]
        alike = all(each.digests == first.digests and each.described == first.described for each in told.values())
        names = {rank: one.descriptions[each.described] for rank, each in told.items()}
        index, groups, count = (-1, (), 0) if alike else differing(names, {r: e.digests for r, e in told.items()})
        if not groups:
            one.agreed = max(one.agreed, step)
            return []
        fatal = any(each.fatal for each in told.values())
        if one.warned and not fatal:
            return []
        one.warned = True
        tensor = names[min(told)][index] if index >= 0 else ""
        what = f"of {first.label}, after its step {step}"
        differ = Differ(_table(names) if index < 0 else what, tensor, groups, step, one.agreed)
        if index < 0:
            differ = msgspec.structs.replace(differ, text=f"{what}\n{differ.text}")
        advice = first.advice if one.agreed < 0 else ""
        if not fatal:
            return [(self._listener(), Notice(wording(differ, count, advice)))]
        self._explaining = _Explaining(differ, advice, count, tuple(sorted(told)))
        if index < 0:
            return self._explained(late=True)
        which = (first.set_id, first.label, step)
        return [(rank, Explain(*which, names[rank].index(tensor))) for rank in self._explaining.asked]

    def _listener(self) -> WorldRank:
        """Return the lowest rank that has not left. Warnings are written to the log of this rank."""
        return min(set(map(WorldRank, range(self._size))) - self._gone, default=WorldRank(0))

    def _explained(self, late: bool = False) -> Outgoing[WorldRank]:
        """Return the messages that end the job and say how far the ranks' values differ.

        The messages need a sample of the values from each rank that was asked. If a sample is missing, return no
        message. But if ``late`` is True, make the messages from the samples that have arrived.
        """
        waiting = self._explaining
        if waiting is None or not (late or all(r in waiting.samples or r in self._gone for r in waiting.asked)):
            return []
        first = waiting.samples.get(waiting.asked[0])
        distances = []
        for rank in waiting.asked[1:]:
            sample = waiting.samples.get(rank)
            far = None if first is None or sample is None else distance(first, sample)
            if far is not None and far != 0.0:
                distances.append((rank, far))
        differ = msgspec.structs.replace(waiting.differ, distances=tuple(distances))
        self._explaining = None
        self.differ = msgspec.structs.replace(differ, text=wording(differ, waiting.count, waiting.advice))
        return [(rank, self.differ) for rank in map(WorldRank, range(self._size)) if rank not in self._gone]


# --- functions without state, which ``verify`` also uses


def grouped(values: Mapping[AnyRank, object]) -> tuple[tuple[AnyRank, ...], ...]:
    """Return the ranks in groups. ``values`` contains a value for each rank; ranks with equal values are in one group.

    The largest group is first. Groups of the same size are sorted by their lowest rank.
    """
    groups: dict[object, list[AnyRank]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return tuple(sorted((tuple(group) for group in groups.values()), key=lambda group: (-len(group), group)))


def differing(
    names: Mapping[AnyRank, tuple[str, ...]], digests: Mapping[AnyRank, bytes]
) -> tuple[int, tuple[tuple[AnyRank, ...], ...], int]:
    """Compare the digests of the ranks' tensors. Return (index, groups, count).

    ``names`` contains the names of each rank's tensors. ``digests`` contains the digests of each rank's tensors in the
    same order, 8 bytes for each tensor. ``index`` is the position of the first tensor that differs, in the list of the
    lowest rank. ``groups`` are the ranks in groups with equal digests of this tensor. ``count`` is the number of
    tensors that differ. If the ranks do not have the same tensors, ``index`` is -1, and each group contains ranks with
    the same tensors. If nothing differs, ``index`` is -1 and there are no groups.
    """
    if len({tuple(sorted(own)) for own in names.values()}) > 1:
        return -1, grouped({rank: tuple(sorted(own)) for rank, own in names.items()}), 0
    own = {
        rank: {name: told[8 * i : 8 * i + 8] for i, name in enumerate(names[rank])} for rank, told in digests.items()
    }
    parts = [{rank: by_name[name] for rank, by_name in own.items()} for name in names[min(names)]]
    differ = [i for i, part in enumerate(parts) if len(set(part.values())) > 1]
    return (differ[0], grouped(parts[differ[0]]), len(differ)) if differ else (-1, (), 0)


def distance(one: Sample, other: Sample) -> float | None:
    """Return the largest absolute difference between elements at the same position of two samples.

    Return None if the samples have different lengths, are empty, or have a data type that this module cannot decode.
    Return NaN if an element is NaN in only one of the samples.
    """
    mine, theirs = _numbers(one), _numbers(other)
    if not mine or not theirs or len(mine) != len(theirs):
        return None
    most = 0.0
    for a, b in zip(mine, theirs):
        if a == b or (a != a and b != b):
            continue
        far = abs(a - b)
        if math.isnan(far):
            return far
        most = max(most, far)
    return most


def _numbers(sample: Sample) -> Sequence[float]:
    form = FORMATS.get(sample.dtype)
    if form is None:
        return ()
    data, size = sample.data, struct.calcsize("=" + form)
    numbers = struct.unpack(f"={len(data) // size}{form}", data[: len(data) // size * size])
    if sample.dtype != "bfloat16":
        return numbers
    wide = struct.pack(f"={len(numbers)}I", *(number << 16 for number in numbers))
    return struct.unpack(f"={len(numbers)}f", wide)


def wording(differ: Differ, count: int, advice: str = "") -> str:
    """Return the complete message for the user about the difference ``differ``.

    ``differ.text`` says which optimizer's parameters differ. ``count`` is the number of tensors that differ. ``advice``
    says what the user should do; if it is "", the message contains the usual advice.
    """
    what, _, table = differ.text.partition("\n")
    head = f"the ranks' parameters differ ({what})"
    lines = [f"{head}: they do not have the same tensors", table] if table else [head]
    if differ.tensor:
        more = f"; {count - 1} more {'differs' if count == 2 else 'differ'} behind it" if count > 1 else ""
        lines[0] += f": the first tensor that differs is {differ.tensor}{more}"
        lines += [f"  {_ranks(group)} {'have the same' if len(group) > 1 else 'is alone'}" for group in differ.groups]
    if differ.step >= 0:
        lines.append(
            f"  the last step after which they agreed: {differ.agreed_step if differ.agreed_step >= 0 else 'none'}"
        )
    if differ.distances:
        far = ", ".join(f"rank {rank} {value:g}" for rank, value in differ.distances)
        lowest = min(rank for group in differ.groups for rank in group)
        lines.append(f"  largest absolute difference from rank {lowest}: {far}")
    if not advice:
        advice = DRIFTED if differ.agreed_step >= 0 else FORGOTTEN
    lone = [group for group in differ.groups if len(group) == 1]
    if differ.agreed_step >= 0 and len(differ.groups) == 2 and len(lone) == 1:
        advice += ALONE.format(who=_ranks(lone[0]))
    return "\n".join([*lines, f"  what next: {advice}"])


def _table(names: Mapping[WorldRank, tuple[str, ...]]) -> str:
    """Return a table that shows how the ranks' tensors differ. Ranks with the same tensors form a group.

    Each group has a line. The line shows the number of tensors that each rank of the group has, and the group's tensor
    at the first position where two groups differ. ``names`` maps each rank to the names of its tensors.
    """
    most = max(map(len, names.values()))
    padded = {rank: (*own, *["nothing"] * (most - len(own))) for rank, own in names.items()}
    at = next(i for i in range(most) if len({own[i] for own in padded.values()}) > 1)
    lines = []
    for group in grouped(names):
        own = names[group[0]]
        lines.append(f"  {_ranks(group)}: {len(own)} tensors; number {at} is {padded[group[0]][at]}")
    return "\n".join(lines)


def _ranks(group: Sequence[int]) -> str:
    return f"rank{'' if len(group) == 1 else 's'} {', '.join(map(str, group))}"
