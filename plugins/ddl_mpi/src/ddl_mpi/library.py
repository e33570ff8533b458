"""Find the MPI library that mpi4py loads, and its mpiexec, without initializing MPI in this process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ddlcore.contracts import pip_install
from ddlcore.errors import PluginError

WANTED = "ddl-mpi[mpich]"  # the distribution whose installation also installs an MPI library
PROBE_TIMEOUT_S = 30.0
NAMES = {  # a word in the version text of the library or its mpiexec -> our name
    "open mpi": "openmpi",
    "openrte": "openmpi",
    "prrte": "openmpi",
    "intel": "intel",
    "mvapich": "mvapich",
    "cray": "cray",
    "mpich": "mpich",
    "hydra": "mpich",
}
# Runs in a separate process, because a loaded library cannot be unloaded. MPI allows this one call before MPI_Init.
PROBE = """
import ctypes, importlib.util, json, os
spec = importlib.util.find_spec("mpi4py.MPI")
mpi = ctypes.CDLL(spec.origin, os.RTLD_LAZY)
ask = mpi.MPI_Get_library_version
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
ask(text, ctypes.byref(length))
class Info(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]
info = Info()
ctypes.CDLL(None).dladdr(ctypes.cast(ask, ctypes.c_void_p), ctypes.byref(info))
print(json.dumps([os.fsdecode(info.path or b""), text.value.decode(errors="replace")]))
"""


@dataclass(frozen=True)
class MpiLibrary:
    """An installed MPI library, and its mpiexec.

    ``mpiexec`` was run to check that it belongs to this library, and not to another MPI.
    """

    name: str  # mpich, openmpi, intel, mvapich, cray; unknown
    path: str  # of libmpi
    version: str  # the first line of the library's version text
    mpiexec: str  # absolute path


@lru_cache(maxsize=4)
def find_library(python: str = sys.executable) -> MpiLibrary:
    """Return the MPI library that mpi4py loads in the interpreter ``python``, and the mpiexec of this library.

    The first call takes about 0.1 s. Raises PluginError if mpi4py, the library or its mpiexec is missing, or if every
    mpiexec that is found belongs to another MPI. The message is one line that says what to install.
    """
    path, text = _ask_library(python)
    name = name_of(text)
    others = []
    for candidate in _candidates(name, path, python):
        other = _name_of_mpiexec(candidate)
        if other == name or "unknown" in (other, name):
            return MpiLibrary(name, path, text.strip().split("\n")[0].strip(), candidate)
        others.append(f"{candidate} is {other}'s")
    if others:
        raise PluginError(
            f"two MPIs are mixed: mpi4py loads {name} ({path}), but {'; '.join(others)}; "
            f"install one MPI only in this environment ({pip_install(WANTED)}), or put {name}'s mpiexec first on PATH"
        )
    raise PluginError(
        f"mpi4py loads {name} ({path}), but there is no mpiexec with it or on PATH; {pip_install(WANTED)}"
    )


def name_of(text: str) -> str:
    """Return the name of the MPI with the version text ``text``, such as "mpich", or "unknown".

    A version text is printed by an MPI library or by its mpiexec.
    """
    text = text.lower()
    # The texts of libraries derived from MPICH also contain "MPICH" or "hydra", but after their own name. So the word
    # that occurs first counts.
    found = [(text.find(word), name) for word, name in NAMES.items() if word in text]
    return min(found)[1] if found else "unknown"


def _ask_library(python: str) -> tuple[str, str]:
    """Return the path of the MPI library that mpi4py loads in the interpreter ``python``, and its version text.

    Raises PluginError if mpi4py or the library is missing.
    """
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{python} could not be asked which MPI its mpi4py loads: {error}") from None
    if done.returncode == 0:
        path, text = json.loads(done.stdout.splitlines()[-1])
        return path, text
    reason = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
    if "No module named 'mpi4py'" in reason or "'NoneType'" in reason:
        raise PluginError(f"mpi4py is not installed for {python}; {pip_install(WANTED)}")
    if "cannot load MPI library" in done.stderr or "libmpi" in reason:
        raise PluginError(f"mpi4py finds no MPI library; {pip_install(WANTED)}")
    raise PluginError(f"mpi4py's MPI cannot be loaded: {reason}; {pip_install(WANTED)}")


def _candidates(name: str, path: str, python: str) -> Iterator[str]:
    """Yield the paths of mpiexec programs that exist, the best first.

    These folders are searched, in this order: ``bin`` in each of the four folders above the folder of the library
    ``path``, the folder of the interpreter ``python``, and the folders of PATH. ``name`` is the name of the MPI, which
    may be a part of the program's name.
    """
    names = [f"mpiexec.{name}", "mpiexec"]
    if name == "mpich":
        names = ["mpiexec.hydra", "mpiexec.mpich", "mpiexec"]
    folders = [parent / "bin" for parent in list(Path(os.path.abspath(path)).parents)[1:5] if parent != parent.parent]
    folders.append(Path(os.path.abspath(python)).parent)
    seen = set()
    for folder in map(str, folders):
        for each in names:
            found = shutil.which(each, path=folder)
            if found and found not in seen:
                seen.add(found)
                yield found
    for each in names:
        found = shutil.which(each)
        if found and found not in seen:
            seen.add(found)
            yield found


def _name_of_mpiexec(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return name_of(done.stdout + done.stderr)
