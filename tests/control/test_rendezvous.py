"""The file by which ranks find each other: whose it is, who may read it, and when it is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ddlcore.control.credentials import Access, KeyPair
from ddlcore.control.rendezvous import (
    Invitation,
    Occupied,
    file_name,
    folders,
    has_ended,
    look,
    publish,
    start_of,
)
from ddlcore.errors import DdlInternalError

NAME = file_name("slurm", "712.0-r0")


def invitation(nonce: str = "one", pid: int = 0, kin: str = "kin") -> Invitation:
    keys = KeyPair()
    pid = pid or os.getpid()
    access = Access("tcp://127.0.0.1:9", pid, keys.public, keys.public, keys.secret)
    return Invitation(nonce, "here", kin, pid, start_of(pid), (access.endpoint,), access)


def always(answer: bool) -> Callable[[Invitation], bool]:
    return lambda found: answer


def test_it_is_this_users_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    """0600 under any umask, complete when it appears, without a trace afterwards."""
    before = os.umask(0)
    try:
        published = publish([tmp_path], NAME, invitation(), always(False))
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["ddl-slurm-712.0-r0.rendezvous"]
    assert published.path.stat().st_mode & 0o7777 == 0o600
    assert look([tmp_path], NAME)[0][0].nonce == "one"
    published.remove()
    published.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_repr_shows_no_key() -> None:
    """Whoever logs it gives nothing away."""
    one = invitation()
    assert one.access.client_secret not in repr(one)


def test_the_users_own_directory_is_closed(tmp_path: Path) -> None:
    """Made with 0700, and closed again where it was open."""
    home = tmp_path / ".ddl"
    publish([home], NAME, invitation(), always(False)).remove()
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o755)
    publish([home], NAME, invitation(), always(False)).remove()
    assert home.stat().st_mode & 0o777 == 0o700


def test_the_first_place_that_takes_it(tmp_path: Path) -> None:
    """A directory that cannot be made or written is passed by; with none left, it says so."""
    (tmp_path / "file").write_text("")
    published = publish([tmp_path / "file" / "below", tmp_path], NAME, invitation(), always(False))
    assert published.path.parent == tmp_path
    with pytest.raises(DdlInternalError, match=r"no place for the file .* set DDL_RENDEZVOUS_DIR"):
        publish([tmp_path / "file" / "below"], NAME, invitation(), always(False))


def test_a_stale_one_is_replaced(tmp_path: Path) -> None:
    """What the dead left behind goes, and the dead do not take away what replaced it."""
    stale = publish([tmp_path], NAME, invitation("stale"), always(False))
    publish([tmp_path], NAME, invitation("fresh"), always(True))
    stale.remove()
    assert [one.nonce for one in look([tmp_path], NAME)[0]] == ["fresh"]
    assert len(list(tmp_path.iterdir())) == 1


def test_one_whose_launch_is_alive_stays(tmp_path: Path) -> None:
    """The newcomer hears of it, and leaves nothing of its own."""
    publish([tmp_path], NAME, invitation("alive"), always(False))
    with pytest.raises(Occupied) as caught:
        publish([tmp_path], NAME, invitation("second"), always(False))
    assert caught.value.invitation.nonce == "alive"
    assert [one.nonce for one in look([tmp_path], NAME)[0]] == ["alive"]
    assert len(list(tmp_path.iterdir())) == 1


def test_one_that_was_replaced_meanwhile_stays(tmp_path: Path) -> None:
    """Two newcomers judge the same file dead: the slower one does not take the quicker one's away."""
    publish([tmp_path], NAME, invitation("stale"), always(False))

    def dead(found: Invitation) -> bool:
        if found.nonce == "stale":
            publish([tmp_path], NAME, invitation("quick"), always(True))
            return True
        return False

    with pytest.raises(Occupied) as caught:
        publish([tmp_path], NAME, invitation("slow"), dead)
    assert caught.value.invitation.nonce == "quick"
    assert [one.nonce for one in look([tmp_path], NAME)[0]] == ["quick"]
    assert len(list(tmp_path.iterdir())) == 1


def test_what_others_can_read_is_not_trusted(tmp_path: Path) -> None:
    """Nor a link, nor what is no invitation; rank 0 replaces what is its user's own."""
    good = publish([tmp_path], NAME, invitation("open"), always(False)).path
    good.chmod(0o640)
    assert look([tmp_path], NAME) == ([], [f"{good} can be read or written by others"])
    publish([tmp_path], NAME, invitation("closed"), always(False))
    assert [one.nonce for one in look([tmp_path], NAME)[0]] == ["closed"]
    good.write_text("{}")
    assert look([tmp_path], NAME)[0] == []
    assert "no file of this version" in look([tmp_path], NAME)[1][0]
    good.rename(tmp_path / "elsewhere")
    good.symlink_to(tmp_path / "elsewhere")
    found, refused = look([tmp_path], NAME)
    assert found == [] and "symbolic links" in refused[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_what_is_anothers_is_not_trusted(tmp_path: Path) -> None:
    """It is neither read nor replaced; the line says whose it is."""
    path = publish([tmp_path], NAME, invitation(), always(False)).path
    os.chown(path, 12345, 12345)
    assert look([tmp_path], NAME) == ([], [f"{path} belongs to another user"])
    with pytest.raises(DdlInternalError, match="belongs to another user"):
        publish([tmp_path], NAME, invitation(), always(True))
    assert path.stat().st_uid == 12345


def test_a_file_without_a_known_shape_shows_no_key(tmp_path: Path) -> None:
    """A broken one is refused in a line that repeats nothing of it."""
    path = publish([tmp_path], NAME, invitation(), always(False)).path
    secret = msgspec.json.decode(path.read_bytes())["access"]["client_secret"]
    path.write_bytes(path.read_bytes()[:-2])
    (refused,) = look([tmp_path], NAME)[1]
    assert secret not in refused


def test_who_has_ended_is_seen_where_it_can_be() -> None:
    """By number and start: a number may be used again; from another host nothing is seen."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = invitation(pid=child.pid)
    assert not has_ended(one, "kin")
    child.communicate(b"\n", timeout=80)
    assert has_ended(one, "kin")
    assert not has_ended(one, "another host")
    if start_of(os.getpid()):
        assert has_ended(msgspec.structs.replace(invitation(), started="1"), "kin")


def test_where_it_may_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that was named, alone; else that of the batch job, then the user's own."""
    monkeypatch.setenv("HOME", "/home/marie")
    own = Path("/home/marie/.ddl")
    assert folders("/scratch", {"SLURM_SUBMIT_DIR": "/work"}) == [Path("/scratch")]
    assert folders("", {"SLURM_SUBMIT_DIR": "/work"}) == [Path("/work"), own]
    assert folders("", {}) == [own]


def test_names() -> None:
    """What a file name cannot show is told apart by a digest."""
    assert file_name("slurm", "barnard-712.0-r1") == "ddl-slurm-barnard-712.0-r1.rendezvous"
    strange = {file_name("torchrun", launch) for launch in ("a/b", "a:b", "a_b", "x" * 300, "x" * 301)}
    assert len(strange) == 5
    assert all("/" not in name and len(name) < 160 for name in strange)
