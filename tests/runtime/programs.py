"""Makes random programs for worlds of machines: steps of a loop, and steps that do something else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ddlcore.messages.coding import decode_spec, encode
from ddlcore.messages.spec import Spec
from ddlcore.types import DType, Kind
from tests.runtime.deeds import Call, Do, Join, Meet, Part, Wait

__all__ = ["JOIN", "Loop", "Tensor", "beside", "one_shot", "random_loop", "random_sets", "random_tensors"]

JOIN = encode(Spec(Kind.JOIN))


@dataclass(frozen=True)
class Tensor:
    """What a loop asks for in a step: one call, with one tensor or a group of them."""

    label: str
    set_id: int
    tensors: tuple[tuple[str, bytes], ...]


@dataclass
class Loop:
    """The programs of all ranks, as they grow step by step. A call is waited for before its name is used again."""

    sets: dict[int, tuple[int, ...]]
    rng: random.Random
    programs: list[list[list[Do]]] = field(default_factory=list)
    open: list[dict[str, str]] = field(default_factory=list)  # by rank: calls by tensor's label
    number: int = 0
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.programs = [[[]] for _ in self.sets[0]]
        self.open = [{} for _ in self.sets[0]]

    def step(
        self, tensors: Sequence[Tensor], wild: bool = False, late: float = 0.0, liar: int = -1, lies: int = 1
    ) -> None:
        """Each rank asks in an order of its own. ``wild``: it waits in between; ``late``: how many waits are put off.

        ``lies`` ranks from ``liar`` on ask for another shape, each for its own, of the last tensor of a call.
        """
        self.number += 1
        for rank in sorted(set(self.sets[0]) - self.gone):
            own = [tensor for tensor in tensors if rank in self.sets[tensor.set_id]]
            if not wild or self.rng.random() < 0.5:
                self.rng.shuffle(own)
            row = self.programs[rank][0]
            for tensor in own:
                row += self._waits(rank, [tensor.label])
                label = f"{tensor.label}#{self.number}"
                asked = tensor.tensors
                if liar >= 0 and liar <= rank < liar + lies:
                    asked = (*asked[:-1], (asked[-1][0], _reshaped(asked[-1][1], 10 + rank)))
                row.append(Call(label, tensor.set_id, asked))
                self.open[rank][tensor.label] = label
                if wild and self.rng.random() < 0.5:
                    row += self._waits(rank, [tensor.label])
            done = [tensor.label for tensor in own if self.rng.random() >= late]
            self.rng.shuffle(done)
            row += self._waits(rank, done)

    def meet(self, ranks: Sequence[int], within: int = 0) -> None:
        """A meeting outside, ``within`` so many of the last deeds of each rank."""
        self.number += 1
        for rank in ranks:
            row = self.programs[rank][0]
            row.insert(len(row) - self.rng.randint(0, min(within, len(row))), Meet(f"m{self.number}", len(ranks)))

    def finish(self) -> None:
        for rank in self.sets[0]:
            self.programs[rank][0] += self._waits(rank, list(self.open[rank]))

    def join(self) -> None:
        self.finish()
        self.number += 1
        for rank in self.sets[0]:
            self.programs[rank][0].append(Join(f"join#{self.number}"))

    def leave(self, rank: int) -> None:
        """``rank`` says Bye when all that it asked for has ended; the others go on."""
        self.programs[rank][0] += [*self._waits(rank, list(self.open[rank])), Part()]
        self.gone.add(rank)

    def add_set(self, ranks: tuple[int, ...]) -> int:
        """All ranks add a process set, and wait for it. Its number."""
        self._control(encode(Spec(Kind.ADD_SET, ranks=ranks)))
        self.sets[len(self.sets)] = ranks
        return len(self.sets) - 1

    def remove_set(self, set_id: int) -> None:
        """All ranks remove a process set that nothing waits in."""
        self._control(encode(Spec(Kind.REMOVE_SET, ranks=(set_id,))))

    def _control(self, spec: bytes) -> None:
        self.finish()
        self.number += 1
        for rank in self.sets[0]:
            label = f"control#{self.number}"
            self.programs[rank][0] += [Call(label, 0, (("", spec),)), Wait(label)]

    def _waits(self, rank: int, labels: Sequence[str]) -> list[Do]:
        return [Wait(self.open[rank].pop(label)) for label in labels if label in self.open[rank]]


def _reshaped(spec: bytes, extent: int) -> bytes:
    return encode(msgspec.structs.replace(decode_spec(spec), shape=(extent,)))


def random_sets(rng: random.Random, size: int, most: int) -> dict[int, tuple[int, ...]]:
    sets = {0: tuple(range(size))}
    for set_id in range(1, 1 + rng.randint(0, most)):
        sets[set_id] = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
    return sets


def random_tensors(rng: random.Random, sets: dict[int, tuple[int, ...]], count: int, prefix: str) -> list[Tensor]:
    tensors = []
    for i in range(count):
        set_id = rng.choice([set_id for set_id, ranks in sets.items() if ranks])
        kind = rng.choice([Kind.ALLREDUCE] * 6 + [Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER])
        root = sets[set_id][0] if kind is Kind.BROADCAST else -1
        name = f"{prefix}{i}" if rng.random() < 0.8 else ""
        shape = () if kind.is_ragged else (rng.randint(1, 3) if name else 4,)
        group = rng.choice([2, 3]) if name and kind is Kind.ALLREDUCE and rng.random() < 0.2 else 0
        dtype = rng.choice([DType.F32, DType.F64]) if name else DType.F32
        is_object = kind is Kind.ALLGATHER and rng.random() < 0.5  # negotiated in every step
        spec = encode(Spec(kind, dtype, shape, root=root, group=group, is_object=is_object))
        names = [f"{name}[{k}]" for k in range(group)] if group else [name]
        tensors.append(Tensor(f"{prefix}{i}", set_id, tuple((one, spec) for one in names)))
    return tensors


def random_loop(rng: random.Random, size: int, steps: int, most_tensors: int) -> Loop:
    """A training loop as they come: evaluation in between, metrics, unused tensors, meetings outside, joins, odd steps."""
    sets = random_sets(rng, size, 2)
    loop = Loop(sets, rng)
    everything = random_tensors(rng, sets, rng.randint(1, most_tensors), "t")
    anonymous = [tensor for tensor in everything if not tensor.tensors[0][0]]
    train = [tensor for tensor in everything if tensor.tensors[0][0]]
    others = [
        [one for one in random_tensors(rng, sets, rng.randint(1, 3), prefix) if one.tensors[0][0]] for prefix in "ev"
    ]
    oddity, late = rng.choice([0, 0.05, 0.3]), rng.choice([0, 0, 0.3])
    leaver, leaving = rng.randrange(size), rng.choice([-1, -1, rng.randrange(steps)])
    for step in range(steps):
        if step == leaving:
            loop.leave(leaver)
        if rng.random() < oddity:
            _odd(rng, loop, list(train))
            continue
        if rng.random() < 0.1:
            for _ in range(rng.randint(1, 3)):
                loop.step(rng.choice(others))
        loop.step(train, late=late)
        for tensor in anonymous:  # calls without names must come in one order on all ranks
            loop.step([Tensor(f"{tensor.label}.{step}", tensor.set_id, tensor.tensors)], late=1.0)
    loop.finish()
    return loop


def _odd(rng: random.Random, loop: Loop, train: list[Tensor]) -> None:
    """A step that is not like the others."""
    size = len(loop.sets[0])
    what = rng.choice(["unused", "wild", "pause", "extra", "lie", *["join", "sets"] * (not loop.gone)])
    if what == "unused":
        loop.step(rng.sample(train, rng.randint(0, len(train))))
    elif what == "wild":
        loop.step(train, wild=True)
        ranks = sorted(rng.sample(range(size), rng.randint(1, size)))
        if not loop.gone:
            loop.meet(ranks, within=2 * len(train))
    elif what == "join":
        loop.join()
    elif what == "sets":
        set_id = loop.add_set(tuple(sorted(rng.sample(range(size), rng.randint(1, size)))))
        for tensors in [random_tensors(rng, {set_id: loop.sets[set_id]}, 2, "n")] * 5:
            loop.step([*train, *[tensor for tensor in tensors if tensor.tensors[0][0]]])
        if rng.random() < 0.5:
            loop.remove_set(set_id)
            loop.sets[set_id] = ()
    elif what == "pause":
        alone = rng.randrange(size)
        loop.step([tensor for tensor in train if alone not in loop.sets[tensor.set_id]])
    elif what == "lie":
        loop.step(train, liar=rng.randrange(size), lies=rng.randint(1, size))
    else:
        loop.step([*train, *[one for one in random_tensors(rng, loop.sets, 1, "x") if one.tensors[0][0]]], late=0.5)


def beside(one: Loop, other: Loop) -> Loop:
    """Two threads on each rank: each runs the loop of its own."""
    one.programs = [mine + others for mine, others in zip(one.programs, other.programs)]
    return one


def one_shot(rng: random.Random) -> tuple[Loop, int]:
    """A loop that teaches a schedule of one to three buckets, then one step in which each rank waits as it pleases.

    With a set of two among three ranks, tensors of no schedule, and a meeting outside ddl, mostly.
    The collectives that may be in flight at once.
    """
    size = rng.choice([2, 3])
    sets = {0: tuple(range(size))}
    if size == 3 and rng.random() < 0.7:
        sets[1] = tuple(sorted(rng.sample(range(3), 2)))
    names = iter("abcdef")
    spec = encode(Spec(Kind.ALLREDUCE, DType.F32, (4,)))
    buckets = []
    for _ in range(rng.choice([1, 2, 3])):
        set_id = rng.choice(list(sets))
        buckets.append([Tensor(name, set_id, ((name, spec),)) for name, _ in zip(names, range(rng.choice([1, 2])))])
    loop = Loop(sets, rng)
    for _ in range(4):
        for bucket in buckets:
            loop.step(bucket)
    tensors = [tensor for bucket in buckets for tensor in bucket]
    if rng.random() < 0.6:
        tensors.append(Tensor("x", rng.choice(list(sets)), (("x", spec),)))
    before = [len(program[0]) for program in loop.programs]
    loop.step(tensors, wild=True, late=rng.choice([0.0, 0.0, 0.0, 0.0, 1.0]))
    if rng.random() < 0.4:
        for program, start in zip(loop.programs, before):
            program[0].insert(rng.randint(start, len(program[0])), Meet("e", size))
    return loop, rng.choice([1, 2, 3])
