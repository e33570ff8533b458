"""Write and find the rendezvous file, by which ranks find each other if no launcher of ddl has started them.

The rendezvous file contains rank 0's endpoints and keys, and only this user can read the file. Rank 0 creates the file,
and the other ranks look for it. The age of a file does not tell whether an earlier launch has left the file behind.
Instead, a rank checks that the process at an endpoint in the file answers with the keys in the file. If the process has
ended, no answer comes.
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
    """The contents of the rendezvous file: the data by which the other ranks reach rank 0. The repr shows no key."""

    nonce: str
    host: str  # name of rank 0's host, for error messages
    kin: str  # rank 0's ``surroundings.kin``: in processes with the same value, ``pid`` means the same process
    pid: int
    started: str  # start time of rank 0's process, see start_of. Another process may get the same pid later
    endpoints: tuple[str, ...]  # in the order in which ranks try them
    access: Access

    def __repr__(self) -> str:
        return f"Invitation({self.host!r}, pid={self.pid}, {self.endpoints!r}, keys …)"


class Occupied(Exception):
    """Raised if another launch with the same name is still running.

    ``path`` is the rendezvous file of that launch, and ``invitation`` is the contents of the file.
    """

    def __init__(self, path: Path, invitation: Invitation) -> None:
        super().__init__(str(path))
        self.path = path
        self.invitation = invitation


def folders(wanted: str, variables: Mapping[str, str]) -> list[Path]:
    """Return the directories where the rendezvous file may be, in the order in which they are tried.

    If ``wanted`` (a setting) is not empty, it is the only directory. Otherwise the list has the directory in the
    variable SLURM_SUBMIT_DIR of the environment ``variables``, if set, and then ``.ddl`` in the user's home directory.
    """
    if wanted:
        return [Path(wanted).absolute()]
    found = [Path(variables["SLURM_SUBMIT_DIR"])] if variables.get("SLURM_SUBMIT_DIR") else []
    with contextlib.suppress(RuntimeError):  # a user without a home directory
        found.append(Path.home() / ".ddl")
    return found


def file_name(cluster: str, launch: str) -> str:
    """Return a file name that is the same on all ranks of a launch, and different for other running launches.

    ``launch`` is the id of the launch. ``cluster`` is the name of the kind of launcher that has given this id.
    """
    shown = _PLAIN.sub("_", launch)[:_LONGEST]
    mark = "" if shown == launch else "-" + hashlib.sha256(launch.encode()).hexdigest()[:12]
    return f"ddl-{cluster}-{shown}{mark}.rendezvous"


def start_of(pid: int) -> str:
    """Return the start time of process ``pid`` as a number in the system's own unit.

    Returns an empty string if the system does not provide the start time. Process id and start time together identify a
    process, even if another process gets the same id later.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def has_ended(invitation: Invitation, kin: str) -> bool:
    """Return whether the process that wrote ``invitation`` is known to have ended.

    ``kin`` is the result of ``surroundings.kin`` in this process. If ``invitation.kin`` is different, this process
    cannot see the process ids of the writer, and the result is False.
    """
    if invitation.kin != kin:
        return False
    try:
        os.kill(invitation.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return True  # the id now belongs to a process of another user, so the process of this user has ended
    return start_of(invitation.pid) != invitation.started


# --- rank 0


class Published:
    """The rendezvous file that this process has created and will remove."""

    def __init__(self, path: Path, invitation: Invitation) -> None:
        self.path = path
        self._nonce = invitation.nonce
        self._pid = os.getpid()

    def remove(self) -> None:
        """Remove the file, unless another launch has replaced it by another file.

        May be called again. Does nothing in a forked child.
        """
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError, _Unfit):
                if _read(self.path).nonce == self._nonce:
                    os.unlink(self.path)


def publish(
    directories: Sequence[Path], name: str, invitation: Invitation, dead: Callable[[Invitation], bool]
) -> Published:
    """Create a file called ``name`` with the contents ``invitation`` in one of the directories ``directories``.

    Use the first directory in which this is possible. If the file exists there, ``dead`` is called with its contents,
    and returns whether the launch that wrote the file has ended. If so, the file is replaced; otherwise Occupied is
    raised. Raises DdlInternalError with a message of one line if the file can be created in no directory of ``directories``,
    for example because existing files with this name belong to another user.
    """
    refusals = []
    for directory in directories:
        try:
            _prepare(directory)
            return _create(directory / name, invitation, dead)
        except _Unfit as unfit:
            refusals.append(str(unfit))
        except OSError as error:
            refusals.append(f"{directory}: {error.strerror}")
    why = "; ".join(refusals) or "this user has no home directory"
    raise DdlInternalError(f"init: no place for the file by which the ranks find each other ({why}); {_SHARED_DIR}")


def _prepare(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.name == ".ddl":  # a directory of ddl. A directory that the user has named keeps its mode
        found = directory.stat()
        if found.st_uid != os.geteuid():
            raise _Unfit(f"{directory} belongs to another user")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.chmod(directory, 0o700)


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
    """Create the file ``path`` with the contents ``data``. Raises FileExistsError if the file exists.

    If the file system allows it, the file becomes visible under ``path`` only when all data is written.
    """
    # A reader must never use half a file as if it were complete, and two launches must not both believe that they have
    # created the file. Renaming a temporary file would make only a complete file visible, but rename silently replaces
    # an existing file. So the data is written to a file without a name, and ``link`` gives that file its name. ``link``
    # fails if the name exists.
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
    # After this process has read the file and before it removes the file, another launch may replace it by a file of
    # its own. Unlinking by name would then remove the file of a running launch. So this process first renames the file,
    # which only one process can do with a given file, and reads the file again under its new name. If this is not the
    # file that was found dead, it gets its old name back.
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


def look(directories: Sequence[Path], name: str) -> tuple[list[Invitation], list[str]]:
    """Read the file called ``name`` in each directory of ``directories``.

    Return the invitations found, and one line of text for each file that cannot be trusted. Files that do not exist or
    cannot be read are skipped.
    """
    found, refused = [], []
    for directory in directories:
        try:
            found.append(_read(directory / name))
        except _Unfit as unfit:
            refused.append(str(unfit))
        except OSError:
            continue
    return found, refused


class _Unfit(Exception):
    """Raised if a rendezvous file must not be trusted.

    ``ours`` is true if the file belongs to this user, so that this process may replace the file.
    """

    def __init__(self, text: str, ours: bool = False) -> None:
        super().__init__(text)
        self.ours = ours


def _read(path: Path) -> Invitation:
    """Return the invitation in the file ``path``.

    Raises OSError if there is no file. Raises _Unfit if the file belongs to another user, if other users may access the
    file, or if the file does not contain a valid invitation.
    """
    # A network file system may remember that a file does not exist. Opening the file's directory first makes the file
    # system look for the file again.
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
