"""Makes random programs for worlds of machines: steps of a loop, and steps that do something else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddlcore.messages import Spec, encode
from ddlcore.types import DType, Kind
from tests.runtime.machines import Call, Do, Join, Meet, Wait

__all__ = ["JOIN", "Loop", "Tensor", "one_shot", "random_loop"]

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

    def __post_init__(self) -> None:
        self.programs = [[[]] for _ in self.sets[0]]
        self.open = [{} for _ in self.sets[0]]

    def step(self, tensors: Sequence[Tensor], wild: bool = False, late: float = 0.0) -> None:
        """Each rank asks in an order of its own. ``wild``: it waits in between; ``late``: how many waits are put off."""
        self.number += 1
        for rank in self.sets[0]:
            own = [tensor for tensor in tensors if rank in self.sets[tensor.set_id]]
            if not wild or self.rng.random() < 0.5:
                self.rng.shuffle(own)
            row = self.programs[rank][0]
            for tensor in own:
                row += self._waits(rank, [tensor.label])
                label = f"{tensor.label}#{self.number}"
                row.append(Call(label, tensor.set_id, tensor.tensors))
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

    def _waits(self, rank: int, labels: Sequence[str]) -> list[Do]:
        return [Wait(self.open[rank].pop(label)) for label in labels if label in self.open[rank]]


def random_sets(rng: random.Random, size: int, most: int) -> dict[int, tuple[int, ...]]:
    sets = {0: tuple(range(size))}
    for set_id in range(1, 1 + rng.randint(0, most)):
        sets[set_id] = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
    return sets


def random_tensors(rng: random.Random, sets: dict[int, tuple[int, ...]], count: int, prefix: str) -> list[Tensor]:
    tensors = []
    for i in range(count):
        set_id = rng.choice(list(sets))
        kind = rng.choice([Kind.ALLREDUCE] * 6 + [Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER])
        root = sets[set_id][0] if kind is Kind.BROADCAST else -1
        name = f"{prefix}{i}" if rng.random() < 0.8 else ""
        shape = () if kind.is_ragged else (rng.randint(1, 3) if name else 4,)
        group = rng.choice([2, 3]) if name and kind is Kind.ALLREDUCE and rng.random() < 0.2 else 0
        spec = encode(
            Spec(kind, rng.choice([DType.F32, DType.F64]) if name else DType.F32, shape, root=root, group=group)
        )
        names = [f"{name}[{k}]" for k in range(group)] if group else [name]
        tensors.append(Tensor(f"{prefix}{i}", set_id, tuple((one, spec) for one in names)))
    return tensors


def random_loop(rng: random.Random, size: int, steps: int, most_tensors: int) -> Loop:
    """A training loop as they come: evaluation in between, metrics, unused tensors, meetings outside, joins, odd steps."""
    sets = random_sets(rng, size, 2)
    loop = Loop(sets, rng)
    train = random_tensors(rng, sets, rng.randint(1, most_tensors), "t")
    train += random_tensors(rng, sets, 1, "u") * (rng.random() < 0.2)
    anonymous = [tensor for tensor in train if not tensor.tensors[0][0]]
    train = [tensor for tensor in train if tensor not in anonymous]
    others = [random_tensors(rng, sets, rng.randint(1, 3), prefix) for prefix in "ev"]
    wildness, late = rng.choice([0, 0.05, 0.3]), rng.choice([0, 0, 0.3])
    for step in range(steps):
        tensors = list(train)
        if rng.random() < wildness:
            _odd(rng, loop, tensors)
            continue
        if rng.random() < 0.1:
            for _ in range(rng.randint(1, 3)):
                loop.step([tensor for tensor in rng.choice(others) if tensor.tensors[0][0]])
        loop.step(tensors, late=late)
        for tensor in anonymous:  # calls without names must come in one order on all ranks
            loop.step([Tensor(f"{tensor.label}.{step}", tensor.set_id, tensor.tensors)], late=1.0)
    loop.finish()
    return loop


def _odd(rng: random.Random, loop: Loop, tensors: list[Tensor]) -> None:
    what = rng.randrange(5)
    if what == 0 and len(tensors) > 1:
        tensors.remove(rng.choice(tensors))
        loop.step(tensors)
    elif what == 1:
        loop.step(tensors, wild=True)
        ranks = sorted(rng.sample(loop.sets[0], rng.randint(1, len(loop.sets[0]))))
        loop.meet(ranks, within=2 * len(tensors))
    elif what == 2:
        loop.join()
    elif what == 3 and len(loop.sets[0]) > 1:
        alone = rng.choice(loop.sets[0])
        loop.step([tensor for tensor in tensors if alone not in loop.sets[tensor.set_id]])  # this rank pauses
    else:
        loop.step([*tensors, *random_tensors(rng, loop.sets, 1, "x")], late=0.5)


def one_shot(rng: random.Random) -> tuple[Loop, int]:
    """A loop that teaches a schedule of one to three batches, then one step in which each rank waits as it pleases.

    With a set of two among three ranks, tensors of no schedule, and a meeting outside ddl, mostly.
    The collectives that may be in flight at once.
    """
    size = rng.choice([2, 3])
    sets = {0: tuple(range(size))}
    if size == 3 and rng.random() < 0.7:
        sets[1] = tuple(sorted(rng.sample(range(3), 2)))
    names = iter("abcdef")
    spec = encode(Spec(Kind.ALLREDUCE, DType.F32, (4,)))
    batches = []
    for _ in range(rng.choice([1, 2, 3])):
        set_id = rng.choice(list(sets))
        batches.append([Tensor(name, set_id, ((name, spec),)) for name, _ in zip(names, range(rng.choice([1, 2])))])
    loop = Loop(sets, rng)
    for _ in range(4):
        for batch in batches:
            loop.step(batch)
    tensors = [tensor for batch in batches for tensor in batch]
    if rng.random() < 0.6:
        tensors.append(Tensor("x", rng.choice(list(sets)), (("x", spec),)))
    before = [len(program[0]) for program in loop.programs]
    loop.step(tensors, wild=True, late=rng.choice([0.0, 0.0, 0.0, 0.0, 1.0]))
    if rng.random() < 0.4:
        for program, start in zip(loop.programs, before):
            program[0].insert(rng.randint(start, len(program[0])), Meet("e", size))
    return loop, rng.choice([1, 2, 3])


def labels(program: Sequence[Sequence[Do]]) -> Iterator[str]:
    for row in program:
        for deed in row:
            if isinstance(deed, Call):
                yield deed.label
