"""Keys are where they must be, for as long as they must be, and nowhere else."""

from __future__ import annotations

import logging
import os
import stat
import sys
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.control.client import connect
from ddlcore.control.credentials import Access, JobFile, KeyPair, decode_access, encode_access, read_job_file
from ddlcore.errors import DdlInternalError
from tests.control.echo import Net

SPOILT = [
    b'{"endpoint":"ipc://x","launcher_pid":1,"server_public":"","client_public":"","client_secret":""}',
    b'["ipc://x",1]',
    b"\xff\xfe",
]
ACCESS = Access("ipc://@ddl-test", 1, *("{]%?.0&" * 5 + key * 5 for key in "abc"))


@pytest.fixture(params=["memfd", "file"])
def job_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> JobFile:
    """As on Linux, and as where there is no memfd."""
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memfd")
    return JobFile(ACCESS)


def test_a_job_file_lives_until_close(job_file: JobFile) -> None:
    """It gives back what was put in, any number of times, to its owner only; then nothing is left."""
    assert read_job_file(job_file.path) == ACCESS
    assert read_job_file(job_file.path) == ACCESS
    mode = os.stat(job_file.path)
    assert (stat.S_IMODE(mode.st_mode), mode.st_uid) == (0o600, os.getuid())
    folder = Path(job_file.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    job_file.close()
    job_file.close()
    assert not Path(job_file.path).exists()
    assert str(folder).startswith("/proc") or not folder.exists()
    with pytest.raises(DdlInternalError, match=r"^the launcher is gone: .*; start the script by `ddl run`$"):
        read_job_file(job_file.path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A directory, a terminal or pipe, an empty, a huge and a foreign file: one line that names the path."""
    reader, writer = os.pipe()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "huge").write_bytes(b" " * 1_000_000)
    (tmp_path / "foreign").write_text('{"endpoint": 5}')
    try:
        paths = [str(tmp_path), *(str(tmp_path / name) for name in ("empty", "huge", "foreign")), "/dev/null"]
        if sys.platform == "linux":
            paths.append(f"/proc/{os.getpid()}/fd/{reader}")
        for path in paths:
            with pytest.raises(DdlInternalError, match=rf"^[^\n]*{path}[^\n]*`ddl run`$"):
                connect(path, 0)
    finally:
        os.close(reader)
        os.close(writer)


@given(
    st.one_of(st.binary(), st.integers(0, 100).map(lambda cut: encode_access(ACCESS)[:cut]), st.sampled_from(SPOILT))
)
def test_malformed_contents_are_one_line(data: bytes) -> None:
    """Whatever the bytes: DdlInternalError, which repeats none of them."""
    with pytest.raises(DdlInternalError, match=r"^JOB is no job file of this version of ddl; [^\n]*$") as caught:
        decode_access(data, "JOB")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_keys_differ() -> None:
    """Every pair is fresh."""
    assert len({key for _ in range(4) for key in vars(KeyPair()).values()}) == 8


def test_keys_show_nowhere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No key of a job is in its environment, in a report, a log, an error or the repr of any object of the network."""
    keys: set[str] = set()
    make_pair = zmq.curve_keypair

    def recorded() -> tuple[bytes, bytes]:
        pair = make_pair()
        keys.update(key.decode() for key in pair)
        return pair

    monkeypatch.setattr(zmq, "curve_keypair", recorded)
    caplog.set_level(logging.DEBUG)
    net = Net("ipc")
    channel, store = net.join(0)
    text = "\n".join(shown(thing, 4) for thing in (net.server, channel, store)) + repr(KeyPair())
    net.server.close()
    with pytest.raises(DdlInternalError) as gone:
        channel.receive(5.0)
    with pytest.raises(DdlInternalError) as unreadable:
        connect(net.server.job_file, 0)
    net.close()
    text += f"{gone.value!r}{unreadable.value!r}{net.reports}{caplog.text}{net.server.job_file}{net.server.endpoint}"
    assert len(keys) == 6
    assert [key for key in keys if key in text] == []


def shown(thing: object, depth: int) -> str:
    """The repr of ``thing`` and of what it holds, some levels down."""
    inner = vars(thing).values() if depth and hasattr(thing, "__dict__") else ()
    return "\n".join([repr(thing), *(shown(part, depth - 1) for part in inner)])
