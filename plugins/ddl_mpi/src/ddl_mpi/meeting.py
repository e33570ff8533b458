"""How the ranks of one communicator find each other in MPI's world, by what each says of itself in the store."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ddl_mpi import process
from ddlcore.contracts.transport import Context
from ddlcore.errors import DeadlineExceeded, TransportError

__all__ = ["check_threads", "meet"]

SLICE_S = 0.2  # how soon an abort is noticed
TAGS = 1 << 15  # MPI promises that many
HOW = "start the script by `ddl run --backend mpi` or by mpirun, or use another --backend"


def check_threads(mpi: Any) -> None:
    """Raises TransportError where MPI may not be called from this thread."""
    level = mpi.Query_thread()
    if level >= mpi.THREAD_SERIALIZED or mpi.Is_thread_main():
        return
    name = "MPI_THREAD_FUNNELED" if level == mpi.THREAD_FUNNELED else "MPI_THREAD_SINGLE"
    raise TransportError(
        f"mpi: MPI was begun for one thread ({name}), and ddl calls it from a thread of its own; "
        'import mpi4py.MPI with mpi4py.rc.thread_level = "multiple" (its default), or call ddl.init() before it. '
        "An MPI that has no more serves only programs that leave MPI to ddl"
    )


def meet(mpi: Any, context: Context, check: Callable[[], None]) -> Any:
    """A communicator of ``context.members``, in their order; ``check`` raises to end the wait.

    Raises TransportError, the same on every rank, where they are not in one world of MPI, and
    DeadlineExceeded past ``context.timeout_s``.
    """
    until_s = time.monotonic() + context.timeout_s
    world = mpi.COMM_WORLD
    me = [world.Get_rank(), world.Get_size(), process.library_version(), secrets.randbelow(TAGS)]
    context.store.set(f"mpi/{context.rank}", json.dumps(me).encode())
    facts = [_fact(context, rank, until_s, check) for rank in range(context.size)]
    objection = _objection(context, facts)
    if objection:
        raise TransportError(f"mpi: {objection}")
    comm = _create(mpi, [fact[0] for fact in facts], facts[0][3], context, until_s, check)
    if context.rank == 0:
        context.store.delete("mpi/")  # who has created it with us, has read all
    return comm


def _fact(context: Context, rank: int, until_s: float, check: Callable[[], None]) -> list[Any]:
    while True:
        check()
        left_s = until_s - time.monotonic()
        try:
            fact: list[Any] = json.loads(context.store.get(f"mpi/{rank}", max(0.0, min(SLICE_S, left_s))))
            return fact
        except DeadlineExceeded:
            if left_s <= SLICE_S:
                raise DeadlineExceeded(
                    f"mpi: rank {context.members[rank].rank} has not come to {context.name or 'the communicator'} "
                    f"within {context.timeout_s:g} s"
                ) from None


def _objection(context: Context, facts: Sequence[Sequence[Any]]) -> str:
    """Why these processes have no communicator; empty where they have."""
    libraries: dict[str, list[int]] = {}
    for member, fact in zip(context.members, facts):
        libraries.setdefault(fact[2], []).append(member.rank)
    if len(libraries) > 1:
        who = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {name}"
            for name, ranks in libraries.items()
        )
        return f"two MPIs are mixed ({who}); install the same one for all ranks, such as {process.INSTALL}"
    if all(fact[1] == 1 for fact in facts):
        return f"these processes were not started by MPI, which sees {len(facts)} worlds of one; {HOW}"
    if len({fact[0] for fact in facts}) < len(facts) or len({fact[1] for fact in facts}) > 1:
        return f"these processes are not in one world of MPI (ranks there: {[fact[0] for fact in facts]}); {HOW}"
    return ""


def _create(
    mpi: Any, ranks: Sequence[int], tag: int, context: Context, until_s: float, check: Callable[[], None]
) -> Any:
    """Create_group, which waits for the others inside MPI: on a thread that can be left behind, where MPI allows it."""
    world = mpi.COMM_WORLD
    whole = world.Get_group()
    group = whole.Incl(list(ranks))
    whole.Free()
    made: list[Any] = []
    done = threading.Event()

    def create() -> None:
        try:
            made.append(world.Create_group(group, tag))
        except Exception as error:
            made.append(error)
        finally:
            done.set()

    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        create()
    else:
        threading.Thread(target=create, name="ddl-mpi-open", daemon=True).start()
    while not done.wait(SLICE_S / 4):
        try:
            check()
            if time.monotonic() >= until_s:
                raise DeadlineExceeded(f"mpi: the ranks of {context.name} did not meet within {context.timeout_s:g} s")
        except BaseException:
            process.forsake(group, made)
            raise
    group.Free()
    if isinstance(made[0], Exception):
        raise TransportError(f"mpi: {context.name or 'the communicator'} cannot be made: {made[0]}") from made[0]
    return made[0]
