"""The file by which ranks find each other where no launcher carries a key: endpoint and key, readable by this user only.

Rank 0 creates it, the others look for it. No clock is asked whether it is fresh: what it leads to
must answer with the keys that stand in it, and a process that has ended does not.
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

__all__ = ["Invitation", "Occupied", "Published", "file_name", "folders", "has_ended", "look", "publish", "start_of"]

_LARGEST_BYTES = 1 << 16
_LONGEST = 100  # characters of a launch's name that a file's name shows
_PLAIN = re.compile(r"[^A-Za-z0-9._@+-]+")
_SHARED_DIR = "set DDL_RENDEZVOUS_DIR to a directory that all hosts share"


class Invitation(msgspec.Struct, frozen=True):
    """What the file holds. Its repr shows no key."""

    nonce: str
    host: str  # name of rank 0's host, for messages
    kin: str  # rank 0 is seen by its process id from where this is the same
    pid: int
    started: str  # of that process, see start_of: its number may be a stranger's by now
    endpoints: tuple[str, ...]  # in the order in which they are to be tried
    access: Access

    def __repr__(self) -> str:
        return f"Invitation({self.host!r}, pid={self.pid}, {self.endpoints!r}, keys …)"


class Occupied(Exception):
    """A launch of the same name is alive; its ``invitation`` says where."""

    def __init__(self, path: Path, invitation: Invitation) -> None:
        super().__init__(str(path))
        self.path = path
        self.invitation = invitation


def folders(wanted: str, variables: Mapping[str, str]) -> list[Path]:
    """Where the file may stand, best first: ``wanted`` alone if that is not empty."""
    if wanted:
        return [Path(wanted).absolute()]
    found = [Path(variables["SLURM_SUBMIT_DIR"])] if variables.get("SLURM_SUBMIT_DIR") else []
    with contextlib.suppress(RuntimeError):  # a user without a home
        found.append(Path.home() / ".ddl")
    return found


def file_name(cluster: str, launch: str) -> str:
    """The name that all ranks of one launch derive, and no other launch that runs at the same time."""
    shown = _PLAIN.sub("_", launch)[:_LONGEST]
    mark = "" if shown == launch else "-" + hashlib.sha256(launch.encode()).hexdigest()[:12]
    return f"ddl-{cluster}-{shown}{mark}.rendezvous"


def start_of(pid: int) -> str:
    """When process ``pid`` began, as the system counts: with the number, a name for it. "" where it is not told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def has_ended(invitation: Invitation, kin: str) -> bool:
    """Whether the process that wrote it is seen to be no more; False where it cannot be seen from here."""
    if invitation.kin != kin:
        return False
    try:
        os.kill(invitation.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return True  # somebody else's: ours has ended
    return start_of(invitation.pid) != invitation.started


# --- rank 0


class Published:
    """The file, from its creation to its removal by the process that created it."""

    def __init__(self, path: Path, invitation: Invitation) -> None:
        self.path = path
        self._nonce = invitation.nonce
        self._pid = os.getpid()

    def remove(self) -> None:
        """May be repeated; does nothing in a forked child, nor to a file that another launch has put there."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError, _Unfit):
                if _read(self.path).nonce == self._nonce:
                    os.unlink(self.path)


def publish(places: Sequence[Path], name: str, invitation: Invitation, dead: Callable[[Invitation], bool]) -> Published:
    """Creates the file in the first of ``places`` where that can be.

    One that is there already is replaced if ``dead`` says that nobody stands behind it, else Occupied
    is raised. Raises DdlInternalError in one line where no place takes it, or it is another user's.
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
    if place.name == ".ddl":  # ours alone; a directory that the user named is as they want it
        found = place.stat()
        if found.st_uid != os.geteuid():
            raise _Unfit(f"{place} belongs to another user")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.chmod(place, 0o700)


def _create(path: Path, invitation: Invitation, dead: Callable[[Invitation], bool]) -> Published:
    data = msgspec.json.encode(invitation)
    for _ in range(3):  # others of the same name may do the same at the same time
        try:
            _put(path, data)
            return Published(path, invitation)
        except FileExistsError:
            _take_away(path, dead)
    raise _Unfit(f"{path} is replaced again and again by another launch of the same name")


def _put(path: Path, data: bytes) -> None:
    """Makes the file, exclusively; where the file system can do it, complete at once and without a name before."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fd = os.open(path.parent, getattr(os, "O_TMPFILE", 0) | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError:  # a network's, or no Linux: readers take a part of it for none
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            nameless = False
        else:
            nameless = True
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # whatever the umask
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
        with contextlib.suppress(FileExistsError):  # meanwhile somebody else replaced it: this one is alive
            os.link(aside, path)
    os.unlink(aside)


# --- the others


def look(places: Sequence[Path], name: str) -> tuple[list[Invitation], list[str]]:
    """The invitations that stand in ``places``, and one line for each file that is not to be trusted."""
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
    """A file that is not to be trusted. ``ours``: it may be replaced."""

    def __init__(self, text: str, ours: bool = False) -> None:
        super().__init__(text)
        self.ours = ours


def _read(path: Path) -> Invitation:
    """OSError where there is none; _Unfit for what is another's, open to others, or no invitation."""
    # Opening the directory first makes network file systems look again, instead of remembering that there was none.
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
        pass  # raised below, outside: the cause would carry pieces of keys into a traceback
    raise _Unfit(f"{path} is no file of this version of ddl", ours=True)
