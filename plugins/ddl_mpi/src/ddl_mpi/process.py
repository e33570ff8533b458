"""Manage MPI in this process: initialize it once, return its thread level, and finalize it at the end.

MPI is not finalized if a call of MPI was abandoned or the process fails, because MPI_Finalize could wait forever.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any, NoReturn

from ddl_mpi.library import WANTED
from ddlcore.contracts import pip_install
from ddlcore.errors import TransportError

SHARED = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.", "/dev/shm/vader_segment.")  # names from MPICH and Open MPI


class _Process:
    """The state of MPI in this process. There is one object of this class."""

    def __init__(self) -> None:
        self.forsaken: list[object] = []  # objects of abandoned calls; they are kept because MPI may still use them
        self.pid = 0  # of the process that has loaded MPI; a forked child process must not finalize MPI
        self.ours = False  # whether ddl must call MPI_Finalize, and not mpi4py
        self.status = 0  # the exit code passed to sys.exit


_process = _Process()


def load() -> ModuleType:
    """Import mpi4py.MPI, initialize MPI if it is not initialized, and return the module mpi4py.MPI.

    MPI is initialized for several threads if the library supports that, unless ``mpi4py.rc`` or the program itself has
    requested a lower thread level. The initialization waits for every process that the same mpiexec has started; the
    GIL is released during the wait. Raises TransportError if MPI is missing or was already finalized. The message is
    one line that says what to do.
    """
    first = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py
    except ImportError:
        raise TransportError(f"mpi: mpi4py is not installed; {pip_install(WANTED)}") from None
    rc = mpi4py.rc
    level = rc.thread_level if rc.threads else "single"
    ours = first and rc.initialize
    if ours:
        rc.initialize = False  # mpi4py would not release the GIL until all ranks have initialized MPI
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TransportError(
            f"mpi: mpi4py finds no MPI that it can load ({reason[0]}); {pip_install(WANTED)}"
        ) from error
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
    """Unlink the files of the memory that MPI shares between the processes of this host.

    The memory is then freed when the last process that maps it ends. MPI_Finalize would unlink the files, too, but a
    killed process never calls MPI_Finalize. Call this function only after every process that MPI has started on this
    host has initialized MPI, because until then a process may still have to map the memory.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            places = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps}
    except OSError:  # not Linux: only MPI_Finalize unlinks the files
        return
    for place in places:
        if place.startswith(SHARED):
            with contextlib.suppress(OSError):  # another rank has unlinked it
                os.unlink(place)


def _initialize(mpi: ModuleType, level: str) -> None:
    """Initialize MPI with the thread level ``level``, such as "multiple". Unlike mpi4py, release the GIL meanwhile.

    Raises TransportError if MPI reports an error.
    """
    provided = ctypes.c_int()
    wanted = getattr(mpi, f"THREAD_{level.upper()}")
    code = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, int(wanted), ctypes.byref(provided))
    if code:
        raise TransportError(f"mpi: MPI_Init_thread failed: {mpi.Get_error_string(code)}")
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def library_version() -> str:
    """Return the first line of the MPI library's version text. Call ``load`` before this function."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split())


def threads_supported() -> bool:
    """Return whether several threads may call MPI at the same time.

    If so, the program itself may call MPI while ddl uses MPI. Initializes MPI if necessary. Raises TransportError if
    MPI is missing or was already finalized.
    """
    mpi = load()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


@lru_cache(maxsize=1)
def cuda_aware() -> bool:
    """Return whether MPI reports that it accepts addresses of CUDA memory. Call ``load`` before this function."""
    from mpi4py import MPI

    try:
        ask = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support  # looked up in the library that mpi4py has loaded
    except (OSError, AttributeError):
        return False
    return bool(ask())


def forsake(*things: object) -> None:
    """Record that a call of MPI was abandoned. From now on, this process will not call MPI_Finalize.

    This cannot be undone. ``things`` are objects that are kept alive, because MPI may still use them.
    """
    _process.forsaken.append(things)


def forsaken() -> bool:
    """Return whether a call of MPI was abandoned in this process."""
    return bool(_process.forsaken)


# --- the end
#
# MPI_Finalize waits for all processes that MPI has started. It waits forever if one of these processes is lost, or if
# this process ends early because of an error that the other processes do not have. In these cases this process ends
# without MPI_Finalize.


def _at_exit() -> None:
    """Call MPI_Finalize, or make sure that the process ends without MPI_Finalize.

    The interpreter calls this function at the end of the process, after the job's shutdown. (Functions that are
    registered later with atexit are called first, and the shutdown is registered later.)
    """
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
    """Replace ``sys.exit`` by a function that stores the exit code and then does the same as before.

    The stored code is needed in ``_at_exit``, because the interpreter does not pass the exit code to atexit functions.
    The code of a plain ``raise SystemExit(code)`` is not stored.
    """
    exit_as_before = sys.exit

    def note_exit(status: Any = None, /) -> NoReturn:
        _process.status = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
        exit_as_before(status)

    sys.exit = note_exit


class _LastWord:
    """An object whose deletion ends the process. This happens just before the finalizer of mpi4py would run.

    The interpreter deletes the object when it clears this module, after all atexit functions. The object is needed if
    the program has imported mpi4py.MPI before ddl. In this case mpi4py has registered a finalizer in C that calls
    MPI_Finalize, and that cannot be removed.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self._exit = os._exit  # stored here, because the interpreter may clear the module os first

    def __del__(self) -> None:
        self._exit(self._code)


_last_word: _LastWord | None = None
