"""MPI as this process has it: begun once, asked for threads, and ended unless a peer is gone."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any, NoReturn

from ddl_mpi.library import INSTALL
from ddlcore.errors import TransportError

__all__ = ["cuda_aware", "forsake", "forsaken", "library_version", "load", "threads_supported", "unname_shared_memory"]

SHARED = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.", "/dev/shm/vader_segment.")  # as MPICH and Open MPI call theirs


class _Process:
    """What this process has to do with MPI."""

    def __init__(self) -> None:
        self.forsaken: list[object] = []  # what MPI may still write to, or be called back with
        self.pid = 0  # of who has loaded it; a forked child ends nothing
        self.ours = False  # whether MPI_Finalize is ours to call, and not mpi4py's
        self.status = 0  # what sys.exit was given


_process = _Process()


def load() -> ModuleType:
    """mpi4py.MPI, initialized, with threads where the MPI has them. Whoever imports it first decides that.

    Initializing waits for every process that the same mpiexec has started, and does so without the
    interpreter's lock. Raises TransportError, in one line that says what next, where MPI is not there or is over.
    """
    first = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py
    except ImportError:
        raise TransportError(f"mpi: mpi4py is not installed; {INSTALL}") from None
    rc = mpi4py.rc
    level = rc.thread_level if rc.threads else "single"
    ours = first and rc.initialize
    if ours:
        rc.initialize = False  # mpi4py would hold the interpreter's lock until all ranks have come
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TransportError(f"mpi: mpi4py finds no MPI that it can load ({reason[0]}); {INSTALL}") from error
    if MPI.Is_finalized():
        raise TransportError("mpi: this process has ended MPI (MPI.Finalize) already, and cannot begin it again")
    if not MPI.Is_initialized():
        _initialize(MPI, level if ours else "multiple")
        _process.ours = rc.finalize is None or bool(rc.finalize)
    if _process.pid != os.getpid():
        _process.pid = os.getpid()
        _note_exits()
        atexit.register(_at_exit)
    return MPI


def unname_shared_memory() -> None:
    """Takes the names away from the memory that MPI shares within this host; it goes with the last process that maps it.

    MPI does that when it ends, to which a process that is killed does not come. Only when every process
    that MPI has started on this host has begun MPI, and so has mapped it.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            places = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps}
    except OSError:  # no Linux: MPI's own end must do
        return
    for place in places:
        if place.startswith(SHARED):
            with contextlib.suppress(OSError):  # another rank has done it
                os.unlink(place)


def _initialize(mpi: ModuleType, level: str) -> None:
    """As mpi4py does it, but with the interpreter's lock released."""
    provided = ctypes.c_int()
    wanted = getattr(mpi, f"THREAD_{level.upper()}")
    code = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, int(wanted), ctypes.byref(provided))
    if code:
        raise TransportError(f"mpi: MPI_Init_thread failed: {mpi.Get_error_string(code)}")
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def library_version() -> str:
    """What the MPI says of itself, in one line. ``load`` first."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split())


def threads_supported() -> bool:
    """Whether several threads may call MPI at once, so that a program's own calls mix with ours.

    Initializes MPI, and raises TransportError, as ``load`` does.
    """
    mpi = load()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


@lru_cache(maxsize=1)
def cuda_aware() -> bool:
    """Whether MPI takes addresses of CUDA memory, by its own word; False where it does not say. ``load`` first."""
    from mpi4py import MPI

    try:
        ask = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support  # of the library that mpi4py has loaded
    except (OSError, AttributeError):
        return False
    return bool(ask())


def forsake(*things: object) -> None:
    """A collective was given up, which cannot be undone: MPI keeps ``things``, and MPI_Finalize is not called."""
    _process.forsaken.append(things)


def forsaken() -> bool:
    """Whether a collective was given up in this process."""
    return bool(_process.forsaken)


# --- the end
#
# MPI_Finalize waits for all processes that MPI has started: for ever, where one is gone, and where this one
# ends early because of an error that the others do not share. Then the process ends without it.


def _at_exit() -> None:
    """After the job was shut down, which is registered later."""
    if os.getpid() != _process.pid:
        return
    failed = getattr(sys, "last_value", None) is not None
    code = 1 if failed else _process.status
    if not (_process.forsaken or code):
        if _process.ours:
            _finalize()
    elif not _process.ours:
        global _last_word
        _last_word = _LastWord(code)


def _finalize() -> None:
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _note_exits() -> None:
    """The interpreter tells nobody the exit code that it has in mind; a bare ``raise SystemExit(code)`` is not seen."""
    exit_as_before = sys.exit

    def note_exit(status: Any = None, /) -> NoReturn:
        _process.status = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
        exit_as_before(status)

    sys.exit = note_exit


class _LastWord:
    """Ends the process when the interpreter clears its modules: after all of atexit, before mpi4py's finalizer.

    The program has imported mpi4py.MPI first, whose finalizer, in C, cannot be taken back.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self._exit = os._exit  # the module os may be gone by then

    def __del__(self) -> None:
        self._exit(self._code)


_last_word: _LastWord | None = None
