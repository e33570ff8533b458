"""One rank of a measurement: opens each contender's transport and times their allreduces in alternation.

    python -m tools.crossing.rank SPEC RANK

SPEC is a file with the JSON that ``Spec`` reads. Rank 0 writes a line of JSON for each row to its stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ddl_doctor.bench.contenders import Call, finish
from ddl_doctor.bench.results import MeasuredRow
from ddl_doctor.bench.timing import Together

from ddlcore.contracts.store import PrefixStore
from ddlcore.contracts.transport import Context, Transport
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_transport
from ddlcore.runtime.routes import choose_route
from ddlcore.types import Buffer, DType, Member, ReduceOp
from tools.crossing.store import FileStore

__all__ = ["Contender", "Spec", "play"]

OPEN_S = 60.0
WARM = 2  # rounds that fill caches, touch pages and open the connections' windows


@dataclass(frozen=True)
class Contender:
    """A transport and its settings."""

    backend: str
    settings: Mapping[str, int] | None = None
    compressed: bool = False  # float32 is sent as bfloat16, cast before and after


@dataclass(frozen=True)
class Spec:
    """One start of a number of ranks."""

    hosts: tuple[int, ...]  # of each rank
    addresses: tuple[str, ...]  # of each host
    sizes: tuple[int, ...]  # bytes of float32
    contenders: Mapping[str, Contender]
    rounds: int
    directory: str  # shared by all ranks, for the store

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        given: dict[str, Any] = json.loads(text)
        given["contenders"] = {name: Contender(**one) for name, one in given["contenders"].items()}
        for name in ("hosts", "addresses", "sizes"):
            given[name] = tuple(given[name])
        return cls(**given)


def play(spec: Spec, rank: int, tell: Callable[[MeasuredRow], None]) -> None:
    """Run the measurement; every rank calls this. ``tell`` gets the rows, which are the same on all ranks."""
    transports = {name: _open(spec, rank, name, one) for name, one in spec.contenders.items()}
    together = Together(next(iter(transports.values())))
    for nbytes in spec.sizes:
        memory = np.zeros(nbytes // 4, np.float32)
        calls = {name: _call(transports[name], one, memory) for name, one in spec.contenders.items()}
        for name, call in calls.items():
            _check(name, call, memory, rank, len(spec.hosts))
        tell(MeasuredRow("allreduce", nbytes, _times(calls, together, spec.rounds)))
    together.barrier()
    for transport in transports.values():
        transport.close()


def _open(spec: Spec, rank: int, name: str, contender: Contender) -> Transport:
    settings, registry = settings_of(os.environ, {"backend": contender.backend})
    members = tuple(Member(r, host) for r, host in enumerate(spec.hosts))
    transport = build_transport(registry, choose_route(contender.backend, members, registry))
    store = PrefixStore(f"{name}/", FileStore(Path(spec.directory)))
    given = {**settings, **(contender.settings or {})}
    address = spec.addresses[spec.hosts[rank]]
    transport.open(Context(rank, members, store, CpuKernels(), given, OPEN_S, name, address))
    return transport


def _call(transport: Transport, contender: Contender, memory: Any) -> Call:
    whole = _buffer(memory, DType.F32)
    if not contender.compressed:
        return lambda: finish(transport.allreduce(whole, whole, ReduceOp.Sum))
    kernels = CpuKernels()
    half = _buffer(np.zeros(memory.size, np.uint16), DType.BF16)

    def compressed() -> None:
        kernels.pack([whole.address], [whole.count], DType.F32, half.address, DType.BF16)
        finish(transport.allreduce(half, half, ReduceOp.Sum))
        kernels.unpack(half.address, DType.BF16, [whole.address], [whole.count], DType.F32)

    return compressed


def _check(name: str, call: Call, memory: Any, rank: int, size: int) -> None:
    """Check the sum of small integers, which every type represents exactly, and leave zeros in the memory."""
    memory[:] = 1 + rank % 2
    call()
    right = size + size // 2
    if not (memory == right).all():
        raise SystemExit(f"{name}: the sum of {size} ranks is wrong")
    memory[:] = 0


def _times(calls: Mapping[str, Call], together: Together, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank, with one call of each contender in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(-WARM, rounds):
        first = number % len(names)  # no contender always follows the same other one
        for name in names[first:] + names[:first]:
            together.barrier()
            begun_s = time.perf_counter()
            calls[name]()
            if number >= 0:
                times[name].append(time.perf_counter() - begun_s)
    return {name: together.slowest(values) for name, values in times.items()}


def _buffer(array: Any, dtype: DType) -> Buffer:
    return Buffer(array.__array_interface__["data"][0], array.size, dtype, array.shape, owner=array)


if __name__ == "__main__":
    spec, number = Spec.from_json(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    play(spec, number, lambda row: print(json.dumps(row.as_json()), flush=True) if number == 0 else None)
