"""Files are written whole or not at all, and by no name that somebody could have prepared."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ddlcore.contracts.atomic import replacing


def test_the_new_takes_the_place_of_the_old(tmp_path: Path) -> None:
    """At the end and not before; nothing else stays."""
    target = tmp_path / "file"
    target.write_text("old")
    with replacing(target) as new:
        new.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_leaves_the_old(tmp_path: Path) -> None:
    """And nothing of the new."""
    target = tmp_path / "file"
    target.write_text("old")
    with contextlib.suppress(ZeroDivisionError), replacing(target) as new:
        new.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_no_two_have_the_same_name_on_the_way(tmp_path: Path) -> None:
    """Not even two of one process: nobody can prepare a link there."""
    names = set()
    for _ in range(20):
        with replacing(tmp_path / "file") as new:
            names.add(new.name)
    assert len(names) == 20


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """What it leads to is as it was."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    with replacing(tmp_path / "file") as new:
        new.write_text("new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "file").is_symlink()
