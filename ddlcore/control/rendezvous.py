"""Write and find the file by which ranks find each other if no launcher of ddl has started them.

The file holds endpoint and keys, and only this user can read it. Rank 0 creates it and the other ranks look for it. A
file that an earlier launch has left is not recognized by its age. Instead, the process at the endpoint must answer with
the keys in the file, which a process that has ended cannot.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ddlcore.control.credentials import Access
from ddlcore.errors import DdlInternalError

_LARGEST_BYTES = 1 << 16
_LONGEST = 100  # characters of a launch's name that appear in the name of its file
_PLAIN = re.compile(r"[^A-Za-z0-9._@+-]+")
_SHARED_DIR = "set DDL_RENDEZVOUS_DIR to a directory that all hosts share"


class Invitation(msgspec.Struct, frozen=True):
    """The contents of the rendezvous file: how the other ranks reach rank 0. Its repr shows no key."""

    nonce: str
    host: str  # name of rank 0's host, for error messages
    kin: str  # rank 0's ``surroundings.kin``: in processes with the same value, ``pid`` means the same process
    pid: int
    started: str  # start time of that process, see start_of: its id may have been reused
    endpoints: tuple[str, ...]  # in the order in which ranks try them
    access: Access

    def __repr__(self) -> str:
        return f"Invitation({self.host!r}, pid={self.pid}, {self.endpoints!r}, keys …)"


class Occupied(Exception):
    """The error that a launch of the same name is still running; ``invitation`` is the contents of its file."""

    def __init__(self, path: Path, invitation: Invitation) -> None:
        super().__init__(str(path))
        self.path = path
        self.invitation = invitation


def folders(wanted: str, variables: Mapping[str, str]) -> list[Path]:
    """Return the directories where the rendezvous file may be, the best first.

    If ``wanted`` is not empty, it is the only one; otherwise they follow from the environment ``variables`` and the
    user's home directory.
    """
    if wanted:
        return [Path(wanted).absolute()]
    found = [Path(variables["SLURM_SUBMIT_DIR"])] if variables.get("SLURM_SUBMIT_DIR") else []
    with contextlib.suppress(RuntimeError):  # a user without a home directory
        found.append(Path.home() / ".ddl")
    return found


def file_name(cluster: str, launch: str) -> str:
    """Return a file name that is the same on all ranks of a launch, and different for other running launches.

    ``launch`` is the id of the launch, and ``cluster`` the name of the kind of launcher that has given this id.
    """
    shown = _PLAIN.sub("_", launch)[:_LONGEST]
    mark = "" if shown == launch else "-" + hashlib.sha256(launch.encode()).hexdigest()[:12]
    return f"ddl-{cluster}-{shown}{mark}.rendezvous"


def start_of(pid: int) -> str:
    """Return the start time of process ``pid`` in the system's own unit.

    Returns an empty string if the system does not tell it. Together with the process id it identifies a process, even
    after the id was reused.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def has_ended(invitation: Invitation, kin: str) -> bool:
    """Return whether the process that wrote ``invitation`` is known to have ended.

    ``kin`` is the ``surroundings.kin`` of this process. If the writer's is another one, the writer cannot be seen from
    here, and the result is False.
    """
    if invitation.kin != kin:
        return False
    try:
        os.kill(invitation.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return True  # the id belongs to another user's process now: ours has ended
    return start_of(invitation.pid) != invitation.started


# --- rank 0


class Published:
    """The rendezvous file that this process has created and will remove."""

    def __init__(self, path: Path, invitation: Invitation) -> None:
        self.path = path
        self._nonce = invitation.nonce
        self._pid = os.getpid()

    def remove(self) -> None:
        """Remove the file, unless another launch has replaced it.

        May be called again; does nothing in a forked child.
        """
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError, _Unfit):
                if _read(self.path).nonce == self._nonce:
                    os.unlink(self.path)


def publish(places: Sequence[Path], name: str, invitation: Invitation, dead: Callable[[Invitation], bool]) -> Published:
    """Create the file ``name``, which contains ``invitation``, in the first of ``places`` where that is possible.

    If the file exists, it is replaced if ``dead`` returns True for its contents; otherwise Occupied is raised. Raises
    DdlInternalError with a message of one line if the file can be created in none of ``places``, for example because
    the existing ones belong to another user.
    """
    refusals = []
    for place in places:
        try:
            _prepare(place)
            return _create(place / name, invitation, dead)
        except _Unfit as unfit:
            refusals.append(str(unfit))
        except OSError as error:
            refusals.append(f"{place}: {error.strerror}")
    why = "; ".join(refusals) or "this user has no home directory"
    raise DdlInternalError(f"init: no place for the file by which the ranks find each other ({why}); {_SHARED_DIR}")


def _prepare(place: Path) -> None:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.name == ".ddl":  # our own directory; one that the user has named keeps its mode
        found = place.stat()
        if found.st_uid != os.geteuid():
            raise _Unfit(f"{place} belongs to another user")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.chmod(place, 0o700)


def _create(path: Path, invitation: Invitation, dead: Callable[[Invitation], bool]) -> Published:
    data = msgspec.json.encode(invitation)
    for _ in range(3):  # another launch of the same name may do this at the same time
        try:
            _put(path, data)
            return Published(path, invitation)
        except FileExistsError:
            _take_away(path, dead)
    raise _Unfit(f"{path} is replaced again and again by another launch of the same name")


def _put(path: Path, data: bytes) -> None:
    """Create the file ``path`` with the contents ``data``. Raises FileExistsError if it exists.

    Where the file system allows it, the file gets its name only when it is complete.
    """
    # A reader must never take half a file for a whole one, and two launches must not both believe that they have
    # created it. Writing to a temporary file and renaming it would be complete, but rename replaces an existing file
    # silently. So the data goes to a file without a name, and link, which fails if the name exists, makes it visible.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fd = os.open(path.parent, getattr(os, "O_TMPFILE", 0) | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError:  # not supported, as on network file systems: readers reject an incomplete file
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            nameless = False
        else:
            nameless = True
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # independent of the umask
            file.write(data)
            file.flush()
            if nameless:
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _take_away(path: Path, dead: Callable[[Invitation], bool]) -> None:
    try:
        found = _read(path)
    except FileNotFoundError:
        return
    except _Unfit as unfit:
        if not unfit.ours:
            raise
        found = None
    if found is not None and not dead(found):
        raise Occupied(path, found)
    # Between reading the file and removing it, another launch may have replaced it by its own. Unlinking by name could
    # then remove the file of a launch that is running. So the file is first renamed, which only one process can do
    # with a given file, and read again under its new name. If it is not the one that was found dead, it is put back.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    try:
        moved = _read(aside)
    except (OSError, _Unfit):
        moved = None
    if moved is not None and (found is None or moved.nonce != found.nonce):
        with contextlib.suppress(FileExistsError):  # another launch has replaced it meanwhile, and that one is running
            os.link(aside, path)
    os.unlink(aside)


# --- the others


def look(places: Sequence[Path], name: str) -> tuple[list[Invitation], list[str]]:
    """Return the invitations in the files ``name`` of ``places``, and one line of text for each file not to be trusted."""
    found, refused = [], []
    for place in places:
        try:
            found.append(_read(place / name))
        except _Unfit as unfit:
            refused.append(str(unfit))
        except OSError:
            continue
    return found, refused


class _Unfit(Exception):
    """The error that a file must not be trusted. ``ours``: it belongs to this user, so it may be replaced."""

    def __init__(self, text: str, ours: bool = False) -> None:
        super().__init__(text)
        self.ours = ours


def _read(path: Path) -> Invitation:
    """Return the invitation in the file ``path``.

    Raises OSError if there is no file, and _Unfit if it belongs to another user, can be accessed by others, or holds no
    valid invitation.
    """
    # Network file systems cache that a file does not exist. Opening its directory first makes them look again.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except PermissionError:
        raise _Unfit(f"{path} belongs to another user") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise _Unfit(f"{path}: {error.strerror}") from None
    finally:
        os.close(folder)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise _Unfit(f"{path} belongs to another user")
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
            raise _Unfit(f"{path} can be read or written by others", ours=True)
        data = file.read(_LARGEST_BYTES)
    try:
        return msgspec.json.decode(data, type=Invitation)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # raised below, outside of this clause: a chained cause would show parts of keys in a traceback
    raise _Unfit(f"{path} is no file of this version of ddl", ours=True)
