"""Parse the options that say what ``ddl bench`` measures, such as ``4,64K,1M`` for sizes. Measures nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ddlcore.types import DType, Kind

OPERATIONS: Mapping[str, Kind] = {
    kind.name.lower(): kind
    for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER, Kind.ALLTOALL)
}
SIZES = "4,1K,16K,64K,256K,1M,4M,16M,64M"
DTYPES: Mapping[str, str] = {  # the name that users write -> the long name of the type
    {"F": "f", "I": "i", "U": "u", "B": "bf"}[dtype.name[0]] + dtype.name.lstrip("FIUB"): dtype.label
    for dtype in DType
    if dtype is not DType.BOOL  # a sum of booleans is not a sum of numbers
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)
_LARGEST = 1 << 34


@dataclass(frozen=True)
class BenchPlan:
    """The plan of one benchmark: measure each operation at each size, in ``rounds`` rounds.

    In each round, every contender (the transport alone, ddl's whole call, each peer) is timed once.
    """

    operations: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of the whole tensor
    dtype: str  # float32, …
    rounds: int
    peers: tuple[str, ...] = ()
    whole: bool = True  # time the whole call too
    budget_s: float = 0.05  # for one contender in one round, unless a single call takes longer


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse a list of sizes such as ``4,64K,1M``, and return the sizes in bytes, without repetitions.

    K, M and G mean 1024, 1024² and 1024³ bytes. Raises ValueError if a word is not a size from 1 byte to 16G.
    """
    sizes = []
    for word in _words(text, "sizes"):
        found = _SIZE.fullmatch(word)
        nbytes = int(found[1]) * _UNITS[found[2].upper()] if found else 0
        if not 0 < nbytes <= _LARGEST:
            raise ValueError(f"--sizes {text}: '{word}' is no size from 1 to 16G; write it as 4, 64K or 1M")
        sizes.append(nbytes)
    return tuple(dict.fromkeys(sizes))


def parse_operations(text: str) -> tuple[str, ...]:
    """Parse a list of collectives such as ``allreduce,broadcast``, and return their names without repetitions.

    Raises ValueError if a name is not in ``OPERATIONS``.
    """
    words = tuple(word.lower() for word in _words(text, "ops"))
    for word in words:
        if word not in OPERATIONS:
            raise ValueError(f"--ops {text}: '{word}' is not one of {', '.join(OPERATIONS)}")
    return tuple(dict.fromkeys(words))


def parse_dtype(text: str) -> str:
    """Return the long name, such as ``float32``, of the type that ``text`` names.

    ``text`` is a short name such as ``f32`` or a long name, in upper or lower case. Raises ValueError for an unknown
    type.
    """
    label = DTYPES.get(text.lower(), text.lower())
    if label not in DTYPES.values():
        raise ValueError(f"--dtype {text} is not one of {', '.join(DTYPES)}")
    return label


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"--{option} is empty; leave it out, or name some")
    return words
