"""Keep the keys of one job in a file that only this user's processes can read and that disappears with the launcher."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import zmq

from ddlcore.errors import DdlInternalError

_LARGEST_BYTES = 1 << 16  # a job file is under 1 KiB; a larger file is something else
_Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(ipc|tcp)://.")]
_Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]  # Z85 of 32 bytes
_NEXT = "start the script by `ddl run`"


class KeyPair:
    """A new pair of keys for ZeroMQ's CURVE encryption, as Z85 text. The repr shows neither key."""

    def __init__(self, public: str = "", secret: str = "") -> None:
        """Take a pair that another process has made; without one, make a new pair."""
        if not public:
            public, secret = (key.decode() for key in zmq.curve_keypair())
        self.public, self.secret = public, secret

    def __repr__(self) -> str:
        return "KeyPair(…)"


class Access(msgspec.Struct, frozen=True):
    """The address of the coordinator, and the keys that a rank needs to be admitted there. The repr shows no key."""

    endpoint: _Endpoint
    launcher_pid: int  # valid only on the launcher's host
    server_public: _Key
    client_public: _Key
    client_secret: _Key

    def __repr__(self) -> str:
        return f"Access({self.endpoint!r}, launcher_pid={self.launcher_pid}, keys …)"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("endpoint", self.endpoint), ("launcher_pid", self.launcher_pid)]


def encode_access(access: Access) -> bytes:
    """Return ``access`` as one line of JSON. The line contains secret keys."""
    return msgspec.json.encode(access)


def decode_access(data: bytes, where: str) -> Access:
    """Return the Access that ``data``, the contents of a job file, describes.

    If ``data`` is malformed, raises DdlInternalError with a message of one line. The message contains ``where``, the
    path of the file, but shows nothing of ``data``.
    """
    try:
        return msgspec.json.decode(data, type=Access)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # raised below, outside of this clause: a chained cause would show parts of keys in a traceback
    raise DdlInternalError(f"{where} is no job file of this version of ddl; {_NEXT}")


class JobFile:
    """A file with the endpoint and keys of a job. Processes of this user can read it at ``path`` until ``close``.

    On Linux the file is a memfd of this process, and ``path`` leads to it through /proc. A memfd disappears with this
    process even after kill -9, and leaves no file behind. On other systems it is an ordinary file in a new temporary
    directory.
    """

    def __init__(self, access: Access) -> None:
        self._fd, self._directory, self._pid = -1, "", os.getpid()
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            self._fd = os.memfd_create("ddl-job")
            os.fchmod(self._fd, 0o600)
            os.write(self._fd, encode_access(access))
            self.path = f"/proc/{self._pid}/fd/{self._fd}"
        else:
            self._directory = tempfile.mkdtemp(prefix="ddl-job-")  # 0700
            self.path = os.path.join(self._directory, "job.json")
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as file:
                file.write(encode_access(access))

    def close(self) -> None:
        """Remove the job file. May be called again. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""


def read_job_file(path: str) -> Access:
    """Return the contents of the job file ``path``.

    Raises DdlInternalError with a message of one line if the launcher is gone (the file does not exist), if the file
    cannot be read, or if ``path`` is not a job file.
    """
    try:
        data = _read_small_file(Path(path))
    except FileNotFoundError:
        raise DdlInternalError(f"the launcher is gone: its job file {path} is no longer there; {_NEXT}") from None
    except OSError as error:
        raise DdlInternalError(f"the job file {path} cannot be read: {error.strerror}; {_NEXT}") from None
    return decode_access(data, path)


def _read_small_file(path: Path) -> bytes:
    # The process id of a launcher that has ended may belong to another process by now, and the descriptor with the
    # same number may be a terminal or a pipe. Without O_NONBLOCK and the check for a regular file this could hang.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        return file.read(_LARGEST_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
