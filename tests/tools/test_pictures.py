"""The pictures of ddl's pages and plots: each can be made again, is small, and stands on a page."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tools.pictures import LARGEST_BYTES, PICTURES, main, shrink

IMAGES = ROOT / "docs" / "images"


def test_every_picture_has_a_maker() -> None:
    """And every maker its picture, which a page of the documentation shows."""
    # Read as text: that tool imports a browser's driver, which not every system has.
    tool = (ROOT / "tools" / "dashboard_images.py").read_text(encoding="utf-8")
    makers = [*PICTURES, *re.findall(r'^    "(dashboard[a-z-]*)":', tool, re.MULTILINE)]
    assert sorted(path.stem for path in IMAGES.glob("*.png")) == sorted(makers)
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in makers if f"](images/{name}.png)" not in pages] == []


@pytest.mark.parametrize("path", sorted(IMAGES.iterdir()), ids=lambda path: path.name)
def test_pictures_are_small(path: Path) -> None:
    """A clone brings all of them."""
    assert path.stat().st_size < LARGEST_BYTES


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_a_picture_can_be_read(name: str) -> None:
    """A PNG, wide enough for text to be readable, with few colours."""
    data = (IMAGES / f"{name}.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert width >= 390 and height >= 390 and (depth, kind) == (8, 3)


def test_a_picture_is_made_smaller(tmp_path: Path) -> None:
    """What it shows stays; one that is still too large is refused."""
    image = pytest.importorskip("PIL.Image", reason="pillow comes with matplotlib")
    path = tmp_path / "x.png"
    image.new("RGB", (400, 300), "#0072b2").save(path)
    shrink(path)
    with image.open(path) as small:
        assert small.size == (400, 300) and small.convert("RGB").getpixel((5, 5)) == (0, 0x72, 0xB2)
    import numpy as np

    noise = np.random.default_rng(1).integers(0, 256, (700, 700, 3), np.uint8)
    image.fromarray(noise).save(path)
    with pytest.raises(SystemExit, match="more than 150000"):
        shrink(path)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names that there are."""
    with pytest.raises(SystemExit):
        main(["timelime"])
    assert "there is no picture called timelime; there are timeline, " in capsys.readouterr().err
