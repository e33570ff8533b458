"""Create an MPI communicator for the ranks of a communicator of ddl.

The ranks first exchange facts through the job's store, such as their ranks in MPI's world (MPI_COMM_WORLD).
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ddl_mpi import process
from ddl_mpi.library import WANTED
from ddlcore.contracts import pip_install
from ddlcore.contracts.transport import Context
from ddlcore.errors import DeadlineExceeded, TransportError

SLICE_S = 0.2  # an abort is noticed within this time
TAGS = 1 << 15  # MPI guarantees at least so many tags
T = TypeVar("T")
HOW = "start the script by `ddl run --backend mpi` or by mpirun, or use another --backend"


def check_threads(mpi: Any) -> None:
    """Raise TransportError if MPI may only be called from the thread that has initialized it.

    ``mpi`` is the module mpi4py.MPI.
    """
    level = mpi.Query_thread()
    if level >= mpi.THREAD_SERIALIZED:
        return
    name = "MPI_THREAD_FUNNELED" if level == mpi.THREAD_FUNNELED else "MPI_THREAD_SINGLE"
    raise TransportError(
        f"mpi: MPI was begun for one thread ({name}), and ddl calls it from a thread of its own; begin it with "
        'mpi4py.rc.thread_level = "multiple" (the default), or "serialized" if the program leaves MPI to ddl '
        "between init() and shutdown(), or call ddl.init() before anything imports mpi4py.MPI"
    )


def begin(context: Context, check: Callable[[], None]) -> None:
    """Initialize MPI if it is not initialized, and wait until all ranks have initialized MPI.

    All processes that MPI has started must initialize it, even if some of them do not use MPI, because MPI_Init waits
    for all of them. ``check`` is called during the wait, and may raise an exception to end the wait. Raises
    TransportError if MPI cannot be initialized, and DeadlineExceeded after ``context.timeout_s`` seconds.
    """
    until_s = time.monotonic() + context.timeout_s
    mpi: Any = apart(process.load, context, until_s, check)
    if context.store.add("mpi/begun", 1) == context.size:
        context.store.set("mpi/all", b"")
    _awaited(context, "mpi/all", f"not all ranks of {_name(context)} have begun MPI", until_s, check)
    if mpi.COMM_WORLD.Get_size() == context.size:  # then all processes that MPI has started have initialized MPI
        process.unname_shared_memory()


def meet(context: Context, check: Callable[[], None]) -> tuple[Any, Any]:
    """Create an MPI communicator of the ranks ``context.members``, in this order.

    Return two values: the module mpi4py.MPI, and the communicator. MPI is initialized if necessary. ``check`` is called
    during the wait for other ranks, and may raise an exception to end the wait. Raises TransportError, with the same
    text on every rank, if the ranks are not in one MPI world. Raises DeadlineExceeded after ``context.timeout_s``
    seconds.
    """
    until_s = time.monotonic() + context.timeout_s
    mpi: Any = apart(process.load, context, until_s, check)
    check_threads(mpi)
    world = mpi.COMM_WORLD
    me = [world.Get_rank(), world.Get_size(), process.library_version(), secrets.randbelow(TAGS)]
    context.store.set(f"mpi/{context.rank}", json.dumps(me).encode())
    facts = [_fact(context, rank, until_s, check) for rank in range(context.size)]
    text = objection(context, facts)
    if text:
        raise TransportError(f"mpi: {text}")
    if world.Get_size() == context.size:  # then all processes that MPI has started have initialized MPI
        process.unname_shared_memory()
    comm = _create(mpi, [fact[0] for fact in facts], facts[0][3], context, until_s, check)
    if context.rank == 0:
        context.store.delete("mpi/")  # every rank that has created the communicator has read all keys
    return mpi, comm


def _fact(context: Context, rank: int, until_s: float, check: Callable[[], None]) -> list[Any]:
    late = f"rank {context.members[rank].rank} has not come to {_name(context)}"
    fact: list[Any] = json.loads(_awaited(context, f"mpi/{rank}", late, until_s, check))
    return fact


def _awaited(context: Context, key: str, late: str, until_s: float, check: Callable[[], None]) -> bytes:
    """Wait for the value of ``key`` in the store, and return the value.

    Raises DeadlineExceeded, with ``late`` in its text, at the time ``until_s`` (of time.monotonic). An exception that
    ``check`` raises ends the wait, too.
    """
    while True:
        check()
        left_s = until_s - time.monotonic()
        try:
            return context.store.get(key, max(0.0, min(SLICE_S, left_s)))
        except DeadlineExceeded:
            if left_s <= SLICE_S:
                raise DeadlineExceeded(f"mpi: {late} within {context.timeout_s:g} s") from None


def _name(context: Context) -> str:
    return context.name or "the communicator"


def objection(context: Context, facts: Sequence[Sequence[Any]]) -> str:
    """Return the reason why these processes cannot have a common MPI communicator, or "" if they can.

    ``facts`` holds a sequence for each member, which begins with three values: the member's rank in MPI's world, the
    size of MPI's world, and the version text of the member's MPI library.
    """
    libraries: dict[str, list[int]] = {}
    for member, fact in zip(context.members, facts):
        libraries.setdefault(fact[2], []).append(member.rank)
    if len(libraries) > 1:
        who = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {name}"
            for name, ranks in libraries.items()
        )
        return f"two MPIs are mixed ({who}); install the same one for all ranks, such as {pip_install(WANTED)}"
    if all(fact[1] == 1 for fact in facts):
        return f"these processes were not started by MPI, which sees {len(facts)} worlds of one; {HOW}"
    if len({fact[0] for fact in facts}) < len(facts) or len({fact[1] for fact in facts}) > 1:
        return f"these processes are not in one world of MPI (ranks there: {[fact[0] for fact in facts]}); {HOW}"
    return ""


def _create(
    mpi: Any, ranks: Sequence[int], tag: int, context: Context, until_s: float, check: Callable[[], None]
) -> Any:
    world = mpi.COMM_WORLD
    whole = world.Get_group()
    group = whole.Incl(list(ranks))
    whole.Free()
    try:
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            comm = world.Create_group(group, tag)
        else:
            comm = apart(lambda: world.Create_group(group, tag), context, until_s, check)
    except mpi.Exception as error:
        raise TransportError(f"mpi: {context.name or 'the communicator'} cannot be made: {error}") from error
    group.Free()  # not after an error: a thread that was left behind may use it
    return comm


def apart(wait: Callable[[], T], context: Context, until_s: float, check: Callable[[], None]) -> T:
    """Call ``wait`` in a new thread, and return its result. ``wait`` waits inside MPI for other processes.

    An exception that ``wait`` or ``check`` raises is passed on. Raises DeadlineExceeded at the time ``until_s`` (of
    time.monotonic). If this function ends because of ``check`` or the deadline, the new thread still waits in MPI.
    Nobody waits for the thread any more, and MPI will not be finalized.
    """
    values: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def call() -> None:
        try:
            values.append(wait())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=call, name="ddl-mpi-open", daemon=True).start()
    while not done.wait(SLICE_S / 4):
        try:
            check()
            if time.monotonic() >= until_s:
                raise DeadlineExceeded(
                    f"mpi: the ranks of {context.name or 'the communicator'} did not meet in MPI "
                    f"within {context.timeout_s:g} s; every process that MPI has started must take part"
                )
        except BaseException:
            process.forsake(values, call)
            raise
    if errors:
        raise errors[0]
    return values[0]
