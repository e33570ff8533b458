"""What a generated training program is, and how one is made from choices; knows neither ddl nor how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace

import torch

from tests.semantics.choices import Choices
from tests.semantics.models import KINDS, SPARSE, VOCABULARY, WIDTH, BlockSpec

__all__ = [
    "EXCHANGES",
    "Between",
    "Failure",
    "Part",
    "Pass",
    "Program",
    "Step",
    "Surroundings",
    "batch",
    "make",
    "weight",
]

ZEROS = ("optimizer, none", "optimizer, zeros", "model, none", "model, zeros")
STEPS_OF_A_STEADY_PROGRAM = 12

# Collectives beside the training, each with a name and without; "async" is followed by a wait.
EXCHANGES = (
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "reducescatter",
    "barrier",
    "grouped allgather",
    "grouped reducescatter",
    "object",
    "objects",
    "allgather, async",
    "alltoall, async",
    "broadcast, async",
    "reducescatter, async",
)

# Types of elements. The first ones can also be summed; tensors of the others are only moved.
SUMMED = ("int64", "complex128", "complex64")
ELEMENTS = (*SUMMED, "uint32", "uint64", "float8_e4m3fn")

# Of these blocks, torch may leave the gradients of two parameters in the same memory, and a second backward then adds
# to it twice. Without a reduction in between that is as wrong in one process, so that there is nothing to compare with.
SHARING = ("views", "broadcast", "flipped")


@dataclass(frozen=True)
class Surroundings:
    """Where the program will run: not all programs make sense everywhere."""

    size: int
    overlap: bool = False
    interrupts: bool = False


@dataclass(frozen=True)
class Part:
    """A model with an optimizer of its own."""

    blocks: tuple[BlockSpec, ...]
    optimizer: str = "sgd"  # or "momentum", "adam", "sparse adam"
    op: str = "average"  # or "sum", or "weighted": an average with weights, see ``weight``
    passes: int = 1
    groups: int = 0
    predivide: float = 1.0
    names: str = "own"  # or "equal": as those of the other part; or "none"
    sparse_as_dense: bool = False
    members: tuple[int, ...] = ()  # the process set; (): all

    @property
    def is_sparse(self) -> bool:
        return any(spec.kind == SPARSE for spec in self.blocks)


@dataclass(frozen=True)
class Pass:
    """Forward and backward."""

    seed: int
    parts: tuple[int, ...] = (0,)
    detached: bool = False  # the last part gets the others' output without its graph
    rows: tuple[int, ...] = ()  # of each rank's batch
    left_out: tuple[tuple[tuple[int, int], ...], ...] = ()  # by rank: (part, block)
    scale: float = 1.0
    no_sync: tuple[int, ...] = ()  # parts
    twice: bool = False  # two losses of one graph
    penalty: bool = False  # on a gradient
    way: str = "method"  # or "function", or "list": how backward is called
    interrupted: tuple[tuple[int, int], ...] = ()  # (rank, microseconds): a signal in backward

    @property
    def touched(self) -> tuple[int, ...]:
        return self.parts[-1:] if self.detached else self.parts


@dataclass(frozen=True)
class Between:
    """Something between two passes, or between the last and the step."""

    what: str  # "clip", "clip values", "scale", "noise", "metric", "evaluate", "synchronize", "gradient", "exchange"
    part: int = 0  # of an exchange: the part whose process set it is made in
    seed: int = 0
    kind: str = ""  # of a metric, or of an exchange: one of EXCHANGES
    element: str = "int64"  # of an exchange: the type of its tensors, one of ELEMENTS or SUMMED
    interrupted: tuple[tuple[int, int], ...] = ()  # as in Pass: a signal in the wait of an asynchronous exchange


@dataclass(frozen=True)
class Failure:
    """What some ranks meet at the beginning of a step, and go on after ``zero_grad``."""

    where: str  # "forward", "backward"
    part: int
    block: int
    ranks: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Step:
    """From ``zero_grad`` to ``step``."""

    passes: tuple[tuple[Pass, tuple[Between, ...]], ...]
    stepping: tuple[int, ...] = (0,)  # the parts whose optimizers step
    zeroed: tuple[int, ...] = (0,)  # the parts whose gradients are cleared before
    zero: str = ZEROS[0]
    thaws: tuple[tuple[int, int, bool], ...] = ()  # (part, block, requires_grad)
    failures: tuple[Failure, ...] = ()
    way: str = "step"  # or "skip", "synchronize, skip", "closure", "twice", "none"
    interrupted: tuple[tuple[int, int], ...] = ()  # as in Pass: a signal in step


@dataclass(frozen=True)
class Program:
    """All that ranks do. ``str`` of it can be pasted into a test."""

    size: int
    parts: tuple[Part, ...]
    steps: tuple[Step, ...]
    seed: int = 0
    begins: str = "same"  # or "broadcast": the ranks begin with different values and take those of rank 0

    def __str__(self) -> str:
        lines = [f"Program(size={self.size}, seed={self.seed}, begins={self.begins!r}, parts=("]
        lines += [f"  {_brief(part)}," for part in self.parts]
        lines += ["), steps=("]
        lines += [f"  {_brief(step)}," for step in self.steps]
        return "\n".join([*lines, "))"])


def _brief(what: object) -> str:
    """As ``repr``, without what is as by default."""
    if isinstance(what, tuple):
        return "(" + "".join(f"{_brief(one)}, " for one in what) + ")"
    if not is_dataclass(what):
        return repr(what)
    given = [(one.name, getattr(what, one.name)) for one in fields(what) if getattr(what, one.name) != one.default]
    return f"{type(what).__name__}({', '.join(f'{name}={_brief(value)}' for name, value in given)})"


def batch(seed: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(inputs, ids, targets) that ``rank`` sees in the pass with this seed."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(rows, WIDTH, generator=random, dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (rows, 2), generator=random)
    return x, ids, torch.randn(rows, WIDTH, generator=random, dtype=torch.float64)


def weight(one: Pass, rank: int) -> int:
    """Return what the gradients of ``rank`` count for in this pass, of a part whose op is "weighted"; not 0 on all ranks."""
    return (3 * one.seed + rank) % 4


# --- making one


@dataclass
class _Maker:
    choices: Choices
    where: Surroundings
    parts: tuple[Part, ...] = ()
    seeds: int = 0
    same_rows: tuple[int, ...] = ()  # () where every batch has a size of its own
    frozen: set[tuple[int, int]] = field(default_factory=set)

    def seed(self) -> int:
        self.seeds += 1
        return self.seeds

    @property
    def weighted(self) -> tuple[str, ...]:
        """The op of an average with weights; () where one rank is alone, and may have the weight 0."""
        return ("weighted",) if self.where.size > 1 else ()


def make(choices: Choices, where: Surroundings) -> Program:
    """A program that fits its surroundings."""
    maker = _Maker(choices, where)
    count = choices.pick((1, 1, 1, 2))
    names = choices.pick(("own", "equal", "none"))
    maker.parts = tuple(_part(maker, count, names) for _ in range(count))
    if count == 2 and choices.chance(25):
        maker.parts = (maker.parts[0], _tables(maker, names))
    maker.frozen = {(p, b) for p, part in enumerate(maker.parts) for b, s in enumerate(part.blocks) if s.frozen}
    if choices.chance(60):
        maker.same_rows = _rows(maker)
    if choices.chance(50):
        template = _steps(maker, choices.whole(1, 2), steady=True)
        repeated = STEPS_OF_A_STEADY_PROGRAM // len(template)
        steps = [_later(step, 100 * i) for i in range(repeated) for step in template]
        if choices.chance(60):
            at = choices.whole(3, len(steps) - 1)
            steps[at:at] = _steps(maker, 1, steady=False)
    else:
        steps = _steps(maker, choices.whole(1, 5), steady=False)
    begins = choices.pick(("same", "same", "broadcast"))
    return Program(where.size, maker.parts, tuple(steps), choices.whole(0, 99), begins)


def _later(step: Step, by: int) -> Step:
    """The same step with other data."""
    passes = tuple(
        (replace(one, seed=one.seed + by), tuple(replace(between, seed=between.seed + by) for between in betweens))
        for one, betweens in step.passes
    )
    return replace(step, passes=passes)


def _rows(maker: _Maker) -> tuple[int, ...]:
    return tuple(maker.choices.pick((1, 2, 1, 3, 5)) for _ in range(maker.where.size))


def _part(maker: _Maker, parts: int, names: str) -> Part:
    choices, where = maker.choices, maker.where
    passes = choices.pick((1, 1, 1, 2, 3)) if parts == 1 else 1
    kinds = ["dense"] + [choices.pick(tuple(KINDS)) for _ in range(choices.whole(0, 4))]
    if passes > 1:
        kinds = ["gain" if kind in SHARING else kind for kind in kinds]
    blocks: list[BlockSpec] = []
    for i, kind in enumerate(kinds):
        spec = BlockSpec(kind)
        dense = [
            j for j, other in enumerate(blocks) if other.kind == "dense" and other.same_as < 0 and not other.frozen
        ]
        if i and kind == "dense" and choices.chance(40):
            spec = replace(spec, same_as=choices.pick(dense))
        elif i and kind != SPARSE and choices.chance(15):
            spec = replace(spec, frozen=True)
        if i and choices.chance(30):
            spec = replace(spec, gated=True)
        if i and choices.chance(20):
            ways = ["not reentrant"] if where.overlap and kind == "dense" else ["reentrant", "not reentrant"]
            spec = replace(spec, checkpoint=choices.pick(ways))
        blocks.append(spec)
    is_sparse = any(spec.kind == SPARSE for spec in blocks)
    op = choices.pick(("average", "average", "sum", *maker.weighted))
    members: tuple[int, ...] = ()
    if where.size > 2 and choices.chance(15):
        members = choices.pick(((0, 1), (0, where.size - 1), (1, 2)))
    return Part(
        tuple(blocks),
        optimizer="sgd" if is_sparse else choices.pick(("sgd", "momentum", "adam")),
        op=op,
        passes=passes,
        groups=choices.pick((0, 0, 0, 1, 2)),
        predivide=choices.pick((1.0, 1.0, 2.0)) if op == "average" else 1.0,
        names=names,
        sparse_as_dense=choices.chance(40) if is_sparse else False,
        members=members,
    )


def _tables(maker: _Maker, names: str) -> Part:
    """Sparse tables alone, for an optimizer that takes nothing else."""
    choices = maker.choices
    return Part(
        (BlockSpec(SPARSE), BlockSpec(SPARSE, gated=choices.chance(50))),
        optimizer="sparse adam",
        op=choices.pick(("average", "sum", *maker.weighted)),
        groups=choices.pick((0, 0, 1)),
        names=names,
        sparse_as_dense=choices.chance(40),
    )


def _steps(maker: _Maker, count: int, steady: bool) -> list[Step]:
    steps: list[Step] = []
    for _ in range(count):
        if len(maker.parts) == 2 and maker.choices.chance(50):
            steps += _two_turns(maker)  # as a GAN: each of the two optimizers steps by itself
        else:
            steps.append(_step(maker, steady))
    return steps


def _two_turns(maker: _Maker) -> list[Step]:
    """The second part steps on its own loss, then the first on one through the second, whose gradients are cleared."""
    choices = maker.choices
    alone = choices.pick(((1,), (0, 1)))
    zero = choices.pick(ZEROS[:2])
    one = Step(
        tuple((_pass(maker, alone, detached=len(alone) == 2, plain=True), ()) for _ in range(choices.whole(1, 2))),
        stepping=(1,),
        zeroed=(1,),
        zero=zero,
    )
    other = Step(((_pass(maker, (0, 1), plain=True), _betweens(maker, (0,))),), stepping=(0,), zeroed=(0,), zero=zero)
    return [one, other]


def _step(maker: _Maker, steady: bool) -> Step:
    choices, where = maker.choices, maker.where
    everything = tuple(range(len(maker.parts)))
    step = Step((), everything, everything, choices.pick(ZEROS))
    passes = maker.parts[0].passes
    if not steady and passes == 1 and choices.chance(15):
        step = replace(step, zeroed=())
    elif not steady and choices.chance(20):
        step = replace(step, failures=_failures(maker))
        shares = any(spec.kind in SHARING for part in maker.parts for spec in part.blocks)
        if shares and any(failure.where == "backward" for failure in step.failures):
            # Gradients that a failed backward left in one storage stay there when they are zeroed in place, and torch
            # itself then adds the next pass to them twice.
            step = replace(step, zero=step.zero.replace("zeros", "none"))
    # What is frozen keeps its gradient: a rank that has failed and cleared it would go on otherwise than the others.
    if not steady and not step.failures and choices.chance(20):
        step = replace(step, thaws=_thaws(maker))
    sparse = any(part.is_sparse for part in maker.parts)
    ways = ("step", "skip", "synchronize, skip", "twice", "none", "closure")
    step = replace(step, way=choices.pick(ways) if choices.chance(40) else "step")
    if step.way == "closure" and (passes > 1 or len(maker.parts) > 1 or not step.zeroed or sparse):
        step = replace(step, way="step")
    interrupts = where.interrupts and len(maker.parts) == 1 and step.way == "step" and bool(step.zeroed)
    if step.way == "closure":
        return replace(step, passes=((_pass(maker, everything, plain=True), ()),))
    made: list[tuple[Pass, tuple[Between, ...]]] = []
    if passes > 1:
        count = passes - 1 if not steady and choices.chance(15) else passes
        for i in range(count):
            edits = i == count - 1 == passes - 1
            made.append((_pass(maker, everything), _betweens(maker, everything if edits else ())))
    else:
        count = choices.pick((1, 1, 1, 2, 3))
        pending: set[int] = set()
        for i in range(count):
            one = _pass(maker, everything)
            shares = any(spec.kind in SHARING for p in one.touched for spec in maker.parts[p].blocks)
            if choices.chance(30) and not shares and (i < count - 1 or choices.chance(30)):
                withheld = one.touched if choices.chance(70) else one.touched[:1]
                one = replace(one, no_sync=withheld)
            pending = (pending - set(one.touched)) | set(one.no_sync)
            made.append((one, _betweens(maker, tuple(set(everything) - pending))))
    if interrupts and len(made) == 1 and not made[0][0].no_sync and not made[0][0].twice and passes == 1:
        one, between = made[0]
        one = replace(one, interrupted=_interrupts(maker))
        made = [(one, between)]
    if interrupts:
        step = replace(step, interrupted=_interrupts(maker))
    unreduced = made[-1][0].no_sync or (passes > 1 and len(made) < passes)
    if unreduced and step.way in ("skip", "synchronize, skip", "none"):
        step = replace(step, way="step")
    return replace(step, passes=tuple(made))


def _pass(maker: _Maker, parts: tuple[int, ...], detached: bool = False, plain: bool = False) -> Pass:
    choices, where = maker.choices, maker.where
    one = Pass(maker.seed(), parts, detached, maker.same_rows or _rows(maker))
    if len(maker.parts) == 1 and maker.parts[0].passes == 1 and not plain:
        one = replace(one, twice=choices.chance(10))
    gated = [(p, b) for p in parts for b, spec in enumerate(maker.parts[p].blocks) if spec.gated]
    if gated and choices.chance(70):
        one = replace(
            one, left_out=tuple(tuple(gate for gate in gated if choices.chance(50)) for _ in range(where.size))
        )
    reentrant = any(spec.checkpoint == "reentrant" for p in parts for spec in maker.parts[p].blocks)
    if not reentrant and not one.twice and choices.chance(8):
        one = replace(one, penalty=True)
    if choices.chance(10):
        one = replace(one, scale=4.0)
    return replace(one, way=choices.pick(("method", "method", "function", "list")))


def _betweens(maker: _Maker, edited: Sequence[int]) -> tuple[Between, ...]:
    """``edited``: the parts whose gradients are reduced by now, so that they may be changed."""
    choices = maker.choices
    found = []
    for _ in range(choices.pick((0, 0, 1, 1, 2))):
        what = choices.pick(
            ("clip", "exchange", "metric", "exchange", "evaluate", "clip values", "scale", "noise", "synchronize")
        )
        if what == "exchange":
            found.append(_exchange(maker))
        elif what == "metric":
            kind = choices.pick(("float", "integer", "float, no name", "integer, no name"))
            found.append(Between(what, kind=kind, seed=maker.seed()))
        elif what == "evaluate":
            found.append(Between(what, seed=maker.seed()))
        elif edited:
            part = choices.pick(list(edited))
            if not maker.parts[part].is_sparse or what in ("scale", "synchronize"):
                found.append(Between(what, part, maker.seed()))
    return tuple(found)


def _exchange(maker: _Maker) -> Between:
    choices = maker.choices
    kind = choices.pick(EXCHANGES) + choices.pick(("", ", no name"))
    element = choices.pick(SUMMED if "reducescatter" in kind else ELEMENTS) if choices.chance(40) else "int64"
    between = Between("exchange", choices.whole(0, len(maker.parts) - 1), maker.seed(), kind, element)
    waits = "async" in kind and maker.where.interrupts
    return replace(between, interrupted=_interrupts(maker)) if waits else between


def _failures(maker: _Maker) -> tuple[Failure, ...]:
    choices, where = maker.choices, maker.where
    everyone = tuple(range(where.size))
    some = tuple(rank for rank in everyone if choices.chance(50))
    failure = choices.pick(("forward", "backward"))
    if failure == "backward" and where.overlap:
        some = everyone  # what was sent must meet what the others have sent
    part = choices.whole(0, len(maker.parts) - 1)
    block = choices.whole(0, len(maker.parts[part].blocks) - 1)
    return (Failure(failure, part, block, some, maker.seed()),) if some else ()


def _thaws(maker: _Maker) -> tuple[tuple[int, int, bool], ...]:
    """Blocks that are trained from now on, or no longer; never the first of a part."""
    found = []
    for p, part in enumerate(maker.parts):
        for b, spec in enumerate(part.blocks):
            shared = spec.same_as >= 0 or any(other.same_as == b for other in part.blocks)
            if b and not shared and spec.kind != SPARSE and maker.choices.chance(40):
                maker.frozen ^= {(p, b)}
                found.append((p, b, (p, b) not in maker.frozen))
    return tuple(found)


def _interrupts(maker: _Maker) -> tuple[tuple[int, int], ...]:
    choices = maker.choices
    return tuple((rank, choices.whole(1, 1500)) for rank in range(maker.where.size) if choices.chance(30))
